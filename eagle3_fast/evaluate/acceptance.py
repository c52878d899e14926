"""Acceptance statistics of speculative decoding.

Three numbers per position k (0 = first drafted token) are easily confused. *alpha_k* is marginal over passes: those whose
first k + 1 drafts were all accepted, among those that offered k + 1; it is what vLLM prints as per-position acceptance
rate. *conditional_k* is the rate that papers report: accepted at k among the passes whose first k drafts were accepted.
*tau* is tokens per verifier pass with the verifier's own token counted: nothing accepted is 1.0, three of three accepted is
4.0.

Where every pass offers the same number of drafts, tau = 1 + sum of alpha_k. The last pass of a text offers no more than the
text can still take, and a draft beyond an end token counts as not offered, so that tau x passes is the number of tokens,
always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TAU_CONVENTION = "tokens per verifier pass, the verifier's own token included"


@dataclass(frozen=True)
class Pass:
    """One verifier pass over drafted tokens."""

    offered: int  # drafted tokens that could have become text
    accepted: int  # leading drafts that did
    emitted: int  # tokens of text: `accepted` and the verifier's own, which an end token among the drafts leaves out


@dataclass(frozen=True)
class Acceptance:
    """Statistics of many passes. A rate without any case is None."""

    passes: int
    tokens: int
    alpha: list[float | None]
    conditional: list[float | None]
    tau: float | None


def acceptance(passes: Sequence[Pass], draft_tokens: int) -> Acceptance:
    """Statistics of `passes`, for positions 0 .. draft_tokens - 1."""
    offered = [sum(p.offered > k for p in passes) for k in range(draft_tokens)]
    reached = [sum(p.offered > k and p.accepted >= k for p in passes) for k in range(draft_tokens)]
    accepted = [sum(p.accepted > k for p in passes) for k in range(draft_tokens)]
    tokens = sum(p.emitted for p in passes)
    return Acceptance(
        passes=len(passes),
        tokens=tokens,
        alpha=[rate(part, whole) for part, whole in zip(accepted, offered, strict=True)],
        conditional=[rate(part, whole) for part, whole in zip(accepted, reached, strict=True)],
        tau=rate(tokens, len(passes)),
    )


def rate(part: float, whole: float) -> float | None:
    """part / whole, None where there was nothing."""
    return part / whole if whole else None
