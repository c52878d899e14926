"""Muon with its orthogonalisation in a dtype that the device multiplies well."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eagle3_fast.precision import arithmetic_dtype


class Muon(torch.optim.Muon):
    """torch.optim.Muon (Jordan et al. 2024), step for step; torch's own iterates in bfloat16 even where a CPU only emulates it, which
    makes an optimizer step of seconds out of one of a fraction."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state, momentum = parameter.grad, self.state[parameter], group["momentum"]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(average, momentum) if group["nesterov"] else average
        direction = orthogonalise(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] * _rate_factor(parameter.shape, group["adjust_lr_fn"])
        parameter.add_(direction.to(parameter.dtype), alpha=-rate)


def _rate_factor(shape: torch.Size, rule: str | None) -> float:
    """`original`: sqrt of rows over columns where there are more rows; `match_rms_adamw`: updates of AdamW's usual size."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if rule == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


def orthogonalise(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """U V^T of the singular value decomposition U S V^T, roughly: steps of X <- a X + (b A + c A A) X with A = X X^T (Newton-Schulz)."""
    a, b, c = coefficients
    x = matrix.to(arithmetic_dtype(torch.bfloat16, matrix.device.type))
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp_min(eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
