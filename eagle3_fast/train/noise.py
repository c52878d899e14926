"""Noise on the verifier's hidden states while training, as speculators 0.3 to 0.8 adds it (contract, section 5.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle3_fast.config import RunConfig


@dataclass(frozen=True)
class Noise:
    """x + U(-std, std) or x + N(0, std^2), absolute: whatever the size of the states.

    The noise of a row depends on seed, epoch and row alone, so it is the same after a resume, on any number of ranks and in any worker.
    """

    std: float
    kind: str  # "uniform" or "gaussian"
    aux: bool  # on the aux states (speculators: hidden_states)
    last: bool  # on the last state (verifier_last_hidden_states)
    seed: int

    def added(self, epoch: int, states: Tensor, row: int) -> Tensor:
        """`states` [T, n_aux + 1, G] with noise, float32. `row` counts in the whole dataset."""
        chosen = slice(0 if self.aux else -1, None if self.last else -1)
        seed = int(np.random.SeedSequence((self.seed, epoch, row)).generate_state(1, np.uint64)[0])
        generator = torch.Generator().manual_seed(seed)
        noisy = states.to(torch.float32, copy=True)
        drawn = torch.empty_like(noisy[:, chosen], memory_format=torch.contiguous_format)
        if self.kind == "gaussian":
            drawn.normal_(0, self.std, generator=generator)
        else:
            drawn.uniform_(-self.std, self.std, generator=generator)
        noisy[:, chosen] += drawn
        return noisy


def noise_of(config: RunConfig) -> Noise | None:
    """The noise of a run; None where there is none. `engine.compat` decides what the run file leaves open.

    0.3: uniform, 0.05, on aux and last states. 0.9: none unless `noise_std` is given, then on the aux states, as in 0.7 and 0.8.
    """
    section, old = config.engine, config.engine.compat == "0.3"
    std = section.noise_std if section.noise_std is not None else 0.05 if old else 0.0
    if std == 0:
        return None
    tensors = section.noise_tensors or (["hidden_states", "verifier_last_hidden_states"] if old else ["hidden_states"])
    aux, last = (name in tensors for name in ("hidden_states", "verifier_last_hidden_states"))
    return Noise(std, section.noise_kind, aux, last, config.train.seed)
