"""Which implementation an op takes, and how its logits are stored: from the run file; EAGLE3_FAST_IMPL where it says auto."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache

import torch

from eagle3_fast.errors import InputError
from eagle3_fast.log import say_once

IMPLEMENTATIONS = ("auto", "flash", "fused", "reference")
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


def resolve(
    op: str,
    device_type: str,
    dtype: torch.dtype,
    unsupported: str | None = None,
    flash: Callable[[], str | None] | None = None,
) -> str:
    """`flash`, `fused` or `reference` for `op` on inputs of this kind. Says once what was taken and why; refuses what cannot be.

    unsupported: what the op itself found in its inputs that no fused kernel of it takes.
    flash: tells what keeps the op from flash-attn's kernels, called only where they are asked for; none: it has no use for them,
    and takes `flash` for `auto`.
    """
    impl = _asked()
    if impl == "flash" and flash is not None:
        _refuse_lacking(impl, op, flash())
        say_once(f"{op}: flash-attn on {device_type}")
        return impl
    lacking = "it was asked for" if impl == "reference" else unsupported or _lacking(op, device_type, dtype)
    if impl == "fused":
        _refuse_lacking(impl, op, lacking)
    if lacking is None:
        say_once(f"{op}: fused kernel on {device_type}")
        return "fused"
    say_once(f"{op}: plain PyTorch reference on {device_type}, because {lacking}")
    return "reference"


def _asked() -> str:
    """The implementation that run file or environment ask for."""
    impl = _selected.get("impl", "auto")
    impl = os.environ.get("EAGLE3_FAST_IMPL", "auto") if impl == "auto" else impl
    _check("implementation", impl, IMPLEMENTATIONS)
    return impl


def _refuse_lacking(impl: str, op: str, lacking: str | None) -> None:
    if lacking is not None:
        raise InputError(f"ops.impl is {impl}, but {op} cannot run so: {lacking}; mend that (eagle3-fast doctor), or use auto")


def _lacking(op: str, device_type: str, dtype: torch.dtype) -> str | None:
    """What keeps `op` from its fused kernel; None where nothing does."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"its kernels take float32 and bfloat16, not {dtype}"
    if device_type == "cpu":
        return _lacking_cpu(op)
    if device_type == "cuda":
        return import_fault("triton", "Triton")
    return f"there are no kernels for {device_type}"


@cache
def _lacking_cpu(op: str) -> str | None:
    """`linear_divergence` needs our C++ module, whose import registers its kernel; `ttt_attention` a kernel of PyTorch's own."""
    if op == "ttt_attention":
        return None if hasattr(torch.ops.aten, CPU_FLASH) else f"this PyTorch has no {CPU_FLASH}"
    fault = import_fault("eagle3_fast._C", "the C++ module (built at install where torch and a compiler are seen)")
    if fault is None and not torch._C._dispatch_has_kernel_for_dispatch_key("eagle3_fast::row_divergence_", "CPU"):
        return "the C++ module is of another version; install the package again"
    return fault


@cache
def import_fault(module: str, name: str) -> str | None:
    """Why `module` cannot be imported, which is tried once; None where it can."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # the last two: built for another torch
        return f"{name} cannot be imported ({' '.join(str(error).split())})"
    return None


def _check(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(f"unknown {what} of ops {value!r}; known: {', '.join(known)}")
