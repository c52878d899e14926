"""Contract of `linear_divergence`: a weighted sum of divergences between two distributions given as hidden state x head.

The op knows nothing of TTT steps, masks or documents. Its caller compacts the rows (one of weight zero adds nothing), folds
mask, step decay and divisor into `row_weight_M`, and names for each draft row the verifier row that it is scored against. One
differentiable scalar comes out, so the gradients are formed in the forward sweep (`_chunks`), chunk by chunk: no [M, V] tensor
outlives its chunk and the backward pass only scales what is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_fast.ops._chunks import KINDS, Results, sweep
from eagle3_fast.ops._dispatch import full_precision, logit_storage, resolve


@dataclass(frozen=True)
class LinearDivergence:
    """Result of `linear_divergence`. Everything but `loss` is per draft row, float32 (float64 in, float64 out), without gradient."""

    loss: Tensor  # scalar
    terms_ME: Tensor  # divergence of each kind, unweighted
    draft_top1_M: Tensor  # int64
    verifier_top1_M: Tensor  # int64
    overlap_M: Tensor  # sum over the vocabulary of min(p, q)
    draft_lse_M: Tensor  # log-sum-exp of the draft logits
    verifier_lse_M: Tensor


def linear_divergence(
    h_MH: Tensor,
    w_VH: Tensor,
    t_RG: Tensor,
    u_VG: Tensor,
    target_row_M: Tensor,
    row_weight_M: Tensor,
    kinds: dict[str, float],
    verifier_softcap: float = 0.0,
    anchor_R: Tensor | None = None,
) -> LinearDivergence:
    """sum_m row_weight[m] sum_kind weight[kind] D_kind(softmax(u t[target_row[m]]), softmax(w h[m])).

    h_MH: draft rows.  w_VH: draft head; a gradient is formed for it only where it requires one.  t_RG: verifier rows, already
    normed, never differentiated.  u_VG: verifier head rows of the draft vocabulary.  target_row_M: int64 in [0, R), on the CPU
    whatever the device of the rest, because chunks are cut by it and reading it back would make the device wait; sorted order not
    needed.  row_weight_M: float32, or float64 with float64 inputs.  kinds: weight by name, formulas in `reference`.
    verifier_softcap: c > 0 turns verifier logits x into c tanh(x / c), as the Gemma family does; 0 leaves them.
    anchor_R: int64, an entry of the draft vocabulary that the verifier probably ranks high (the data's next token), -1 where none
    is known; rounding of bfloat16 logits is finest around it. It changes nothing else.
    h, w, t, u share one dtype out of float32, float64, bfloat16, float16. All but target_row on one device. M = 0 gives loss 0.

    Raises ValueError or TypeError naming expected and actual shape, dtype or device.
    """
    _validate(h_MH, w_VH, t_RG, u_VG, target_row_M, row_weight_M, kinds, anchor_R)
    fused = resolve("linear_divergence", h_MH.device.type, h_MH.dtype) == "fused"
    names, weights = ",".join(kinds), list(kinds.values())
    choice = (logit_storage() if fused else "reference", *_gradients_wanted(h_MH, w_VH))
    with full_precision(h_MH.device.type):
        loss, *rows, _, _ = torch.ops.eagle3_fast.linear_divergence(
            h_MH, w_VH, t_RG, u_VG, target_row_M, row_weight_M, anchor_R, names, weights, verifier_softcap, *choice
        )
    return LinearDivergence(loss, *(value.detach() for value in rows))


def _gradients_wanted(h_MH: Tensor, w_VH: Tensor) -> tuple[bool, bool]:
    """Whether the forward sweep forms gradients in the hidden states and in the head; neither in evaluation."""
    enabled = torch.is_grad_enabled()
    return enabled and (h_MH.requires_grad or w_VH.requires_grad), enabled and w_VH.requires_grad


@torch.library.custom_op("eagle3_fast::linear_divergence", mutates_args=())
def _op(
    h: Tensor,
    w: Tensor,
    t: Tensor,
    u: Tensor,
    target_row: Tensor,
    row_weight: Tensor,
    anchor: Tensor | None,
    kinds: str,
    kind_weights: list[float],
    verifier_softcap: float,
    storage: str,
    form_gradients: bool,
    head_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, row results, and the gradients of the loss in h and (where asked for) w."""
    results = Results(
        *_fake(
            h,
            w,
            t,
            u,
            target_row,
            row_weight,
            anchor,
            kinds,
            kind_weights,
            verifier_softcap,
            storage,
            form_gradients,
            head_gradient,
        )
    )
    sweep(
        results,
        h,
        w,
        t,
        u,
        target_row,
        row_weight,
        anchor,
        dict(zip(kinds.split(","), kind_weights, strict=True)),
        verifier_softcap,
        storage,
    )
    return tuple(results)  # type: ignore[return-value]


@_op.register_fake
def _fake(
    h: Tensor,
    w: Tensor,
    t: Tensor,
    u: Tensor,
    target_row: Tensor,
    row_weight: Tensor,
    anchor: Tensor | None,
    kinds: str,
    kind_weights: list[float],
    verifier_softcap: float,
    storage: str,
    form_gradients: bool,
    head_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, dtype = h.shape[0], torch.promote_types(h.dtype, torch.float32)
    draft_top1, verifier_top1 = (h.new_empty(rows, dtype=torch.int64) for _ in range(2))
    overlap, draft_lse, verifier_lse = (h.new_empty(rows, dtype=dtype) for _ in range(3))
    loss, terms = h.new_empty((), dtype=dtype), h.new_empty(rows, len(kind_weights), dtype=dtype)
    grad_h = h.new_empty(h.shape if form_gradients else (0,))
    grad_w = w.new_empty(w.shape if head_gradient else (0,), dtype=dtype)
    return loss, terms, draft_top1, verifier_top1, overlap, draft_lse, verifier_lse, grad_h, grad_w


def _save_gradients(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*output[-2:])
    ctx.head_dtype, ctx.head_gradient, ctx.inputs = inputs[1].dtype, inputs[-1], len(inputs)
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple:
    if grad_loss is None:
        return (None,) * ctx.inputs
    grad_h, grad_w = ctx.saved_tensors
    scaled_w = (grad_w * grad_loss).to(ctx.head_dtype) if ctx.head_gradient else None
    return (grad_h * grad_loss).to(grad_h.dtype), scaled_w, *(None,) * (ctx.inputs - 2)


_op.register_autograd(_scale_gradients, setup_context=_save_gradients)


def _validate(
    h: Tensor,
    w: Tensor,
    t: Tensor,
    u: Tensor,
    target_row: Tensor,
    row_weight: Tensor,
    kinds: dict[str, float],
    anchor: Tensor | None,
) -> None:
    if w.numel() == 0 or u.numel() == 0:
        raise ValueError("linear_divergence: the head is empty; under ZeRO-3 call the op inside the module that owns the weight")
    if h.ndim != 2 or w.ndim != 2 or h.shape[1] != w.shape[1]:
        raise ValueError(f"linear_divergence: expected h [M, H] and w [V, H], got {list(h.shape)} and {list(w.shape)}")
    if t.ndim != 2 or u.ndim != 2 or t.shape[1] != u.shape[1]:
        raise ValueError(f"linear_divergence: expected t [R, G] and u [V, G], got {list(t.shape)} and {list(u.shape)}")
    if w.shape[0] != u.shape[0]:
        raise ValueError(
            f"linear_divergence: draft head has {w.shape[0]} rows, verifier head {u.shape[0]}; map the vocabulary first"
        )
    for name, value, dtypes, rows in (
        ("target_row", target_row, {torch.int64}, h.shape[:1]),
        ("row_weight", row_weight, {torch.float32, torch.float64}, h.shape[:1]),
        ("anchor", anchor, {torch.int64}, t.shape[:1]),
    ):
        if value is not None and (value.shape != rows or value.dtype not in dtypes):
            raise ValueError(f"linear_divergence: {name} must be {dtypes} [{rows[0]}], got {value.dtype} {list(value.shape)}")
    if len({x.dtype for x in (h, w, t, u)}) != 1 or not h.dtype.is_floating_point:
        raise TypeError(f"linear_divergence: h, w, t, u must share a float dtype, got {[str(x.dtype) for x in (h, w, t, u)]}")
    if len({x.device for x in (h, w, t, u, row_weight, *([] if anchor is None else [anchor]))}) != 1:
        raise ValueError("linear_divergence: all tensors but target_row must be on one device")
    if target_row.device.type not in ("cpu", "meta"):
        raise ValueError(f"linear_divergence: target_row must be on the CPU, it is on {target_row.device}")
    if len(target_row) and target_row.device.type == "cpu" and not 0 <= int(target_row.min()) <= int(target_row.max()) < len(t):
        raise ValueError(f"linear_divergence: target_row must lie in 0..{len(t) - 1}, got {target_row.min()}..{target_row.max()}")
    if not kinds or not kinds.keys() <= set(KINDS) or 0 in kinds.values():
        raise ValueError(f"linear_divergence: kinds must give {', '.join(KINDS)} weights other than 0, got {kinds}")
