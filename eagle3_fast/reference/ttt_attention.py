"""Attention of the training-time test: one contiguous range of shared keys per query, plus the query's own later keys. Plain PyTorch.

For query row i of group g, with r_s = own_rows_s[i]:
    out = softmax([scale q.k_j for lo <= j < hi] + [scale q.own_k_s[r_s] for each step s]) [v_j ..., own_v_s[r_s] ...]
(EAGLE-3, Li et al. 2025, arXiv:2503.01840, figure 6: the diagonal blocks of the training-time test mask.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

QUERY_BLOCK = 128
"""Queries handled together. Ranges are monotone, so a block needs only the keys between its first `lo` and its last `hi`."""


def ttt_attention(
    q_NQD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    key_range_N2: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    own_rows: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [N, Q, D] in q's dtype and log-sum-exp of the scores [N, Q], computed in at least float32. See `ops`."""
    outputs = [q_NQD.new_empty(0, q_NQD.shape[1], v_TKD.shape[-1])]
    statistics = [q_NQD.new_empty(0, q_NQD.shape[1], dtype=torch.promote_types(q_NQD.dtype, torch.float32))]
    for rows, keys in query_blocks(key_range_N2):
        at = [index[rows] for index in own_rows]
        scores = _scores(q_NQD[rows], k_TKD[keys], key_range_N2[rows] - keys.start, _taken(own_k, at), scale)
        lse = scores.logsumexp(-1, keepdim=True)
        lse = lse.masked_fill(lse == float("-inf"), 0.0)  # sees nothing: every weight is exp(-inf - 0) = 0
        out = _weighted_values((scores - lse).exp(), v_TKD[keys], _taken(own_v, at))
        outputs.append(_rows_first(out).to(q_NQD.dtype))
        statistics.append(_rows_first(lse)[..., 0])
    return torch.cat(outputs), torch.cat(statistics)


def query_blocks(key_range_N2: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of query rows and of all the keys that any row of the slice sees."""
    for start in range(0, key_range_N2.shape[0], QUERY_BLOCK):
        rows = slice(start, min(start + QUERY_BLOCK, key_range_N2.shape[0]))
        first, last = int(key_range_N2[rows, 0].min()), int(key_range_N2[rows, 1].max())
        yield rows, slice(first, max(first, last))


def ttt_attention_backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q_NQD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    key_range_N2: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    own_rows: list[Tensor],
    scale: float,
) -> list[Tensor]:
    """Gradients of q, k, v, own keys and own values, in closed form; attention weights are computed again, block by block.

    With weights P, dP = dO V^T and delta = rowsum(dO O): dS = P (dP - delta) (Dao 2023, arXiv:2307.08691, algorithm 2).
    """
    wide, steps, groups = lse.dtype, len(own_k), k_TKD.shape[1]
    inputs = (q_NQD, k_TKD, v_TKD, *own_k, *own_v)
    grad_q, grad_k, grad_v, *grad_own = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in inputs)
    for rows, keys in query_blocks(key_range_N2):
        at = [index[rows] for index in own_rows]
        block_k, block_v = _taken(own_k, at), _taken(own_v, at)
        q, grad = _grouped(q_NQD[rows], groups), _grouped(grad_out[rows], groups)
        scores = _scores(q_NQD[rows], k_TKD[keys], key_range_N2[rows] - keys.start, block_k, scale)
        weights = (scores - _grouped(lse[rows, :, None], groups)).exp()
        delta = (grad * _grouped(out[rows], groups)).sum(-1, keepdim=True)
        grad_shared = grad @ v_TKD[keys].to(wide).permute(1, 2, 0)[:, None]
        grad_weights = torch.cat([grad_shared, *((grad * _own(v, wide)).sum(-1, keepdim=True) for v in block_v)], dim=-1)
        grad_scores = scale * weights * (grad_weights - delta)
        widths = [keys.stop - keys.start, *[1] * steps]
        (shared, *own), (score_shared, *score_own) = weights.split(widths, -1), grad_scores.split(widths, -1)
        block_q = score_shared @ k_TKD[keys].to(wide).permute(1, 0, 2)[:, None]
        grad_k[keys] += (score_shared.mT @ q).sum(1).transpose(0, 1)
        grad_v[keys] += (shared.mT @ grad).sum(1).transpose(0, 1)
        for step in range(steps):
            block_q = block_q + score_own[step] * _own(block_k[step], wide)
            grad_own[step][at[step]] = (score_own[step] * q).sum(1).transpose(0, 1)
            grad_own[steps + step][at[step]] = (own[step] * grad).sum(1).transpose(0, 1)
        grad_q[rows] = _rows_first(block_q)
    return [x.to(q_NQD.dtype) for x in (grad_q, grad_k, grad_v, *grad_own)]


def _scores(q: Tensor, k: Tensor, key_range: Tensor, own_k: list[Tensor], scale: float) -> Tensor:
    """Scaled scores of shared and own keys, [K, Q/K, N, T + steps]; minus infinity where a key is not seen."""
    grouped = _grouped(q, k.shape[1]) * scale
    index = torch.arange(k.shape[0], device=k.device)
    hidden = (index < key_range[:, :1]) | (index >= key_range[:, 1:])
    shared = (grouped @ k.to(grouped.dtype).permute(1, 2, 0)[:, None]).masked_fill(hidden, float("-inf"))
    return torch.cat([shared, *((grouped * _own(own, grouped.dtype)).sum(-1, keepdim=True) for own in own_k)], dim=-1)


def _taken(own: list[Tensor], at: list[Tensor]) -> list[Tensor]:
    """The rows of each step that belong to the queries in hand."""
    return [x[index] for x, index in zip(own, at, strict=True)]


def _weighted_values(weights: Tensor, v: Tensor, own_v: list[Tensor]) -> Tensor:
    shared, own = weights.split([v.shape[0], len(own_v)], dim=-1)
    out = shared @ v.to(weights.dtype).permute(1, 0, 2)[:, None]
    for step, value in enumerate(own_v):
        out = out + own[..., step, None] * _own(value, weights.dtype)
    return out


def _grouped(x_NQD: Tensor, groups: int) -> Tensor:
    """[N, Q, D] as [K, Q/K, N, D] in at least float32: the query heads that share a key-value head side by side."""
    n, heads, width = x_NQD.shape
    wide = torch.promote_types(x_NQD.dtype, torch.float32)
    return x_NQD.to(wide).reshape(n, groups, heads // groups, width).permute(1, 2, 0, 3)


def _rows_first(x: Tensor) -> Tensor:
    """[K, Q/K, N, D] back to [N, Q, D]."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def _own(x_NKD: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K, D] as [K, 1, N, D]."""
    return x_NKD.to(dtype).transpose(0, 1)[:, None]
