"""Does the verifier's own head, on these hidden states, say what the verifier says?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor

from eagle3_fast.errors import InputError
from eagle3_fast.extract.sources import token_ids
from eagle3_fast.extract.store import read_sample
from eagle3_fast.extract.weights import VerifierWeights
from eagle3_fast.records import HiddenStates

CHECKED_ROWS = 8
CHECKED_TOKENS = 256
"""The self-check looks at the first tokens of rows spread evenly over the dataset."""


@dataclass(frozen=True)
class Testimony:
    """What a verifier says about a few prefixes, each int64 [T]."""

    samples: list[HiddenStates]  # states computed as the run will compute them
    argmax: list[Tensor]  # as `check_states` takes it
    distance: float  # of logits, or log-probabilities, made of these states: root mean square, relative to the verifier's own
    tolerance: float  # the largest distance that rounding explains


def check_states(samples: Sequence[HiddenStates], weights: VerifierWeights, verifier_argmax: Sequence[Tensor]) -> float:
    """Share of positions at which head(norm(last state)) has the verifier's own most likely token.

    Args:
        weights: with norm and the whole head, the head in the dtype in which the verifier ran.
        verifier_argmax: int64 [t] for each sample, the verifier's argmax at its first t <= T positions; -1 is not counted.
    """
    right = total = 0
    for sample, expected in zip(samples, verifier_argmax, strict=True):
        counted = expected >= 0
        last = sample.states[: len(expected), -1][counted]
        right += int((weights.logits(last).argmax(-1) == expected[counted]).sum())
        total += int(counted.sum())
    return right / max(total, 1)


def decided_argmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Argmax of logits [T, V], -1 where the runner-up is within rounding of the states: other batch shapes round otherwise."""
    top = logits.topk(2)
    rounding = torch.finfo(dtype).eps * logits.abs().amax(-1)
    return torch.where(top.values[:, 0] - top.values[:, 1] > rounding, top.indices[:, 0], -1)


class SelfCheck:
    """Compares a few rows' states with what the verifier says about the same tokens.

    testify: what the verifier says about int64 [T] each. weights: norm and whole head. minimum: share of positions that must agree.
    """

    def __init__(
        self, testify: Callable[[list[Tensor]], Testimony], dataset: Dataset, weights: VerifierWeights, n_aux: int, minimum: float
    ) -> None:
        self.testify, self.dataset, self.weights, self.n_aux, self.minimum = testify, dataset, weights, n_aux, minimum
        self.rows = range(0, len(dataset), max(len(dataset) // CHECKED_ROWS, 1))[:CHECKED_ROWS]
        self.expected: list[Tensor] = []

    def fresh(self) -> float:
        """Check states computed as the run will compute them: argmax, and the size of the logits. Raises InputError."""
        told = self.testify([token_ids(self.dataset, row)[:CHECKED_TOKENS] for row in self.rows])
        self.expected = told.argmax
        agreement = self._agreement(told.samples, "computed")
        if not told.distance <= told.tolerance:
            raise InputError(
                f"{self.weights.shape.path}: logits from its head, norm and config are {told.distance:.0%} away from its own: its "
                f"family ({self.weights.shape.model_type}) scales or caps logits in a way that is not known here"
            )
        return agreement

    def stored(self, folder: Path) -> float:
        """The same check on what was written, after `fresh`. Raises InputError."""
        samples = [read_sample(folder, row, token_ids(self.dataset, row), self.n_aux) for row in self.rows]
        return self._agreement(samples, "stored")

    def _agreement(self, samples: Sequence[HiddenStates], what: str) -> float:
        agreement = check_states(samples, self.weights, self.expected)
        if agreement < self.minimum:
            raise InputError(
                f"{what} hidden states give the verifier's own token at {agreement:.1%} of positions, "
                f"extract.minimum_agreement is {self.minimum:.1%}; the last state is not the one before the final norm, or "
                "norm and head are not this verifier's"
            )
        return agreement
