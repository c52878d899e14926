"""Muon with its orthogonalisation in a dtype that the device multiplies well."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eagle3_fast.precision import arithmetic_dtype
from eagle3_fast.train.partitions import Partition


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
        update, factor = self._orthogonal(parameter, direction, group)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * factor)

    def _orthogonal(self, parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> tuple[Tensor, float]:
        """What is applied at a rate of 1, and what the rate is multiplied by."""
        return _orthogonalised(direction, group), _rate_factor(direction.shape, group["adjust_lr_fn"])


class PartitionedMuon(Muon):
    """Muon on flat pieces of partitioned matrices (ZeRO-1 to 3). Every rank orthogonalises some of the matrices, whole, for all.

    Momentum and update are elementwise and stay in pieces; a direction travels to its matrix's owner and back, twice the bytes of a
    piece. The result is that of `Muon` on the whole matrices up to the rounding of one product.
    """

    partitions: dict[Tensor, Partition]
    """By flat piece, which takes the place of the matrices in `param_groups`."""

    def _orthogonal(self, parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> tuple[Tensor, float]:
        partition = self.partitions[parameter]
        owner = partition.owners([_cost(shape) for shape in partition.shapes])
        matrices = partition.to_owners(direction, owner)
        updates = {
            at: _orthogonalised(matrix, group).float() * _rate_factor(matrix.shape, group["adjust_lr_fn"])
            for at, matrix in matrices.items()
        }
        return partition.from_owners(updates, direction, owner), 1.0


def _orthogonalised(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    return orthogonalise(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])


def _cost(shape: torch.Size) -> float:
    """Multiplications of an iteration, up to a factor."""
    short, long = sorted(shape)
    return short * short * (short + 2 * long)


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
