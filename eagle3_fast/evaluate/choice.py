"""Which token follows: greedy, or sampling with lossless rejection of drafted tokens.

A drafted token x with draft probability q(x) and verifier probability p(x) is accepted with probability min(1, p(x) /
q(x)); after the first rejection the token is drawn from max(p - q, 0), normalised. The text is then distributed exactly as
the verifier's own (Leviathan et al. 2023, arXiv:2211.17192, theorem 1). Greedy choice is the limit of temperature 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens and the distributions they were drawn from."""

    ids: Tensor  # int64 [k], ids of the verifier's vocabulary
    probabilities: list[Tensor]  # k x float32 [verifier vocabulary]; empty under greedy choice


class Choice(Protocol):
    """How tokens are chosen from logits."""

    def draw(self, logits_V: Tensor) -> tuple[Tensor, Tensor | None]:
        """The index of one token, int64 scalar, and the distribution it was drawn from (None: none is needed)."""

    def verify(self, logits: Tensor, proposal: Proposal) -> tuple[int, Tensor]:
        """Number of leading drafts accepted, and the token that follows them, int64 scalar.

        logits: float32 [k + 1, verifier vocabulary], row j for the token after the first j drafts.
        """


class Greedy:
    """The most likely token; a draft is accepted when it is that token."""

    def draw(self, logits_V: Tensor) -> tuple[Tensor, None]:
        return logits_V.argmax(), None

    def verify(self, logits: Tensor, proposal: Proposal) -> tuple[int, Tensor]:
        best = logits.argmax(-1)
        accepted = _leading(best[:-1] == proposal.ids)
        return accepted, best[accepted]


class Sampling:
    """Tokens drawn from softmax(logits / temperature). `generator` must be on the device of the logits."""

    def __init__(self, temperature: float, generator: torch.Generator) -> None:
        self.temperature, self.generator = temperature, generator

    def draw(self, logits_V: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self._softmax(logits_V)
        return self._draw(probabilities), probabilities

    def verify(self, logits: Tensor, proposal: Proposal) -> tuple[int, Tensor]:
        p, count = self._softmax(logits), len(proposal.ids)
        if count == 0:
            return 0, self._draw(p[0])
        q, at = torch.stack(proposal.probabilities), torch.arange(count, device=p.device)
        uniform = torch.rand(count, generator=self.generator, device=p.device)
        accepted = _leading(uniform * q[at, proposal.ids] < p[at, proposal.ids])
        if accepted == count:
            return count, self._draw(p[count])
        residual = (p[accepted] - q[accepted]).clamp_min(0.0)
        # p = q up to rounding can leave no residual at all; then either is the right distribution.
        return accepted, self._draw(residual if residual.any() else p[accepted])

    def _softmax(self, logits: Tensor) -> Tensor:
        return (logits / self.temperature).softmax(-1)

    def _draw(self, weights_V: Tensor) -> Tensor:
        return torch.multinomial(weights_V, 1, generator=self.generator)[0]


def choice(temperature: float, seed: int = 0, device: str = "cpu") -> Choice:
    """Greedy at temperature 0, else sampling with its own generator."""
    return Sampling(temperature, torch.Generator(device).manual_seed(seed)) if temperature > 0 else Greedy()


def _leading(flags: Tensor) -> int:
    """How many of the first flags are true before one is not."""
    return int(flags.long().cumprod(0).sum())
