"""Files of `.pt` samples for tests, in both formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eagle3_fast.records import HiddenStates


def fields(sample: HiddenStates, loss_mask: torch.Tensor, version: int = 1) -> dict[str, Any]:
    """A sample as speculators 0.3 saves it."""
    states = sample.states
    tokens = {"input_ids": sample.token_ids, "loss_mask": loss_mask}
    if version == 0:
        return {**tokens, "hidden_state": states[:, :-1].flatten(1).clone(), "target": states[:, -1].clone()}
    return {**tokens, "hidden_states": [states[:, layer].clone() for layer in range(states.shape[1])]}


def sample(length: int, layers: int = 4, width: int = 8, seed: int = 0) -> HiddenStates:
    """Random bfloat16 states [length, layers, width]."""
    states = torch.randn(length, layers, width, generator=torch.Generator().manual_seed(seed))
    return HiddenStates(torch.arange(length) + seed, states.bfloat16())


def write(path: Path, length: int = 5, version: int = 1, seed: int = 0, **changes: Any) -> Path:
    """One file; `changes` are other values of its fields, None for a field that is left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = fields(sample(length, seed=seed), torch.ones(length, dtype=torch.int64), version) | changes
    torch.save({name: value for name, value in whole.items() if value is not None}, path)
    return path
