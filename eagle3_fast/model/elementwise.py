"""Norm and gated activation of the draft: liger-kernel's fused Triton kernels on CUDA where it is installed, PyTorch otherwise.

Rotary embeddings stay with PyTorch: liger's kernel turns queries and keys of the same rows together, here they belong to different rows.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch
from torch import Tensor
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
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.to(wide.dtype) * normed).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202)."""
    liger = fused_kernels(gate)
    return F.silu(gate) * up if liger is None else liger.swiglu.LigerSiLUMulFunction.apply(gate, up)


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
