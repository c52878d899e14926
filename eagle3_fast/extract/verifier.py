"""The verifier itself, run with transformers: hidden states of chosen layers, and cached passes for speculative decoding."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from eagle3_fast.errors import InputError
from eagle3_fast.extract.shape import load_config, model_class, text_decoder, verifier_shape
from eagle3_fast.precision import arithmetic_dtype

UNCROPPABLE = ("linear", "mamba", "conv", "hybrid", "recurrent")
"""Words in `layer_types` that mean a running state, which cannot forget its last tokens."""


def default_layer_ids(num_layers: int) -> list[int]:
    """The aux layers of EAGLE-3, [2, n // 2, n - 3]; layer id j = state after j decoder layers.

    Raises InputError for a verifier so shallow that they are not three rising ids.
    """
    ids = [2, num_layers // 2, num_layers - 3]
    if not 0 <= ids[0] < ids[1] < ids[2]:
        raise InputError(
            f"a verifier of {num_layers} layers is too shallow for the default aux layers {ids}; "
            f"give train.draft.target_layer_ids yourself, for example {sorted({1, num_layers // 2, num_layers - 1})}"
        )
    return ids


def checked_layer_ids(layer_ids: Sequence[int] | None, num_layers: int) -> list[int]:
    """`layer_ids` (default: `default_layer_ids`) in ascending order, the order in which serving engines concatenate them.

    Raises InputError when empty, not distinct, or outside 0..num_layers.
    """
    if layer_ids is None:
        return default_layer_ids(num_layers)
    if not layer_ids or len(set(layer_ids)) < len(layer_ids) or not all(0 <= j <= num_layers for j in layer_ids):
        raise InputError(f"train.draft.target_layer_ids {list(layer_ids)}: must be distinct and within 0..{num_layers}")
    return sorted(layer_ids)


class Verifier:
    """A frozen verifier.

    Args:
        path: folder, or an id in the Hugging Face cache.
        layer_ids: aux layers; None for the default ones.
        dtype: of the states; None for the config's. Computed in it where the device does that well (`precision`).
        device: None for the GPU where there is one.

    Attributes:
        shape: what kind of model it is. layer_ids: ascending aux layers. num_layers: n. config: the text part's config object.
        dtype: what it computes in. state_dtype: of the states.
    """

    def __init__(
        self,
        path: str | Path,
        layer_ids: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
        device: str | None = None,
    ) -> None:
        self.shape = verifier_shape(path, trust_remote_code)
        self.num_layers = self.shape.num_hidden_layers
        self.layer_ids = checked_layer_ids(layer_ids, self.num_layers)
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        config = load_config(self.shape.path, trust_remote_code)
        asked = dtype or self.shape.dtype
        self.model = model_class(config).from_pretrained(
            self.shape.path,
            dtype=arithmetic_dtype(asked, self.device) if asked else "auto",
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
        self.model.to(self.device).eval().requires_grad_(False)
        self.config = self.model.config.get_text_config(decoder=True)
        self.dtype: torch.dtype = self.model.dtype
        self.state_dtype = asked or self.dtype
        self._decoder, self._layers = text_decoder(self.model)
        # transformers renamed `past_key_values` to `cache` in 5.x
        self._cache_name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    @torch.inference_mode()
    def hidden_states(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """States of each sequence: [T, n_aux + 1, G] on the CPU, aux layers ascending, then the state before the final norm.

        `batch` holds int64 [T] each, T >= 1, of any lengths. A sequence's states do not depend on the others. No head is run.
        """
        input_ids, mask = self._padded(batch)
        with self._captured() as states:
            self._decoder(input_ids=input_ids, attention_mask=mask, use_cache=False)
        stacked = self._stacked(states)
        return [stacked[i, : len(ids)].to("cpu", self.state_dtype, copy=True) for i, ids in enumerate(batch)]

    @torch.inference_mode()
    def logits(self, input_ids: Tensor) -> Tensor:
        """The verifier's own logits of one sequence, int64 [T] to float32 [T, V] on the CPU, its scale and cap included."""
        return self.model(input_ids=input_ids[None].to(self.device), use_cache=False).logits[0].float().cpu()

    @torch.inference_mode()
    def forward_cached(self, input_ids: Tensor, cache: DynamicCache) -> tuple[Tensor, Tensor]:
        """Append int64 [1, n] to `cache`: logits float32 [n, V] and states [n, n_aux + 1, G], on the verifier's device."""
        with self._captured() as states:
            output = self.model(input_ids=input_ids.to(self.device), use_cache=True, **{self._cache_name: cache})
        return output.logits[0].float(), self._stacked(states)[0]

    def new_cache(self) -> DynamicCache:
        """An empty cache for `forward_cached` that `crop` can shorten. Raises InputError where layers are recurrent."""
        kinds = getattr(self.config, "layer_types", None) or []
        if any(word in kind for kind in kinds for word in UNCROPPABLE):
            raise InputError(
                f"{self.shape.path}: has recurrent layers ({', '.join(sorted(set(kinds)))}), which cannot take tokens back"
            )
        cache = DynamicCache(config=self.config)
        if not hasattr(cache, "activate_past_recording"):  # transformers before 5.2x: only full layers can be cropped
            return DynamicCache()
        cache.activate_past_recording()
        return cache

    @staticmethod
    def crop(cache: DynamicCache, length: int) -> None:
        """Forget all but the first `length` tokens of `cache`."""
        surplus = cache.get_seq_length() - length
        if surplus > 0:
            cache.crop(-surplus)

    def _padded(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([len(ids) for ids in batch])
        input_ids = torch.nn.utils.rnn.pad_sequence(list(batch), batch_first=True)
        mask = (torch.arange(input_ids.shape[1])[None] < lengths[:, None]).long()
        return input_ids.to(self.device), mask.to(self.device)

    @contextmanager
    def _captured(self) -> Iterator[dict[int, Tensor]]:
        """While open, one forward pass fills the dict: layer id to state [B, T, G]."""
        states: dict[int, Tensor] = {}

        def before_first(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[0] = args[0] if args else kwargs["hidden_states"]

        def after(layer_id: int) -> Any:
            def hook(module: Any, args: Any, output: Any) -> None:
                states[layer_id] = output[0] if isinstance(output, tuple) else output

            return hook

        wanted = sorted({*self.layer_ids, self.num_layers} - {0})
        handles = [self._layers[j - 1].register_forward_hook(after(j)) for j in wanted]
        if 0 in self.layer_ids:
            handles.append(self._layers[0].register_forward_pre_hook(before_first, with_kwargs=True))
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    def _stacked(self, states: dict[int, Tensor]) -> Tensor:
        """[B, T, n_aux + 1, G]."""
        last = states[self.num_layers]
        if last.ndim != 3 or last.shape[-1] != self.shape.hidden_size:
            raise InputError(
                f"{self.shape.path}: a decoder layer gives shape {tuple(last.shape)} instead of [batch, tokens, "
                f"{self.shape.hidden_size}]: families with several residual streams cannot be verifiers here"
            )
        return torch.stack([states[j] for j in self.layer_ids] + [last], dim=2)
