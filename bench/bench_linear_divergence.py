"""`linear_divergence`, forward and backward, frozen head, forward KL: the loss of all TTT steps in one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from batches import linear_divergence_inputs, scored_rows
from measure import Local, Unavailable, gemm_flops, gemms, require_memory
from presets import SMOKE, Case
from torch import Tensor
from torch.nn import functional as F

from eagle3_fast import ops
from eagle3_fast.ops._heads import held_bytes
from eagle3_fast.reference.linear_divergence import linear_divergence as reference
from eagle3_fast.testing.budget import assert_within_budget

AXES = ("vocab", "ttt_steps", "supervised", "rows")
"""What its time depends on; each is varied alone."""
CHUNK = 1024
"""Rows of one bare product: long enough for full speed, short enough that its output stays small."""


def _fused(**inputs: Any) -> Tensor:
    ops.select("fused")
    return ops.linear_divergence(**inputs, kinds={"kl_div": 1.0}).loss


def _reference(**inputs: Any) -> Tensor:
    """Whole logits in float32, gradients by autograd."""
    return reference(**inputs, kinds=["kl_div"], kind_weights=[1.0])[0]


@cache
def _compiler() -> Callable[..., Tensor]:
    return torch.compile(_reference, dynamic=False)


def _compiled(**inputs: Any) -> Tensor:
    return _compiler()(**inputs)


def _plain(h_MH: Tensor, w_VH: Tensor, t_RG: Tensor, u_VG: Tensor, target_row_M: Tensor, row_weight_M: Tensor) -> Tensor:
    """What trainers write: logits in the dtype of the hidden states, `F.kl_div` in float32, no metrics."""
    target = (t_RG @ u_VG.T).float().softmax(-1)[target_row_M]
    log_q = (h_MH @ w_VH.T).float().log_softmax(-1)
    return (row_weight_M * F.kl_div(log_q, target, reduction="none").sum(-1)).sum()


def _liger(h_MH: Tensor, w_VH: Tensor, t_RG: Tensor, u_VG: Tensor, target_row_M: Tensor, row_weight_M: Tensor) -> Tensor:
    """Its JSD at beta 0 is the forward KL; rows weigh alike, and each draft row brings its own copy of its verifier row."""
    from liger_kernel.transformers import LigerFusedLinearJSD

    return LigerFusedLinearJSD(jsd_beta=0.0)(h_MH, w_VH, t_RG[target_row_M], u_VG)


PROVIDERS: dict[str, Callable[..., Tensor]] = {
    "fused": _fused,
    "reference": _reference,
    "compile": _compiled,
    "plain": _plain,
    "liger": _liger,
}
COPIES = {"reference": 8, "compile": 6, "plain": 6}
"""Float32 tensors [M, V] that live at once."""


def make(provider: str, case: Case, dtype: torch.dtype, device: str) -> Local:
    if provider == "gemm":
        return Local(gemms(gemm_shapes(case), dtype, device), device)
    if provider == "liger":
        _require_liger(device)
    call = PROVIDERS[provider]
    error = check(call, dtype, device, rounds_logits=provider == "plain" and dtype == torch.bfloat16)
    require_memory(COPIES.get(provider, 0) * 4 * len(scored_rows(case)[1]) * case.vocab, device)
    inputs = linear_divergence_inputs(case, dtype, device)
    heads = (inputs["w_VH"], inputs["u_VG"]) if provider == "fused" else ()
    inputs = inputs if provider == "fused" else without_hints(inputs)
    return Local(lambda: torch.autograd.grad(call(**inputs), inputs["h_MH"]), device, error, partial(held_bytes, *heads))


def _require_liger(device: str) -> None:
    try:
        import liger_kernel  # noqa: F401
    except ImportError:
        raise Unavailable("liger-kernel is not installed") from None
    if device != "cuda":
        raise Unavailable("liger-kernel needs a GPU")


def without_hints(inputs: dict[str, Any]) -> dict[str, Any]:
    """For providers other than ours: no anchors, and row numbers on the device of the rest."""
    own = {name: value for name, value in inputs.items() if name != "anchor_R"}
    return own | {"target_row_M": inputs["target_row_M"].to(inputs["h_MH"].device)}


def check(call: Callable[..., Tensor], dtype: torch.dtype, device: str, rounds_logits: bool) -> float:
    """Relative error of the gradient against float64 on the smoke case; fails where it is beyond its budget.

    Rounding the logits to bfloat16 cannot pass: such a provider is timed for comparison, its error stands in the table.
    """
    inputs = linear_divergence_inputs(SMOKE, dtype, device)
    plain = without_hints(inputs)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in plain.items()}
    exact, exact_grad = _loss_and_gradient(_reference, wide)
    eager, eager_grad = _loss_and_gradient(_reference, plain)
    loss, grad = _loss_and_gradient(call, inputs if call is _fused else plain)
    if not rounds_logits:
        assert_within_budget(loss, exact, eager, "loss", dtype=dtype)
        assert_within_budget(grad, exact_grad, eager_grad, "gradient of h")
    return float((grad.double() - exact_grad).norm() / exact_grad.norm())


def _loss_and_gradient(call: Callable[..., Tensor], inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    h = inputs["h_MH"].detach().requires_grad_()
    loss = call(**{**inputs, "h_MH": h})
    return loss.detach(), torch.autograd.grad(loss, h)[0]


def gemm_shapes(case: Case) -> list[tuple[int, int, int]]:
    """Verifier logits of each verifier row, draft logits and hidden gradient of each draft row."""
    needed, target_row = scored_rows(case)
    hidden, vocab = case.model.hidden, case.vocab
    verifier = [(len(rows), hidden, vocab) for rows in needed.split(CHUNK)]
    draft = [shape for rows in target_row.split(CHUNK) for shape in ((len(rows), hidden, vocab), (len(rows), vocab, hidden))]
    return verifier + draft


def test_linear_divergence(compare, case: Case) -> None:
    compare("linear_divergence", [*PROVIDERS, "gemm"], case, gemm_flops(gemm_shapes(case)))
