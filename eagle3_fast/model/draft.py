"""The draft's parameters under their checkpoint names, and one step of it (contract, sections 2.1 and 2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from eagle3_fast.errors import InputError
from eagle3_fast.files import written_aside
from eagle3_fast.model.config import DraftConfig, load_draft_config, save_draft_config
from eagle3_fast.model.layers import Attend, DraftLayer, EmbeddingShare, RMSNorm, RotaryTable

VERIFIER_PARTS = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Parts that belong to the verifier: needed to score the draft, never saved with it."""


class Head(nn.Module):
    """A vocabulary projection, [rows, size]; it owns its weight and nothing else."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, size))


class Draft(nn.Module):
    """An EAGLE-3 draft together with the frozen verifier parts that score it.

    Trainable: everything but `embed_tokens`, the verifier's head and norm, and (where `train_head` is false, as in speculators
    0.9) the draft's own head. `t2d` and `d2t` exist only where the draft vocabulary is smaller than the verifier's.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig, train_head: bool = False) -> None:
        super().__init__()
        layer, size, verifier_size = (
            config.transformer_layer_config,
            config.transformer_layer_config.hidden_size,
            config.verifier_hidden_size,
        )
        self.config = config
        self.embed_tokens = Head(config.verifier_vocab_size, size)
        self.fc = nn.Linear(config.num_aux * verifier_size, size, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.num_aux * verifier_size, layer.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(verifier_size, layer.rms_norm_eps) for _ in range(config.num_aux))
        self.layers = nn.ModuleList(
            DraftLayer(layer, index, config.norm_before_residual) for index in range(layer.num_hidden_layers)
        )
        self.norm = RMSNorm(size, layer.rms_norm_eps)
        self.lm_head = Head(config.draft_vocab_size, size)
        self.verifier_norm = RMSNorm(verifier_size, layer.rms_norm_eps)
        self.verifier_lm_head = Head(config.draft_vocab_size, verifier_size)
        self.verifier_softcap = 0.0
        self.rotary = RotaryTable(layer)
        if config.reduced_vocab:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.verifier_vocab_size, dtype=torch.bool))
        for frozen in (self.embed_tokens, self.verifier_lm_head, self.verifier_norm):
            frozen.requires_grad_(False)
        self.lm_head.requires_grad_(train_head)

    def initialise(self, seed: int) -> None:
        """Linear weights from N(0, initializer_range), biases 0, norms 1; frozen parts and the head are left as they are."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                std = self.config.transformer_layer_config.initializer_range
                module.weight.data.copy_(torch.empty(module.weight.shape).normal_(0.0, std, generator=generator))
                if module.bias is not None:
                    module.bias.data.zero_()

    def recompute(self, wanted: bool) -> None:
        """Whether the layers keep the activations of their feed-forward halves or run them again in the backward pass."""
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            layer.recompute = wanted

    def embed(self, token_ids_N: Tensor) -> EmbeddingShare:
        """Tokens (ids of the verifier's vocabulary) as what they add to the first layer's projections; no gradient in the embedding."""
        first = self.layers[0]
        assert isinstance(first, DraftLayer)
        return first.embedding_share(F.embedding(token_ids_N, self.embed_tokens.weight.detach()))

    def fuse(self, aux_NF: Tensor) -> Tensor:
        """The aux hidden states of each row as one hidden state [N, H]: fc after the norm that the config asks for."""
        if self.config.norm_before_fc:
            aux_NF = self.input_norm(aux_NF)
        if self.config.fc_norm:
            parts = aux_NF.chunk(self.config.num_aux, dim=-1)
            aux_NF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux_NF)

    def step(
        self,
        share: EmbeddingShare,
        hidden_NH: Tensor,
        position_ids_N: Tensor,
        attend: Sequence[Attend],
        queries: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One pass through the layers: (rows for the head, hidden state for the next step), both [rows, H].

        `share` is `embed` of the N tokens. `attend` holds one function a layer; `queries` (indices into N) names the rows that go
        beyond the last layer's keys.
        """
        rotary = self.rotary(position_ids_N)
        *inner, last = zip(self.layers, attend, strict=True)
        for layer, see in inner:
            hidden_NH = layer(share, hidden_NH, rotary, see)
        layer, see = last
        out = layer(share, hidden_NH, rotary, see, queries)
        normed = self.norm(out)
        return normed, normed if self.config.norm_output else out

    def draft_id(self, verifier_ids: Tensor) -> Tensor:
        """Ids of the verifier's vocabulary as draft-vocabulary ids, -1 where the draft has none."""
        if not self.config.reduced_vocab:
            return verifier_ids
        return torch.where(self.t2d[verifier_ids], self.t2d.cumsum(0)[verifier_ids] - 1, -1)

    def verifier_id(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids as ids of the verifier's vocabulary."""
        return draft_ids + self.d2t[draft_ids] if self.config.reduced_vocab else draft_ids

    def exported_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Everything a server needs, floats in `dtype`; the verifier's own parts stay out."""
        state = {name: value for name, value in self.state_dict().items() if name not in VERIFIER_PARTS}
        return {name: value.to(dtype if value.is_floating_point() else value.dtype).contiguous() for name, value in state.items()}


def save_draft(draft: Draft, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `config.json` and `model.safetensors` in the layout of speculators; each file is whole or absent."""
    folder = Path(folder)
    with written_aside(folder / "model.safetensors") as partial:
        save_file(draft.exported_tensors(dtype), partial, metadata={"format": "pt"})
    save_draft_config(draft.config, folder, str(dtype).removeprefix("torch."))


def load_draft(folder: str | Path, train_head: bool = False) -> Draft:
    """Read a draft folder into float32 parameters. Verifier parts stay zero: `train.start` places them.

    Raises InputError naming every missing, unexpected or misshaped tensor.
    """
    draft = Draft(load_draft_config(folder), train_head)
    path = Path(folder) / "model.safetensors"
    load_tensors(draft, read_tensors(path), str(path), missing_ok=VERIFIER_PARTS)
    return draft


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; a draft folder holds config.json and model.safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    except SafetensorError as error:
        raise InputError(f"{path}: not a whole safetensors file ({error}); restore it") from None


def load_tensors(draft: Draft, tensors: dict[str, Tensor], where: str, missing_ok: tuple[str, ...] = ()) -> None:
    """Copy tensors into the draft by name; every mismatch of names or shapes is reported at once."""
    own = draft.state_dict()
    faults = [f"{name} is missing" for name in own.keys() - tensors.keys() - set(missing_ok)]
    faults += [f"{name} is not part of this config" for name in tensors.keys() - own.keys()]
    faults += [
        f"{name} is {list(tensors[name].shape)}, the config asks for {list(own[name].shape)}"
        for name in own.keys() & tensors.keys()
        if own[name].shape != tensors[name].shape
    ]
    if faults:
        raise InputError(f"{where}: " + "; ".join(sorted(faults)))
    for name in own.keys() & tensors.keys():
        own[name].copy_(tensors[name])
