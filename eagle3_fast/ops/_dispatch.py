"""Which implementation an op takes: `auto`, `fused` or `reference`, from the run file or the variable EAGLE3_FAST_IMPL."""

from __future__ import annotations

import os

import torch

from eagle3_fast.errors import InputError
from eagle3_fast.log import say_once

IMPLEMENTATIONS = ("auto", "fused", "reference")
_selected: str | None = None


def select(impl: str) -> None:
    """Set the implementation for this process (the run file's `ops.impl`)."""
    global _selected
    _check(impl)
    _selected = impl


def full_precision(device_type: str) -> torch.autocast:
    """Autocast off: an op chooses the precision of its own products, whatever the model around it runs in."""
    return torch.autocast(device_type, enabled=False)


def resolve(op: str, device_type: str) -> str:
    """The implementation to run `op` with on `device_type`; says once what was taken, refuses `fused` where there is none."""
    impl = _selected or os.environ.get("EAGLE3_FAST_IMPL", "auto")
    _check(impl)
    if impl == "fused":
        raise InputError(
            f"ops.impl is fused, but {op} has no fused kernel for {device_type} in this version; use auto or reference"
        )
    say_once(f"{op}: plain PyTorch reference on {device_type}")
    return "reference"


def _check(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise InputError(f"unknown op implementation {impl!r}; known: {', '.join(IMPLEMENTATIONS)}")
