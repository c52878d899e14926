"""`ttt_attention` on CPUs: PyTorch's flash kernel over the shared keys, own keys merged through log-sum-exps.

Queries are taken in blocks that stay within a document, so the kernel sees a block's own keys and little else. Softmax over shared and
own keys together is, with lse over both, e^(lse_shared - lse) out_shared + sum_j e^(d_j - lse) v_j. The kernel's backward pass asks
only for output and lse of the whole softmax (Dao 2023, arXiv:2307.08691, algorithm 2), so it serves the shared part as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

QUERY_BLOCK = 256
"""Most queries handled together; bounds the mask of a block to [QUERY_BLOCK, keys that they see]."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_range: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    own_rows: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [N, Q, D] and log-sum-exp [N, Q]; arguments and results are those of the op."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # the kernel trusts that a head's numbers lie side by side
    out, lse = q.new_zeros(q.shape), q.new_zeros(q.shape[:2], dtype=torch.float32)
    for rows, keys, mask in blocks(key_range, q.dtype):
        part, part_lse = _flash(*(_heads_first(x) for x in (q[rows], k[keys], v[keys])), attn_mask=mask, scale=scale)
        out[rows], lse[rows] = part[0].transpose(0, 1), part_lse[0].T
    if not own_k:
        return out, lse
    shared_lse = lse.masked_fill((key_range[:, 0] >= key_range[:, 1])[:, None], float("-inf"))
    scores = own_scores(q, own_k, own_rows, scale)
    lse = torch.logsumexp(torch.cat((shared_lse[..., None], scores), -1), -1)
    merged = out.float() * (shared_lse - lse).exp()[..., None]
    for j, (values, index) in enumerate(zip(own_v, own_rows, strict=True)):
        merged += _for_each_head(values[index], q) * (scores[..., j] - lse).exp()[..., None]
    return merged.to(q.dtype), lse


def backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_range: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    own_rows: list[Tensor],
    scale: float,
) -> list[Tensor]:
    """Gradients of q, k, v, own keys and own values; arguments are those of the op."""
    grad_out, q, k, v = grad_out.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
    for rows, keys, mask in blocks(key_range, q.dtype):
        arguments = (_heads_first(x) for x in (grad_out[rows], q[rows], k[keys], v[keys], out[rows]))
        block_lse = lse[rows].T[None].contiguous()
        parts = _flash_backward(*arguments, block_lse, 0.0, False, attn_mask=mask, scale=scale)
        block_q, block_k, block_v = (part[0].transpose(0, 1) for part in parts)
        grad_q[rows] = block_q
        grad_k[keys] += block_k
        grad_v[keys] += block_v
    grad_own_k, grad_own_v = ([torch.zeros(x.shape, dtype=torch.float32) for x in own] for own in (own_k, own_v))
    weights = (own_scores(q, own_k, own_rows, scale) - lse[..., None]).exp() if own_k else None
    delta = (grad_out.float() * out.float()).sum(-1)
    for j, index in enumerate(own_rows):
        assert weights is not None
        own_keys, own_values = _for_each_head(own_k[j][index], q), _for_each_head(own_v[j][index], q)
        grad_scores = scale * weights[..., j] * ((grad_out.float() * own_values).sum(-1) - delta)
        grad_q += grad_scores[..., None] * own_keys
        grad_own_k[j][index] = _sum_heads(grad_scores[..., None] * q.float(), own_k[j])
        grad_own_v[j][index] = _sum_heads(weights[..., j, None] * grad_out.float(), own_v[j])
    return [x.to(q.dtype) for x in (grad_q, grad_k, grad_v, *grad_own_k, *grad_own_v)]


def blocks(key_range: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor]]:
    """Slices of queries, the keys that any of them sees, and the additive mask [queries, keys] of who sees whom."""
    lo, hi = key_range.unbind(1)
    apart = (lo[1:] >= hi[:-1]).nonzero().squeeze(1) + 1  # a query that sees no key of the one before starts a document
    edges = [0, *apart.tolist(), len(key_range)]
    for first, last in pairwise(edges):
        for start in range(first, last, QUERY_BLOCK):
            rows = slice(start, min(start + QUERY_BLOCK, last))
            keys = slice(int(lo[rows].min()), int(hi[rows].max()))
            if keys.stop > keys.start:
                index = torch.arange(keys.start, keys.stop)
                hidden = (index < lo[rows, None]) | (index >= hi[rows, None])
                yield rows, keys, torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def own_scores(q: Tensor, own_k: list[Tensor], own_rows: list[Tensor], scale: float) -> Tensor:
    """Scores of each query with its own keys, float32 [N, Q, steps]."""
    parts = (_for_each_head(keys[index], q) for keys, index in zip(own_k, own_rows, strict=True))
    return torch.stack([(q.float() * keys).sum(-1) * scale for keys in parts], dim=-1)


def _heads_first(x_NHD: Tensor) -> Tensor:
    """[N, heads, D] as [1, heads, N, D]."""
    return x_NHD.transpose(0, 1)[None]


def _for_each_head(x_NKD: Tensor, q: Tensor) -> Tensor:
    """Keys or values [N, K, D] beside the query heads that use them, float32 [N, Q, D]."""
    return x_NKD.float().repeat_interleave(q.shape[1] // x_NKD.shape[1], dim=1)


def _sum_heads(x_NQD: Tensor, like: Tensor) -> Tensor:
    """[N, Q, D] summed over the query heads of each key head, [N, K, D]."""
    return x_NQD.unflatten(1, (like.shape[1], -1)).sum(2)
