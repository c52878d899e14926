"""`ttt_attention` on CPUs: PyTorch's flash kernel over the shared keys, own keys merged through log-sum-exps.

Queries are taken in blocks that stay within a document, so the kernel sees the keys of a block's document and few others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from eagle3_fast.ops._own_keys import add_gradients, merge

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
    return merge(out, shared_lse, q, own_k, own_v, own_rows, scale)


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
    grad_own = add_gradients(grad_q, grad_out, out, lse, q, own_k, own_v, own_rows, scale)
    return [x.to(q.dtype) for x in (grad_q, grad_k, grad_v, *grad_own)]


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


def _heads_first(x_NHD: Tensor) -> Tensor:
    """[N, heads, D] as [1, heads, N, D]."""
    return x_NHD.transpose(0, 1)[None]
