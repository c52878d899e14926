"""Own keys of later TTT steps beside attention over the shared keys that another kernel computed: one softmax over both.

With lse over both, the output is e^(lse_shared - lse) out_shared + sum_j e^(d_j - lse) v_j. A flash kernel's backward pass asks only
for output and lse of the whole softmax (Dao 2023, arXiv:2307.08691, algorithm 2), so given both it serves the shared part as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def merge(
    shared_out: Tensor,
    shared_lse: Tensor,
    q: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    own_rows: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [N, Q, D] in q's dtype and log-sum-exp float32 [N, Q] over shared and own keys.

    shared_out, shared_lse: of the shared keys alone, float32 lse, minus infinity where a row sees none. The rest is the op's, with
    at least one step.
    """
    scores = _scores(q, own_k, own_rows, scale)
    lse = torch.logsumexp(torch.cat((shared_lse[..., None], scores), -1), -1)
    merged = shared_out.float() * (shared_lse - lse).exp()[..., None]
    for j, (values, index) in enumerate(zip(own_v, own_rows, strict=True)):
        merged += _for_each_head(values[index], q) * (scores[..., j] - lse).exp()[..., None]
    return merged.to(q.dtype), lse


def add_gradients(
    grad_q: Tensor,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    own_rows: list[Tensor],
    scale: float,
) -> list[Tensor]:
    """Add the own keys' share to grad_q, float32 [N, Q, D]; gradients of own keys, then of own values, in float32.

    out, lse: of the whole softmax. Rows that no query owns get zero.
    """
    if not own_k:
        return []
    grad_k, grad_v = [], []
    weights = (_scores(q, own_k, own_rows, scale) - lse[..., None]).exp()
    delta = (grad_out.float() * out.float()).sum(-1)
    for j, index in enumerate(own_rows):
        keys, values = _for_each_head(own_k[j][index], q), _for_each_head(own_v[j][index], q)
        grad_scores = scale * weights[..., j] * ((grad_out.float() * values).sum(-1) - delta)
        grad_q += grad_scores[..., None] * keys
        owner = _owners(index, len(own_k[j]))
        grad_k.append(rows_or_zero(_sum_heads(grad_scores[..., None] * q.float(), own_k[j]), owner))
        grad_v.append(rows_or_zero(_sum_heads(weights[..., j, None] * grad_out.float(), own_v[j]), owner))
    return [*grad_k, *grad_v]


def rows_or_zero(x_N: Tensor, row_P: Tensor) -> Tensor:
    """[P, ...]: the rows of x [N, ...] that `row_P` names, zero for N."""
    return torch.cat((x_N, x_N.new_zeros(1, *x_N.shape[1:])))[row_P]


def _owners(index_N: Tensor, rows: int) -> Tensor:
    """The inverse of distinct indices below `rows`: which entry of `index_N` each row is, N where it is none.

    A search, because scattering reads its indices back from a GPU where torch is set to deterministic algorithms.
    """
    ordered, order = index_N.sort()
    row = torch.arange(rows, dtype=index_N.dtype, device=index_N.device)
    at = torch.searchsorted(ordered, row)
    found = pad(ordered, (0, 1), value=rows)[at] == row
    return pad(order, (0, 1), value=0)[at].where(found, len(index_N))


def _scores(q: Tensor, own_k: list[Tensor], own_rows: list[Tensor], scale: float) -> Tensor:
    """Scores of each query with its own keys, float32 [N, Q, steps]."""
    parts = (_for_each_head(keys[index], q) for keys, index in zip(own_k, own_rows, strict=True))
    return torch.stack([(q.float() * keys).sum(-1) * scale for keys in parts], dim=-1)


def _for_each_head(x_NKD: Tensor, q: Tensor) -> Tensor:
    """Keys or values [N, K, D] beside the query heads that use them, float32 [N, Q, D]."""
    return x_NKD.float().repeat_interleave(q.shape[1] // x_NKD.shape[1], dim=1)


def _sum_heads(x_NQD: Tensor, like: Tensor) -> Tensor:
    """[N, Q, D] summed over the query heads of each key head, [N, K, D]."""
    return x_NQD.unflatten(1, (like.shape[1], -1)).sum(2)
