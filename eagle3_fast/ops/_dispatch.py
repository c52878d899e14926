"""Which implementation an op takes, and how its logits are stored: from the run file; EAGLE3_FAST_IMPL where it says auto."""

from __future__ import annotations

import importlib
import os
from functools import cache

import torch

from eagle3_fast.errors import InputError
from eagle3_fast.log import say_once

IMPLEMENTATIONS = ("auto", "fused", "reference")
CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
LOGITS = ("centred", "float32", "bfloat16")
_selected: dict[str, str] = {}


def select(impl: str, logits: str = "centred") -> None:
    """Set implementation and storage of logits for this process (`ops.impl` and `ops.logits` of the run file)."""
    _check("implementation", impl, IMPLEMENTATIONS)
    _check("storage of logits", logits, LOGITS)
    _selected.update(impl=impl, logits=logits)


def logit_storage() -> str:
    """How fused ops keep logits between product and divergence; formulas and costs in `linear_divergence`."""
    return _selected.get("logits", "centred")


def full_precision(device_type: str) -> torch.autocast:
    """Autocast off: an op chooses the precision of its own products, whatever the model around it runs in."""
    return torch.autocast(device_type, enabled=False)


def resolve(op: str, device_type: str, dtype: torch.dtype, unsupported: str | None = None) -> str:
    """`fused` or `reference` for `op` on inputs of this kind. Says once what was taken and why; refuses `fused` where it cannot be.

    unsupported: what the op itself found in its inputs that no fused kernel of it takes.
    """
    impl = _selected.get("impl", "auto")
    impl = os.environ.get("EAGLE3_FAST_IMPL", "auto") if impl == "auto" else impl
    _check("implementation", impl, IMPLEMENTATIONS)
    lacking = "it was asked for" if impl == "reference" else unsupported or _lacking(op, device_type, dtype)
    if lacking is None:
        say_once(f"{op}: fused kernel on {device_type}")
        return "fused"
    if impl == "fused":
        raise InputError(f"ops.impl is fused, but {op} cannot run fused: {lacking}; mend that (eagle3-fast doctor), or use auto")
    say_once(f"{op}: plain PyTorch reference on {device_type}, because {lacking}")
    return "reference"


def _lacking(op: str, device_type: str, dtype: torch.dtype) -> str | None:
    """What keeps `op` from its fused kernel; None where nothing does."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"its kernels take float32 and bfloat16, not {dtype}"
    if device_type == "cpu":
        return _lacking_cpu(op)
    if device_type == "cuda":
        return _import_fault("triton", "Triton")
    return f"there are no kernels for {device_type}"


@cache
def _lacking_cpu(op: str) -> str | None:
    """`linear_divergence` needs our C++ module, whose import registers its kernel; `ttt_attention` a kernel of PyTorch's own."""
    if op == "ttt_attention":
        return None if hasattr(torch.ops.aten, CPU_FLASH) else f"this PyTorch has no {CPU_FLASH}"
    fault = _import_fault("eagle3_fast._C", "the C++ module (built at install where torch and a compiler are seen)")
    if fault is None and not torch._C._dispatch_has_kernel_for_dispatch_key("eagle3_fast::row_divergence_", "CPU"):
        return "the C++ module is of another version; install the package again"
    return fault


@cache
def _import_fault(module: str, name: str) -> str | None:
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return f"{name} cannot be imported ({' '.join(str(error).split())})"
    return None


def _check(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(f"unknown {what} of ops {value!r}; known: {', '.join(known)}")
