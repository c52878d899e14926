"""Divergences between a draft and a verifier distribution, each given as hidden state x head. Plain PyTorch.

With p = softmax(u t) (verifier, constant), q = softmax(w h) (draft), sums over the draft vocabulary:

    kl_div     sum p (log p - log q)                       rkl        sum q (log q - log p)
    jsd        KL(p | m) / 2 + KL(q | m) / 2, m = (p+q)/2  ce         -log q[argmax p], first index on ties
    tv         1 - sum min(p, q)                           nla        -log max(sum min(p, q), 1e-5)
    lk_hybrid  c KL(p | q) + (1 - c) TV, c = exp(-3 sum min(p, q)) held constant

The names and constants are those of speculators 0.9 (contract, section 3.4). `sum min(p, q)` is the chance that speculative
sampling accepts the draft's token (Leviathan et al. 2023, arXiv:2211.17192, theorem 3.5).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

OVERLAP_FLOOR = 1e-5
HYBRID_SHARPNESS = 3.0


class Distributions(NamedTuple):
    """Draft q and verifier p of the same rows, as probabilities and logarithms, [M, V], and what follows for each row, [M]."""

    log_q: Tensor
    log_p: Tensor
    q: Tensor
    p: Tensor
    overlap: Tensor  # sum min(p, q)
    top1: Tensor  # argmax p


class RowDivergences(NamedTuple):
    """Per draft row; only `terms_ME` carries a gradient."""

    terms_ME: Tensor  # one divergence per requested kind, unweighted
    draft_top1_M: Tensor  # int64
    verifier_top1_M: Tensor  # int64
    overlap_M: Tensor
    draft_lse_M: Tensor
    verifier_lse_M: Tensor


def linear_divergence(
    h_MH: Tensor,
    w_VH: Tensor,
    t_RG: Tensor,
    u_VG: Tensor,
    target_row_M: Tensor,
    row_weight_M: Tensor,
    kinds: list[str],
    kind_weights: list[float],
    verifier_softcap: float = 0.0,
) -> tuple[Tensor, RowDivergences]:
    """Weighted sum over rows and kinds, differentiable by autograd in h and w; holds the whole [M, V] logits. See `ops`."""
    z, t = logits(h_MH, w_VH), softcap(logits(t_RG, u_VG), verifier_softcap)
    rows, _ = row_divergences(z, t, target_row_M, kinds)
    weights = torch.tensor(kind_weights, dtype=rows.terms_ME.dtype, device=h_MH.device)
    return (row_weight_M.to(weights.dtype) * (rows.terms_ME @ weights)).sum(), rows


def logits(x_MH: Tensor, w_VH: Tensor) -> Tensor:
    """x w^T in at least float32: rounding logits to bf16 puts 4 to 39 % error into the gradient (a difference of near-equal p, q)."""
    dtype = torch.promote_types(torch.promote_types(x_MH.dtype, w_VH.dtype), torch.float32)
    return x_MH.to(dtype) @ w_VH.to(dtype).T


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap), -inf left as it is; x itself for cap 0 (Gemma 2, arXiv:2408.00118, section 2)."""
    return torch.where(x == float("-inf"), x, cap * torch.tanh(x / cap)) if cap else x


def row_divergences(z_MV: Tensor, t_RV: Tensor, target_row_M: Tensor, kinds: list[str]) -> tuple[RowDivergences, Distributions]:
    """The requested divergences of draft logits z from the verifier logits t[target_row], and the distributions they came from.

    Each verifier row is normalised once, however many draft rows are scored against it. -inf marks entries that a side cannot take.
    """
    log_q, log_p = z_MV.log_softmax(-1), t_RV.detach().log_softmax(-1)
    p, verifier_top1 = log_p.exp(), log_p.argmax(-1)
    verifier_lse = _log_sum_exp(t_RV.detach(), log_p, verifier_top1)
    log_p, p, top1, q = log_p[target_row_M], p[target_row_M], verifier_top1[target_row_M], log_q.exp()
    both = Distributions(log_q, log_p, q, p, torch.minimum(p, q).sum(-1), top1)
    draft_top1 = log_q.detach().argmax(-1)
    formulas: dict[str, Callable[[], Tensor]] = {
        "kl_div": lambda: _kl(both.p, both.log_p, both.log_q),
        "rkl": lambda: _kl(both.q, both.log_q, both.log_p),
        "jsd": lambda: 0.5 * (_kl(p, both.log_p, _log_mean(both)) + _kl(q, both.log_q, _log_mean(both))),
        "ce": lambda: -both.log_q.gather(-1, top1[:, None]).squeeze(-1),
        "tv": lambda: 1 - both.overlap,
        "nla": lambda: -both.overlap.clamp_min(OVERLAP_FLOOR).log(),
        "lk_hybrid": lambda: _hybrid(both, _kl(both.p, both.log_p, both.log_q), 1 - both.overlap),
    }
    terms = torch.stack([formulas[kind]() for kind in kinds], dim=-1)
    draft_lse = _log_sum_exp(z_MV.detach(), log_q.detach(), draft_top1)
    return RowDivergences(terms, draft_top1, top1, both.overlap.detach(), draft_lse, verifier_lse[target_row_M]), both


def logit_gradient(both: Distributions, kinds: list[str], kind_weights: list[float]) -> Tensor:
    """d (sum of weighted divergences of a row) / d (its draft logits), [M, V], in closed form."""
    formulas: dict[str, Callable[[], Tensor]] = {
        "kl_div": lambda: both.q - both.p,
        "rkl": lambda: _centred(both.q, both.log_q, both.log_p),
        "jsd": lambda: 0.5 * _centred(both.q, both.log_q, _log_mean(both)),
        "ce": lambda: both.q - torch.zeros_like(both.q).scatter_(-1, both.top1[:, None], 1.0),
        "tv": lambda: _tv_gradient(both),
        "nla": lambda: (
            _tv_gradient(both) * (both.overlap >= OVERLAP_FLOOR)[:, None] / both.overlap.clamp_min(OVERLAP_FLOOR)[:, None]
        ),
        "lk_hybrid": lambda: _hybrid(both, both.q - both.p, _tv_gradient(both)),
    }
    parts = (
        formulas[kind]().mul_(weight) if weight != 1 else formulas[kind]() for kind, weight in zip(kinds, kind_weights, strict=True)
    )
    return functools.reduce(Tensor.add_, parts)


def forward_kl(z_MV: Tensor, t_RV: Tensor, target_row_M: Tensor) -> tuple[RowDivergences, Tensor]:
    """`row_divergences` and `logit_gradient` of forward KL alone, in half the passes over memory.

    KL = sum p log p - sum p log q, the first once per verifier row; sum min(p, q) = 1 - |q - p|_1 / 2. Sums are torch's `sum`, which
    adds in pairs: dot products and norms add in sequence and lose three digits over a vocabulary.
    """
    log_q, log_p = z_MV.log_softmax(-1), t_RV.log_softmax(-1)
    p, draft_top1, verifier_top1 = log_p.exp(), z_MV.argmax(-1), t_RV.argmax(-1)
    negative_entropy, verifier_lse = _expected(p, log_p), _log_sum_exp(t_RV, log_p, verifier_top1)
    draft_lse, p = _log_sum_exp(z_MV, log_q, draft_top1), p[target_row_M]
    terms = (negative_entropy[target_row_M] - _expected(p, log_q)).clamp_min(0)
    gradient = log_q.exp_().sub_(p)
    overlap = (1 - 0.5 * gradient.abs().sum(-1)).clamp_min(0)
    top1, lse = verifier_top1[target_row_M], verifier_lse[target_row_M]
    return RowDivergences(terms[:, None], draft_top1, top1, overlap, draft_lse, lse), gradient


def _log_sum_exp(x: Tensor, log_softmax: Tensor, top1: Tensor) -> Tensor:
    """Recovered at the largest entry, which is finite wherever any is: no further pass over the row."""
    return (x.gather(-1, top1[:, None]) - log_softmax.gather(-1, top1[:, None])).squeeze(-1)


def _expected(a: Tensor, x: Tensor) -> Tensor:
    """sum a x per row; entries with a = 0 add nothing, even where x is -inf."""
    return (a * x.masked_fill(a == 0, 0.0)).sum(-1)


def _kl(a: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    """sum a (log a - log b) per row; entries with a = 0 add nothing and pass no gradient, even where a logarithm is -inf."""
    return (a * _log_ratio(a, log_a, log_b)).sum(-1)


def _centred(q: Tensor, log_q: Tensor, log_b: Tensor) -> Tensor:
    """d KL(q | b) / d logits of q: q (log q - log b - KL)."""
    ratio = _log_ratio(q, log_q, log_b)
    return q * (ratio - (q * ratio).sum(-1, keepdim=True))


def _log_ratio(a: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a - log_b).masked_fill(a == 0, 0.0)


def _log_mean(both: Distributions) -> Tensor:
    """log((p + q) / 2), finite wherever one of them is."""
    return torch.logaddexp(both.log_p, both.log_q) - math.log(2.0)


def _tv_gradient(both: Distributions) -> Tensor:
    """d (1 - sum min(p, q)) / d logits of q, the subgradient that takes q at ties."""
    below = torch.where(both.q <= both.p, both.q, 0.0)
    return both.q * below.sum(-1, keepdim=True) - below


def _hybrid(both: Distributions, kl: Tensor, tv: Tensor) -> Tensor:
    """c kl + (1 - c) tv for values [M] or gradients [M, V]; c is held constant."""
    share = torch.exp(-HYBRID_SHARPNESS * both.overlap.detach())
    share = share if kl.ndim == 1 else share[:, None]
    return share * kl + (1 - share) * tv
