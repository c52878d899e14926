"""Norm and gated activation of the draft: liger-kernel's fused Triton kernels on CUDA where it is installed, PyTorch otherwise.

Rotary embeddings stay with PyTorch: liger's kernel turns queries and keys of the same rows together, here they belong to different rows.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from eagle3_fast.log import say_once


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, computed in at least float32, in x's dtype (Zhang and Sennrich 2019, arXiv:1910.07467).

    Raises ValueError for a weight of another size: the placeholder of a partitioned one would broadcast.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight must be [{x.shape[-1]}], got {list(weight.shape)}; under ZeRO-3 call it inside the module that owns it"
        )
    liger = fused_kernels(x)
    if liger is not None:
        # "gemma" is liger's name for float32 throughout, one rounding at the end; the gradient must not overwrite the residual's.
        return liger.rms_norm.LigerRMSNormFunction.apply(x, weight, eps, 0.0, "gemma", False)
    return _RMSNorm.apply(x, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202)."""
    liger = fused_kernels(gate)
    return (_SwiGLU if liger is None else liger.swiglu.LigerSiLUMulFunction).apply(gate, up)


class _RMSNorm(torch.autograd.Function):
    """Keeps its input and one number a row, where autograd would keep two float32 copies of the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        inverse_rms = (torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_() / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        return (x * inverse_rms).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """With n = x / rms(x): dw = sum_rows(g n), dx = (g w - n mean(g w n)) / rms(x)."""
        x, weight, inverse_rms = ctx.saved_tensors
        normed = x * inverse_rms
        product = grad * normed
        grad_weight = product.sum(dim=tuple(range(x.ndim - 1))).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        mean = product.mul_(weight).mean(-1, keepdim=True)
        grad_x = torch.mul(grad, weight.to(product.dtype), out=product).addcmul_(normed, mean, value=-1).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_weight, None


class _SwiGLU(torch.autograd.Function):
    """Keeps its inputs, where autograd would keep silu(gate) too."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_silu = grad * up
        grad_gate = torch.ops.aten.silu_backward.grad_input(grad_silu, gate, grad_input=grad_silu)
        return grad_gate, F.silu(gate).mul_(grad)


def fused_kernels(x: Tensor) -> ModuleType | None:
    """liger-kernel's `ops` for tensors like x; None where PyTorch serves."""
    return _liger() if x.is_cuda and x.dtype in (torch.float32, torch.bfloat16) else None


@cache
def _liger() -> ModuleType | None:
    try:
        ops = importlib.import_module("liger_kernel.ops")
        for name in ("rms_norm", "swiglu"):
            importlib.import_module(f"liger_kernel.ops.{name}")
    except (ImportError, OSError, RuntimeError) as error:
        say_once(f"norm and SwiGLU: PyTorch, liger-kernel is not usable ({' '.join(str(error).split())})")
        return None
    say_once("norm and SwiGLU: liger-kernel")
    return ops
