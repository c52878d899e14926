"""Contract of `ttt_attention`: each query sees one contiguous range of shared keys plus a few keys of its own.

The range holds causality, document boundary and sliding window at once, so there is no mask object of any size. Shared keys are
those of TTT step 0; the own keys of a row are those that the same row produced in later steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3_fast.ops._dispatch import full_precision, resolve
from eagle3_fast.reference import ttt_attention as reference


def ttt_attention(
    q_NQD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    key_range_N2: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    scale: float,
) -> Tensor:
    """Attention output [N, Q, D_v], differentiable in q, k, v and every own key and value.

    q_NQD: queries, N may be smaller than T.  k_TKD, v_TKD: shared keys and values; Q is a multiple of K; the value width may
    differ from the key width.  key_range_N2: int32 (lo, hi), row i sees keys lo <= j < hi; both columns non-decreasing in i.
    own_k, own_v: one [N, K, D] per later TTT step; row i sees row i of each.  scale: multiplies the scores.
    A row with an empty range and no own key gives 0.

    Raises ValueError or TypeError naming expected and actual shape, dtype or device.
    """
    _validate(q_NQD, k_TKD, v_TKD, key_range_N2, own_k, own_v)
    resolve("ttt_attention", q_NQD.device.type)
    with full_precision(q_NQD.device.type):
        return torch.ops.eagle3_fast.ttt_attention(q_NQD, k_TKD, v_TKD, key_range_N2, own_k, own_v, scale)


@torch.library.custom_op("eagle3_fast::ttt_attention", mutates_args=())
def _op(q: Tensor, k: Tensor, v: Tensor, key_range: Tensor, own_k: list[Tensor], own_v: list[Tensor], scale: float) -> Tensor:
    return reference.ttt_attention(q, k, v, key_range, own_k, own_v, scale)


@_op.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, key_range: Tensor, own_k: list[Tensor], own_v: list[Tensor], scale: float) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[2])


@torch.library.custom_op("eagle3_fast::ttt_attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, key_range: Tensor, own_k: list[Tensor], own_v: list[Tensor], scale: float
) -> list[Tensor]:
    """Gradients of q, k, v, own keys, own values; the scores are computed again, so none are kept from the forward pass."""
    return reference.ttt_attention_backward(grad_out, q, k, v, key_range, own_k, own_v, scale)


@_backward.register_fake
def _backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, key_range: Tensor, own_k: list[Tensor], own_v: list[Tensor], scale: float
) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, *own_k, *own_v)]


def _save_inputs(ctx: Any, inputs: tuple, output: Tensor) -> None:
    q, k, v, key_range, own_k, own_v, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, key_range, *own_k, *own_v)


def _differentiate(ctx: Any, grad_out: Tensor) -> tuple:
    q, k, v, key_range, *own = ctx.saved_tensors
    steps = len(own) // 2
    with full_precision(q.device.type):
        gradients = torch.ops.eagle3_fast.ttt_attention_backward(grad_out, q, k, v, key_range, own[:steps], own[steps:], ctx.scale)
    return *gradients[:3], None, gradients[3 : 3 + steps], gradients[3 + steps :], None


_op.register_autograd(_differentiate, setup_context=_save_inputs)


def _validate(q: Tensor, k: Tensor, v: Tensor, key_range: Tensor, own_k: list[Tensor], own_v: list[Tensor]) -> None:
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or q.shape[2] != k.shape[2] or k.shape[:2] != v.shape[:2]:
        shapes = [list(x.shape) for x in (q, k, v)]
        raise ValueError(f"ttt_attention: expected q [N, Q, D], k [T, K, D], v [T, K, Dv], got {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"ttt_attention: {q.shape[1]} query heads are not a multiple of {k.shape[1]} key-value heads")
    if key_range.shape != (q.shape[0], 2) or key_range.dtype != torch.int32:
        raise ValueError(f"ttt_attention: key_range must be int32 [{q.shape[0]}, 2], got {key_range.dtype} {list(key_range.shape)}")
    if len(own_k) != len(own_v):
        raise ValueError(f"ttt_attention: {len(own_k)} own keys but {len(own_v)} own values")
    for name, steps, width in (("own_k", own_k, k.shape[2]), ("own_v", own_v, v.shape[2])):
        for own in steps:
            if own.shape != (q.shape[0], k.shape[1], width):
                raise ValueError(f"ttt_attention: {name} must be [{q.shape[0]}, {k.shape[1]}, {width}], got {list(own.shape)}")
    if len({x.dtype for x in (q, k, v, *own_k, *own_v)}) != 1:
        raise TypeError("ttt_attention: q, k, v and own keys and values must share a dtype")
    if len({x.device for x in (q, k, v, key_range, *own_k, *own_v)}) != 1:
        raise ValueError("ttt_attention: all tensors must be on one device")
