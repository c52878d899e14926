"""Row kernel of `linear_divergence`: from draft and verifier logits to divergences, metrics and, in place, the logits' gradient.

Design: deferred, step-batched, verifier-aligned chunks. Nothing that enters the draft depends on its logits, so head and loss of
all TTT steps wait for the end of the loop; a chunk of verifier rows then comes with every draft row scored against them. The caller
makes both logits with the library's GEMM, this kernel turns the draft's into their gradient, and two more GEMMs finish. That makes
the GEMMs long, computes a verifier row's statistics once for all steps, and touches each logit for (4 + 2/T) V bytes a row in bf16
where the peers' separate passes take 10 to 22 V (row-centred storage adds one pass of the library: it lays the centre down before it
multiplies). For hidden sizes from 2048 the GEMMs are all that remains to win: by the cost
model this kernel is 4 % of their time at 4096 and 9 % at 2048 on an RTX PRO 6000, 18 % at 1024.

Not here: the same sums in the epilogue of a GEMM of our own, which need not read the logits back. By the same model it would win
9.5 % of the op at hidden size 1024 and 4.8 % at 2048 on sm_120, if that GEMM kept up with the library's. No card was at hand to
measure whether it does, and one that falls short by as much is a loss, so it is not shipped before it is timed. On sm_90 Triton's
fused heads are known to lose. All times above are estimates; the instruction-level checks are in `tests/kernels/test_aot.py`.

A program owns a verifier row and its draft rows, so nothing is atomic and results repeat bit for bit. A draft row takes two sweeps
for kl_div and ce, whose gradient needs no sum but the log-sum-exp, and three otherwise; the later ones find the row in the L2 cache
as long as the rows in flight fit it. Sums are kept by lane and added up across lanes once a sweep. Log-probabilities are formed as
(x - max) - log sum, not x - lse: logits with a large common offset would lose their last digits to a rounded lse.

All gradients are one combination. With m = (p + q) / 2 and coefficients of the row,

    g_i = q_i (A + B (log q_i - log p_i - KL(q|p)) + C (log q_i - log m_i - KL(q|m)) - T [q_i <= p_i]) - P p_i - E [i = argmax p]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

KINDS = ("kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid")
NEED_SUMS = {"rkl", "jsd", "tv", "nla", "lk_hybrid"}
"""Kinds whose gradient needs sums over the row beyond the log-sum-exp, so one more sweep."""

OVERLAP_FLOOR = tl.constexpr(1e-5)
HYBRID_SHARPNESS = tl.constexpr(3.0)
LARGEST = tl.constexpr(3.4028234663852886e38)


class Config(NamedTuple):
    """Columns handled at a time and warps of a program, for vocabularies up to `vocab`."""

    vocab: int
    block: int
    num_warps: int


CONFIGS = [Config(65_536, 2048, 8), Config(2**31 - 1, 4096, 16)]
"""Fixed, not tuned at run time: tuning would rewrite the logits with every candidate. Eight columns a thread are one 128-bit load in
bf16. Long rows get wide programs, so that fewer rows compete for the L2 cache."""


def row_divergence(
    z_MV: Tensor,
    t_RV: Tensor,
    first_R1: Tensor,
    row_weight_M: Tensor,
    kind_weights: Tensor,
    verifier_centre_R: Tensor,
    verifier_softcap: float,
    form_gradient: bool,
    terms_M7: Tensor,
    draft_top1_M: Tensor,
    verifier_top1_R: Tensor,
    overlap_M: Tensor,
    draft_lse_M: Tensor,
    verifier_lse_R: Tensor,
) -> None:
    """Score draft rows first[j] to first[j + 1] of z against row j of t; fills the last six arguments and, on demand, overwrites z.

    z_MV, t_RV: logits, bfloat16 or float32, columns next to each other; -inf marks entries that a side cannot take.
    first_R1: int32, ascending from 0 to M; equal neighbours are a verifier row without draft rows.
    row_weight_M: float32.  kind_weights: float32 [7] in the order of KINDS, 0 = not asked for; on the CPU it costs no wait for the card.
    verifier_softcap: c > 0 turns t into c tanh((t + centre) / c), -inf staying -inf; 0 leaves t, and then the centre is not read.
    form_gradient: z becomes row_weight d(sum_kind weight_kind D_kind)/dz, in z's dtype.
    terms_M7: every divergence, unweighted, float32; NaN for jsd where it is not asked for.  Top-1: int64, the first of equals.
    Log-sum-exps: float32, of z as stored and of t as stored or capped.

    An infinite rkl (the verifier cannot take what the draft can) is reported as such and adds nothing to the gradient.
    With V and both row strides multiples of 16, memory is read 128 bits at a time. Raises ValueError.
    """
    _validate(z_MV, t_RV, first_R1, row_weight_M, terms_M7)
    rows, vocab = t_RV.shape
    if not rows:
        return
    weights = dict(zip(KINDS, kind_weights.tolist(), strict=True))
    asked = {kind for kind, weight in weights.items() if weight}
    config = next(config for config in CONFIGS if vocab <= config.vocab)
    with torch.cuda.device_of(z_MV):
        results = (terms_M7, draft_top1_M, verifier_top1_R, overlap_M, draft_lse_M, verifier_lse_R)
        _divergence_rows[(rows,)](
            *(z_MV, t_RV, first_R1, row_weight_M, verifier_centre_R, verifier_softcap, *weights.values(), *results),
            *(vocab, z_MV.stride(0), t_RV.stride(0)),
            BLOCK=config.block,
            CAPPED=verifier_softcap > 0,
            FORM_GRADIENT=form_gradient,
            NEEDS_SUMS=bool(asked & NEED_SUMS),
            NEEDS_JSD="jsd" in asked,
            num_warps=config.num_warps,
            num_stages=1,
            enable_fp_fusion=True,
        )


def _validate(z: Tensor, t: Tensor, first: Tensor, row_weight: Tensor, terms: Tensor) -> None:
    if z.ndim != 2 or t.ndim != 2 or z.shape[1] != t.shape[1] or not t.shape[1]:
        raise ValueError(f"row_divergence: expected z [M, V] and t [R, V], got {list(z.shape)} and {list(t.shape)}")
    if row_weight.shape != z.shape[:1] or row_weight.dtype != torch.float32:
        raise ValueError(
            f"row_divergence: row_weight must be float32 [{z.shape[0]}], got {row_weight.dtype} {list(row_weight.shape)}"
        )
    if z.stride(1) != 1 or t.stride(1) != 1:
        raise ValueError(f"row_divergence: columns of z and t must be adjacent, got strides {z.stride()} and {t.stride()}")
    if {z.dtype, t.dtype} - {torch.bfloat16, torch.float32}:
        raise ValueError(f"row_divergence: z and t must be bfloat16 or float32, got {z.dtype} and {t.dtype}")
    if first.shape != (t.shape[0] + 1,) or first.dtype != torch.int32:
        raise ValueError(f"row_divergence: first must be int32 [{t.shape[0] + 1}], got {first.dtype} {list(first.shape)}")
    if terms.shape != (z.shape[0], len(KINDS)) or not terms.is_contiguous():
        raise ValueError(f"row_divergence: terms must be [{z.shape[0]}, {len(KINDS)}] without gaps, got {list(terms.shape)}")


@triton.jit
def _divergence_rows(
    z, t, first, row_weight, centre, cap,
    kl_weight, rkl_weight, jsd_weight, ce_weight, tv_weight, nla_weight, hybrid_weight,
    terms, draft_top1, verifier_top1, overlap, draft_lse, verifier_lse,
    vocab, stride_z, stride_t,
    BLOCK: tl.constexpr, CAPPED: tl.constexpr, FORM_GRADIENT: tl.constexpr, NEEDS_SUMS: tl.constexpr, NEEDS_JSD: tl.constexpr,
):  # fmt: skip
    """One verifier row and the draft rows scored against it."""
    target = tl.program_id(0)
    t_row = t + target.to(tl.int64) * stride_t
    middle = tl.load(centre + target) if CAPPED else 0.0
    p_max, p_log, p_top1 = _statistics(t_row, vocab, middle, cap, BLOCK, CAPPED)
    tl.store(verifier_top1 + target, p_top1.to(tl.int64))
    tl.store(verifier_lse + target, p_max + p_log)
    # 64-bit rows: M * V passes 2^31 at 16k rows of 152k columns.
    begin, end = tl.load(first + target).to(tl.int64), tl.load(first + target + 1).to(tl.int64)
    for row in range(begin, end):
        z_row = z + row * stride_z
        # Read ahead of the statistics, whose sums bring all threads together: one that ran ahead may already overwrite this logit.
        target_logit = tl.load(z_row + p_top1).to(tl.float32)
        weight = tl.load(row_weight + row)
        q_max, q_log, q_top1 = _statistics(z_row, vocab, 0.0, 0.0, BLOCK, False)
        tl.store(draft_top1 + row, q_top1.to(tl.int64))
        tl.store(draft_lse + row, q_max + q_log)
        kl, rkl, kl_p_mean, kl_q_mean, shared, below = _sums(
            z_row, t_row, vocab, q_max, q_log, p_max, p_log, p_top1, middle, cap, weight, kl_weight, ce_weight,
            BLOCK, CAPPED, FORM_GRADIENT and not NEEDS_SUMS, NEEDS_JSD,
        )  # fmt: skip
        # Zero, or NaN where a logit was: comparisons above passed it over, and a broken row must not look like a perfect one.
        broken = (q_log + p_log) * 0.0
        kl, rkl, kl_p_mean, shared = kl + broken, rkl + broken, kl_p_mean + broken, shared + broken
        tl.store(overlap + row, shared)
        share = tl.exp(shared * -HYBRID_SHARPNESS)
        floored = tl.maximum(shared, OVERLAP_FLOOR) + broken
        out = terms + row * 7
        tl.store(out, kl)
        tl.store(out + 1, rkl)
        tl.store(out + 2, 0.5 * (kl_p_mean + kl_q_mean) if NEEDS_JSD else float("nan"))
        tl.store(out + 3, q_log - (target_logit - q_max))
        tl.store(out + 4, 1 - shared)
        tl.store(out + 5, -tl.log(floored))
        tl.store(out + 6, share * kl + (1 - share) * (1 - shared))
        if FORM_GRADIENT and NEEDS_SUMS:
            B = tl.where(rkl < float("inf"), rkl_weight, 0.0)
            T = tv_weight + tl.where(shared >= OVERLAP_FLOOR, nla_weight / floored, 0.0) + hybrid_weight * (1 - share)
            P = kl_weight + hybrid_weight * share
            _store_gradient(
                z_row, t_row, vocab, q_max, q_log, p_max, p_log, p_top1, middle, cap, weight, P + ce_weight + T * below,
                B, tl.minimum(rkl, LARGEST), 0.5 * jsd_weight, kl_q_mean, T, P, ce_weight, BLOCK, CAPPED, NEEDS_JSD,
            )  # fmt: skip


@triton.jit
def _statistics(x_row, vocab, centre, cap, BLOCK: tl.constexpr, CAPPED: tl.constexpr):
    """Largest logit of a row, log sum exp(x - largest), and the first index of the largest."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    first, total, largest = lanes, tl.zeros((BLOCK,), tl.float32), tl.max(best, 0)
    for start in range(0, vocab, BLOCK):
        x = _logits(x_row, start + lanes, vocab, centre, cap, CAPPED)
        first = tl.where(x > best, start + lanes, first)
        best = tl.maximum(best, x)
        so_far, largest = largest, tl.max(best, 0)
        # Until something is finite the sums are zero and must not become exp(-inf + inf).
        origin = tl.maximum(largest, -LARGEST)
        total = total * tl.exp(so_far - origin) + tl.exp(x - origin)
    top1 = tl.min(tl.where(best == largest, first, vocab), 0)
    return largest, tl.log(tl.sum(total, 0)), top1


@triton.jit
def _sums(
    z_row, t_row, vocab, q_max, q_log, p_max, p_log, p_top1, centre, cap, weight, kl_weight, ce_weight,
    BLOCK: tl.constexpr, CAPPED: tl.constexpr, STORE: tl.constexpr, NEEDS_JSD: tl.constexpr,
):  # fmt: skip
    """KL(p|q), KL(q|p), KL(p|m), KL(q|m), sum min(p, q) and the part of it where q is the smaller.

    STORE: on the way, z becomes the gradient of kl_div and ce, which wants none of these.
    """
    lanes = tl.arange(0, BLOCK)
    kl, rkl = tl.zeros((BLOCK // 4,), tl.float32), tl.zeros((BLOCK // 4,), tl.float32)
    kl_p_mean, kl_q_mean = tl.zeros((BLOCK // 4,), tl.float32), tl.zeros((BLOCK // 4,), tl.float32)
    shared, below = tl.zeros((BLOCK // 4,), tl.float32), tl.zeros((BLOCK // 4,), tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + lanes
        log_q = _logits(z_row, columns, vocab, 0.0, 0.0, False) - q_max - q_log
        log_p = _logits(t_row, columns, vocab, centre, cap, CAPPED) - p_max - p_log
        q, p = tl.exp(log_q), tl.exp(log_p)
        # Where a probability is zero its logarithm may be -inf: chosen away, as 0 * inf is not 0.
        kl += _by_fours(tl.where(p > 0, p * (log_p - log_q), 0.0), BLOCK)
        rkl += _by_fours(tl.where(q > 0, q * (log_q - log_p), 0.0), BLOCK)
        shared += _by_fours(tl.minimum(p, q), BLOCK)
        below += _by_fours(tl.where(q <= p, q, 0.0), BLOCK)
        if NEEDS_JSD:
            kl_p_mean += _by_fours(tl.where(p > 0, p * _log_over_mean(log_p, log_q), 0.0), BLOCK)
            kl_q_mean += _by_fours(tl.where(q > 0, q * _log_over_mean(log_q, log_p), 0.0), BLOCK)
        if STORE:
            g = (kl_weight + ce_weight) * q - kl_weight * p - tl.where(columns == p_top1, ce_weight, 0.0)
            g = tl.where(weight == 0, 0.0, weight * g)  # what adds nothing may be broken
            tl.store(z_row + columns, g.to(z_row.dtype.element_ty), mask=columns < vocab)
    return tl.sum(kl, 0), tl.sum(rkl, 0), tl.sum(kl_p_mean, 0), tl.sum(kl_q_mean, 0), tl.sum(shared, 0), tl.sum(below, 0)


@triton.jit
def _by_fours(x, BLOCK: tl.constexpr):
    """Sums of four columns, which a thread holds together: [BLOCK / 4], a quarter of the registers."""
    return tl.sum(tl.reshape(x, (BLOCK // 4, 4)), 1)


@triton.jit
def _store_gradient(
    z_row, t_row, vocab, q_max, q_log, p_max, p_log, p_top1, centre, cap, weight, A, B, rkl, C, kl_q_mean, T, P, E,
    BLOCK: tl.constexpr, CAPPED: tl.constexpr, NEEDS_JSD: tl.constexpr,
):  # fmt: skip
    """z becomes the combination of the head of this file, times the row's weight."""
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        log_q = _logits(z_row, columns, vocab, 0.0, 0.0, False) - q_max - q_log
        log_p = _logits(t_row, columns, vocab, centre, cap, CAPPED) - p_max - p_log
        q, p = tl.exp(log_q), tl.exp(log_p)
        # Infinite only where rkl is, and then B is zero: the bound keeps 0 * inf out.
        slope = A + B * (tl.minimum(tl.where(q > 0, log_q - log_p, 0.0), LARGEST) - rkl)
        if NEEDS_JSD:
            slope += C * (tl.where(q > 0, _log_over_mean(log_q, log_p), 0.0) - kl_q_mean)
        slope -= tl.where(q <= p, T, 0.0)
        g = q * slope - P * p - tl.where(columns == p_top1, E, 0.0)
        g = tl.where(weight == 0, 0.0, weight * g)  # what adds nothing may be broken
        tl.store(z_row + columns, g.to(z_row.dtype.element_ty), mask=columns < vocab)


@triton.jit
def _log_over_mean(log_a, log_b):
    """log(a / ((a + b) / 2)) = -log((1 + b/a) / 2), exact to the last digits where a and b are nearly equal, and for a or b of 0."""
    gap = log_b - log_a
    return -tl.maximum(gap, 0.0) - tl.log(0.5 + 0.5 * tl.exp(-tl.abs(gap)))


@triton.jit
def _logits(row, columns, vocab, centre, cap, CAPPED: tl.constexpr):
    """float32, -inf beyond the vocabulary; CAPPED: cap tanh((x + centre) / cap), where -inf stays what it is."""
    x = tl.load(row + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
    if CAPPED:
        x = tl.where(x == float("-inf"), x, cap * _tanh((x + centre) / cap))
    return x


@triton.jit
def _tanh(x):
    """To float32's precision. (1 - e^-2x) / (1 + e^-2x) loses small x to cancellation: its Taylor series, to x^9, takes those."""
    decay = tl.exp(-2 * tl.abs(x))
    far = (1 - decay) / (1 + decay)
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(square < 0.0625, near, tl.where(x < 0, -far, far))
