"""Error budgets: how far an op may be from float64, given how far plain PyTorch in the same dtype is."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_within_budget(
    actual: Tensor, exact: Tensor, eager: Tensor, what: str, scale: float | None = None, dtype: torch.dtype | None = None
) -> None:
    """err(actual, exact) <= 2 err(eager, exact) + 4 eps(dtype) * scale, for the largest and the mean error.

    exact: float64. eager: plain PyTorch in the dtype of `actual`. scale: largest magnitude of `exact` unless given; four roundings
    of that size are allowed because on a handful of elements eager may be right by luck. dtype: that of `actual` unless given; a
    float32 loss of bfloat16 inputs, whose logits are kept in bfloat16 too, has theirs. The message shows the worst element in all
    three.
    """
    assert actual.shape == exact.shape, f"{what}: shape {list(actual.shape)}, expected {list(exact.shape)}"
    if exact.numel() == 0:
        return
    gap, allowed = (actual.double() - exact).abs(), (eager.double() - exact).abs()
    slack = 4 * torch.finfo(dtype or actual.dtype).eps * (exact.abs().max() if scale is None else scale)
    worst = int(gap.nan_to_num(torch.inf).argmax())
    values = [f"{tensor.flatten()[worst].item():.9g}" for tensor in (actual, eager, exact)]
    message = f"{what}: worst element {worst}: op {values[0]}, eager {values[1]}, float64 {values[2]}"
    assert bool(gap.max() <= 2 * allowed.max() + slack), f"largest error {gap.max():.3g}; {message}"
    assert bool(gap.mean() <= 2 * allowed.mean() + slack), f"mean error {gap.mean():.3g}; {message}"
