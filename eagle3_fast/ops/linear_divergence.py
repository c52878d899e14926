"""Contract of `linear_divergence`: a weighted sum of divergences between two distributions given as hidden state x head.

The op knows nothing of TTT steps, masks or documents. Its caller compacts the rows (rows of weight zero never come here), folds
mask, step decay and divisor into `row_weight_M`, and names for each draft row the verifier row that it is scored against. One
differentiable scalar comes out, so the gradients are formed in the forward sweep, block by block: no [M, V] tensor outlives its
block and the backward pass only scales what is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_fast.ops._dispatch import full_precision, resolve
from eagle3_fast.reference import linear_divergence as reference

ROW_BLOCK = 128
"""Draft rows handled together; bounds the logits that exist at one time to [ROW_BLOCK, V] and keeps them near the cores."""


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
) -> LinearDivergence:
    """sum_m row_weight[m] sum_kind weight[kind] D_kind(softmax(u t[target_row[m]]), softmax(w h[m])).

    h_MH: draft rows.  w_VH: draft head; a gradient is formed for it only where it requires one.  t_RG: verifier rows, already
    normed, never differentiated.  u_VG: verifier head rows of the draft vocabulary.  target_row_M: int64 in [0, R), sorted order
    not needed.  row_weight_M: float32, or float64 with float64 inputs.  kinds: weight by name, formulas in `reference`.
    verifier_softcap: c > 0 turns verifier logits x into c tanh(x / c), as the Gemma family does; 0 leaves them.
    h, w, t, u share one dtype out of float32, float64, bfloat16, float16. All on one device. M = 0 gives loss 0.

    Raises ValueError or TypeError naming expected and actual shape, dtype or device.
    """
    _validate(h_MH, w_VH, t_RG, u_VG, target_row_M, row_weight_M, kinds)
    resolve("linear_divergence", h_MH.device.type)
    names, weights = ",".join(kinds), list(kinds.values())
    gradients = _gradients_wanted(h_MH, w_VH)
    with full_precision(h_MH.device.type):
        loss, *rows, _, _ = torch.ops.eagle3_fast.linear_divergence(
            h_MH, w_VH, t_RG, u_VG, target_row_M, row_weight_M, names, weights, verifier_softcap, *gradients
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
    kinds: str,
    kind_weights: list[float],
    verifier_softcap: float,
    form_gradients: bool,
    head_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, row results, and the gradients of the loss in h and (where asked for) w, in row blocks sorted by target row."""
    loss, terms, draft_top1, verifier_top1, overlap, draft_lse, verifier_lse, grad_h, grad_w = _fake(
        h, w, t, u, target_row, row_weight, kinds, kind_weights, verifier_softcap, form_gradients, head_gradient
    )
    loss.zero_()
    grad_w.zero_()
    names = kinds.split(",")
    weights = torch.tensor(kind_weights, dtype=terms.dtype, device=h.device)
    wide_w, wide_u = w.to(terms.dtype), u.to(terms.dtype)
    for block in target_row.argsort(stable=True).split(ROW_BLOCK):
        targets, target_index = target_row[block].unique_consecutive(return_inverse=True)
        verifier_logits = reference.softcap(t[targets].to(terms.dtype) @ wide_u.T, verifier_softcap)
        rows, grad_z = _rows_and_gradient(h[block].to(terms.dtype) @ wide_w.T, verifier_logits, target_index, names, kind_weights)
        for whole, part in zip((terms, draft_top1, verifier_top1, overlap, draft_lse, verifier_lse), rows, strict=True):
            whole[block] = part
        weight = row_weight[block].to(terms.dtype)
        loss += (weight * (rows.terms_ME @ weights)).sum()
        if form_gradients:
            # Rounding a gradient to the inputs' dtype costs 0.2 % in bf16; it is rounding the logits that is ruinous.
            grad_z = grad_z.to(h.dtype)
            grad_h[block] = (grad_z @ w) * weight[:, None].to(h.dtype)
            if head_gradient:
                grad_w += grad_z.to(terms.dtype).T @ (h[block].to(terms.dtype) * weight[:, None])
    return loss, terms, draft_top1, verifier_top1, overlap, draft_lse, verifier_lse, grad_h, grad_w


def _rows_and_gradient(
    z: Tensor, t: Tensor, target_row: Tensor, kinds: list[str], kind_weights: list[float]
) -> tuple[reference.RowDivergences, Tensor]:
    """Row results and the gradient of the weighted divergence in the draft logits z, in closed form."""
    if kinds == ["kl_div"]:
        rows, gradient = reference.forward_kl(z, t, target_row)
        return rows, gradient.mul_(kind_weights[0]) if kind_weights[0] != 1 else gradient
    rows, both = reference.row_divergences(z, t, target_row, kinds)
    return rows, reference.logit_gradient(both, kinds, kind_weights)


@_op.register_fake
def _fake(
    h: Tensor,
    w: Tensor,
    t: Tensor,
    u: Tensor,
    target_row: Tensor,
    row_weight: Tensor,
    kinds: str,
    kind_weights: list[float],
    verifier_softcap: float,
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
    ctx.head_dtype, ctx.head_gradient = inputs[1].dtype, inputs[-1]
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple:
    if grad_loss is None:
        return (None,) * 11
    grad_h, grad_w = ctx.saved_tensors
    scaled_w = (grad_w * grad_loss).to(ctx.head_dtype) if ctx.head_gradient else None
    return (grad_h * grad_loss).to(grad_h.dtype), scaled_w, *(None,) * 9


_op.register_autograd(_scale_gradients, setup_context=_save_gradients)


def _validate(h: Tensor, w: Tensor, t: Tensor, u: Tensor, target_row: Tensor, row_weight: Tensor, kinds: dict[str, float]) -> None:
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
    for name, value, dtypes in (
        ("target_row", target_row, {torch.int64}),
        ("row_weight", row_weight, {torch.float32, torch.float64}),
    ):
        if value.shape != h.shape[:1] or value.dtype not in dtypes:
            raise ValueError(f"linear_divergence: {name} must be {dtypes} [{h.shape[0]}], got {value.dtype} {list(value.shape)}")
    if len({x.dtype for x in (h, w, t, u)}) != 1 or not h.dtype.is_floating_point:
        raise TypeError(f"linear_divergence: h, w, t, u must share a float dtype, got {[str(x.dtype) for x in (h, w, t, u)]}")
    if len({x.device for x in (h, w, t, u, target_row, row_weight)}) != 1:
        raise ValueError("linear_divergence: all tensors must be on one device")
    if not kinds:
        raise ValueError("linear_divergence: no divergence asked for")
