"""Is a folder a servable draft? Everything that an engine would guess, skip or leave random without a word is looked for here.

vLLM leaves a missing tensor at its initial value and fills a missing key with its own default (contract, section 9.1); such a
draft loads, answers correctly, and none of its drafts are accepted. The check therefore asks for exactly the tensors that
config.json implies and for every key whose default differs between readers, and runs the draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3_fast.errors import InputError
from eagle3_fast.files import read_json
from eagle3_fast.model.config import DraftConfig, parse_draft_config
from eagle3_fast.model.draft import VERIFIER_PARTS, Draft, load_draft, read_tensors
from eagle3_fast.model.layers import Attend

PROBE_ROWS = 8


@dataclass(frozen=True)
class CheckReport:
    """The facts of a folder that passed."""

    folder: Path
    tensors: int
    parameters: int  # values of the float tensors, the embedding included
    dtype: str
    draft_vocab_size: int
    verifier_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    verifier: str

    def __str__(self) -> str:
        return (
            f"servable draft for {self.verifier}: {self.tensors} tensors, {self.parameters / 1e6:.1f}M parameters in "
            f"{self.dtype}, vocabulary {self.draft_vocab_size} of {self.verifier_vocab_size}, "
            f"reads layers {list(self.aux_layer_ids)}"
        )


def check(folder: str | Path) -> CheckReport:
    """Validate an exported draft.

    Raises:
        InputError: one line that lists every fault found: config keys, tensor names, shapes, dtypes, values that are not finite
            or were never filled, a vocabulary mapping that contradicts itself.
    """
    folder = Path(folder)
    raw = read_json(folder / "config.json")
    config = parse_draft_config(raw, str(folder / "config.json"))
    tensors = read_tensors(folder / "model.safetensors")
    faults = [*config_faults(raw, config), *file_faults(folder), *tensor_faults(config, tensors, raw.get("dtype"))]
    if not faults:
        faults += mapping_faults(config, tensors) + probe_faults(load_draft(folder))
    if faults:
        raise InputError(f"{folder}: " + "; ".join(faults))
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    return CheckReport(
        folder=folder,
        tensors=len(tensors),
        parameters=sum(tensor.numel() for tensor in floats),
        dtype=raw["dtype"],
        draft_vocab_size=config.draft_vocab_size,
        verifier_vocab_size=config.verifier_vocab_size,
        aux_layer_ids=tuple(config.eagle_aux_hidden_state_layer_ids or ()),
        verifier=str(config.speculators_config.verifier.name_or_path),
    )


def config_faults(raw: dict[str, Any], config: DraftConfig) -> Iterator[str]:
    """Keys that a reader needs, or would fill with a default that is not ours."""
    layer: dict[str, Any] = raw["transformer_layer_config"]
    if "model_type" in raw:
        yield "config.json has model_type at its top, which hides it from vLLM's detection: remove it"
    for key in ("norm_before_residual", "draft_vocab_size"):
        if key not in raw:
            yield f"{key} is missing, and readers disagree on its default"
    for key in (
        "model_type",
        "head_dim",
        "num_key_value_heads",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_theta",
        "rope_parameters",
    ):
        if key not in layer:
            yield f"transformer_layer_config.{key} is missing, and readers disagree on its default"
    if layer.get("rope_theta", config.transformer_layer_config.rope_parameters["rope_theta"]) != _base(layer):
        yield f"rope_theta {layer['rope_theta']} contradicts rope_parameters.rope_theta {_base(layer)}"
    if not config.eagle_aux_hidden_state_layer_ids:
        yield "eagle_aux_hidden_state_layer_ids is missing: engines would guess the verifier's layers"
    elif layer.get("model_type") == "llama" and layer.get("num_aux_hidden_states", 3) != config.num_aux:
        yield f"transformer_layer_config.num_aux_hidden_states must be {config.num_aux}: vLLM's llama loader goes by it"
    if not config.speculators_config.verifier.name_or_path:
        yield "speculators_config.verifier.name_or_path is empty: vLLM takes model and tokenizer from it"
    if "speculative_tokens" not in raw["speculators_config"]["proposal_methods"][0]:
        yield "speculators_config.proposal_methods.0.speculative_tokens is missing"
    if raw.get("tie_word_embeddings") or layer.get("tie_word_embeddings"):
        yield "tie_word_embeddings is true: the draft has a head of its own"
    if "quantization_config" in raw or "quantization_config" in layer:
        yield "config.json has a quantization_config, the tensors are not quantised"
    if not raw.get("dtype") or raw.get("dtype") != raw.get("torch_dtype"):
        yield f"dtype ({raw.get('dtype')}) and torch_dtype ({raw.get('torch_dtype')}) must both be there and be equal"


def _base(layer: dict[str, Any]) -> Any:
    return (layer.get("rope_parameters") or {}).get("rope_theta", layer.get("rope_theta"))


def file_faults(folder: Path) -> list[str]:
    """Engines read every weight file of the folder."""
    others = sorted(
        path.name
        for path in folder.glob("*")
        if path.suffix in (".safetensors", ".bin", ".pt") and path.name != "model.safetensors"
    )
    return [f"{', '.join(others)}: engines would load it beside model.safetensors; remove it"] if others else []


def implied_tensors(config: DraftConfig) -> dict[str, Tensor]:
    """Name, shape and kind (float, int64 or bool) of every tensor that this config implies, without memory."""
    with torch.device("meta"):
        state = Draft(config).state_dict()
    return {name: tensor for name, tensor in state.items() if name not in VERIFIER_PARTS}


def tensor_faults(config: DraftConfig, tensors: dict[str, Tensor], dtype: str | None) -> list[str]:
    """Names, shapes, dtypes and values of the stored tensors against those that the config implies."""
    implied = implied_tensors(config)
    faults = [f"{name} is missing" for name in sorted(implied.keys() - tensors.keys())]
    faults += [f"{name} is not part of this config" for name in sorted(tensors.keys() - implied.keys())]
    for name in sorted(implied.keys() & tensors.keys()):
        want, have = implied[name], tensors[name]
        kind = dtype if want.is_floating_point() else str(want.dtype).removeprefix("torch.")
        stored = str(have.dtype).removeprefix("torch.")
        if have.shape != want.shape:
            faults.append(f"{name} is {list(have.shape)}, the config asks for {list(want.shape)}")
        if stored != kind:
            faults.append(f"{name} is {stored}, config.json asks for {kind}")
        if have.is_floating_point() and not have.isfinite().all():
            faults.append(f"{name} has values that are not finite")
        if have.ndim == 2 and not have.any():
            faults.append(f"{name} is all zeros: it was never filled")
    return faults


def mapping_faults(config: DraftConfig, tensors: dict[str, Tensor]) -> list[str]:
    """d2t (offsets) and t2d (mask) describe one set of verifier ids, in ascending order."""
    if not config.reduced_vocab:
        return []
    ids = tensors["d2t"] + torch.arange(config.draft_vocab_size)
    faults = []
    if int(ids.min()) < 0 or int(ids.max()) >= config.verifier_vocab_size:
        faults.append(f"d2t maps to ids {int(ids.min())}..{int(ids.max())}, the verifier has 0..{config.verifier_vocab_size - 1}")
    if not (ids.diff() > 0).all():
        faults.append("d2t maps to verifier ids that are not ascending and distinct")
    if not torch.equal(tensors["t2d"].nonzero().flatten(), ids):
        faults.append(f"t2d marks {int(tensors['t2d'].sum())} ids that are not the {len(ids)} ids of d2t")
    return faults


def probe_faults(draft: Draft) -> list[str]:
    """Two draft steps on random input give finite logits that differ from row to row."""
    faults = []
    for step, logits in enumerate(probe_logits(draft)):
        if not logits.isfinite().all():
            faults.append(f"logits of draft step {step} are not finite on random input")
        elif torch.equal(logits[0], logits[-1]):
            faults.append(f"logits of draft step {step} do not depend on the input")
    return faults


@torch.no_grad()
def probe_logits(draft: Draft) -> list[Tensor]:
    """Logits [rows, V] of two draft steps on random tokens and aux states, the same for every draft of the same sizes."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(draft.config.verifier_vocab_size, (PROBE_ROWS,), generator=generator)
    hidden = draft.fuse(torch.randn(PROBE_ROWS, draft.fc.in_features, generator=generator))
    attend: list[Attend] = [causal_attention] * len(draft.layers)
    found = []
    for step in range(2):
        normed, hidden = draft.step(draft.embed(tokens), hidden, torch.arange(PROBE_ROWS) + step, attend)
        found.append(normed @ draft.lm_head.weight.T)
    return found


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    q, k, v = (part.transpose(0, 1)[None] for part in (queries, keys, values))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
