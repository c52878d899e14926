"""Contract of `ttt_attention`: each query sees one contiguous range of shared keys plus a few keys of its own.

The range holds causality, document boundary and sliding window at once, so there is no mask object of any size. Shared keys are
those of TTT step 0; the own keys of a row are those that the same row produced in later steps. Own keys are stored once per step,
for the rows of that step; a later step has fewer rows and says by index which of them are its own.
"""

from __future__ import annotations

import importlib
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from eagle3_fast.ops import _flash_attention
from eagle3_fast.ops._dispatch import full_precision, resolve
from eagle3_fast.reference import ttt_attention as reference

WIDEST_HEAD = 256
"""What fits the shared memory of a block on sm_120 (kernels/ttt_attention.py)."""


def ttt_attention(
    q_NQD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    key_range_N2: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    own_rows: list[Tensor],
    scale: float,
    host_range_N2: Tensor | None = None,
) -> Tensor:
    """Attention output [N, Q, D_v], differentiable in q, k, v and every own key and value.

    q_NQD: queries, N may be smaller than T.  k_TKD, v_TKD: shared keys and values; Q is a multiple of K; the value width may
    differ from the key width.  key_range_N2: int32 (lo, hi), row i sees keys lo <= j < hi; both columns non-decreasing in i.
    own_k, own_v: one [N_j, K, D] per later TTT step, N_j >= N.  own_rows: one int32 or int64 [N] per step, all entries distinct;
    row i sees row own_rows[j][i] of step j.  scale: multiplies the scores.  host_range_N2: key_range_N2 on the CPU, for kernels whose
    sizes depend on it (flash-attn's); none: where they run, it is read from the device.
    A row with an empty range and no own key gives 0.

    Raises ValueError or TypeError naming expected and actual shape, dtype or device.
    """
    _validate(q_NQD, k_TKD, v_TKD, key_range_N2, own_k, own_v, own_rows, host_range_N2)
    lacking = partial(_flash_attention.lacking, q_NQD, v_TKD)
    taken = resolve("ttt_attention", q_NQD.device.type, q_NQD.dtype, _unsupported(q_NQD, v_TKD), lacking)
    if taken == "flash":
        key_range_N2 = key_range_N2.cpu() if host_range_N2 is None else host_range_N2
    arguments = (q_NQD, k_TKD, v_TKD, key_range_N2, own_k, own_v, own_rows, scale)
    with full_precision(q_NQD.device.type):
        out, _ = torch.ops.eagle3_fast.ttt_attention(*arguments, taken == "fused", flash=taken == "flash")
    return out


@torch.library.custom_op("eagle3_fast::ttt_attention", mutates_args=())
def _op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_range: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    own_rows: list[Tensor],
    scale: float,
    fused: bool,
    *,
    flash: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output, and the natural logarithm of each row's softmax denominator [N, Q] in at least float32 (0 where nothing is seen).

    flash: flash-attn computes it, and key_range is on the CPU.
    """
    arguments = (q, k, v, key_range, own_k, own_v, own_rows, scale)
    return _kernels(q, flash).forward(*arguments) if fused or flash else reference.ttt_attention(*arguments)


def _unsupported(q: Tensor, v: Tensor) -> str | None:
    """What no fused kernel of q's device takes."""
    if q.is_cuda:
        return f"heads are wider than {WIDEST_HEAD}" if max(q.shape[2], v.shape[2]) > WIDEST_HEAD else None
    return None if q.shape[2] == v.shape[2] else "keys and values differ in width"


def _kernels(q: Tensor, flash: bool) -> ModuleType:
    """What computes the op fused on q's device, or through flash-attn."""
    if flash:
        return _flash_attention
    name = "eagle3_fast.kernels.ttt_attention" if q.is_cuda else "eagle3_fast.ops._cpu_attention"
    return importlib.import_module(name)


@_op.register_fake
def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_range: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    own_rows: list[Tensor],
    scale: float,
    fused: bool,
    *,
    flash: bool = False,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("eagle3_fast::ttt_attention_backward", mutates_args=())
def _backward(
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
    fused: bool,
    *,
    flash: bool = False,
) -> list[Tensor]:
    """Gradients of q, k, v, own keys, own values; the scores are computed again, so none are kept from the forward pass."""
    arguments = (grad_out, out, lse, q, k, v, key_range, own_k, own_v, own_rows, scale)
    return _kernels(q, flash).backward(*arguments) if fused or flash else reference.ttt_attention_backward(*arguments)


@_backward.register_fake
def _backward_fake(
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
    fused: bool,
    *,
    flash: bool = False,
) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, *own_k, *own_v)]


def _save_inputs(ctx: Any, inputs: tuple, keyword_only_inputs: dict[str, bool], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, key_range, own_k, own_v, own_rows, ctx.scale, ctx.fused = inputs
    ctx.flash = keyword_only_inputs["flash"]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, q, k, v, key_range, *own_k, *own_v, *own_rows)


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple:
    out, lse, q, k, v, key_range, *own = ctx.saved_tensors
    steps = len(own) // 3
    own_k, own_v, own_rows = own[:steps], own[steps : 2 * steps], own[2 * steps :]
    with full_precision(q.device.type):
        gradients = torch.ops.eagle3_fast.ttt_attention_backward(
            grad_out, out, lse, q, k, v, key_range, own_k, own_v, own_rows, ctx.scale, ctx.fused, flash=ctx.flash
        )
    return *gradients[:3], None, gradients[3 : 3 + steps], gradients[3 + steps :], [None] * steps, None, None


_op.register_autograd(_differentiate, setup_context=_save_inputs)


def _validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_range: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    own_rows: list[Tensor],
    host_range: Tensor | None,
) -> None:
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or q.shape[2] != k.shape[2] or k.shape[:2] != v.shape[:2]:
        shapes = [list(x.shape) for x in (q, k, v)]
        raise ValueError(f"ttt_attention: expected q [N, Q, D], k [T, K, D], v [T, K, Dv], got {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"ttt_attention: {q.shape[1]} query heads are not a multiple of {k.shape[1]} key-value heads")
    if key_range.shape != (q.shape[0], 2) or key_range.dtype != torch.int32:
        raise ValueError(f"ttt_attention: key_range must be int32 [{q.shape[0]}, 2], got {key_range.dtype} {list(key_range.shape)}")
    if host_range is not None and (host_range.shape, host_range.dtype, host_range.device.type) != (
        key_range.shape,
        torch.int32,
        "cpu",
    ):
        shown = f"{host_range.dtype} {list(host_range.shape)} on {host_range.device.type}"
        raise ValueError(f"ttt_attention: host_range must be int32 [{q.shape[0]}, 2] on the CPU, got {shown}")
    _validate_own(q, k, v, own_k, own_v, own_rows)
    if len({x.dtype for x in (q, k, v, *own_k, *own_v)}) != 1:
        raise TypeError("ttt_attention: q, k, v and own keys and values must share a dtype")
    if len({x.device for x in (q, k, v, key_range, *own_k, *own_v, *own_rows)}) != 1:
        raise ValueError("ttt_attention: all tensors must be on one device")


def _validate_own(q: Tensor, k: Tensor, v: Tensor, own_k: list[Tensor], own_v: list[Tensor], own_rows: list[Tensor]) -> None:
    rows, heads = q.shape[0], k.shape[1]
    if not len(own_k) == len(own_v) == len(own_rows):
        raise ValueError(f"ttt_attention: {len(own_k)} own keys, {len(own_v)} own values and {len(own_rows)} own rows")
    for keys, values, index in zip(own_k, own_v, own_rows, strict=True):
        if index.shape != (rows,) or index.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ttt_attention: own_rows must be int32 or int64 [{rows}], got {index.dtype} {list(index.shape)}")
        for name, own, width in (("own_k", keys, k.shape[2]), ("own_v", values, v.shape[2])):
            if own.ndim != 3 or own.shape[0] < rows or own.shape[1:] != (heads, width) or len(own) != len(keys):
                expected = f"[{len(keys) if name == 'own_v' else f'at least {rows}'}, {heads}, {width}]"
                raise ValueError(f"ttt_attention: {name} must be {expected}, got {list(own.shape)}")
