"""In which dtype a device multiplies matrices well."""

from __future__ import annotations

from functools import cache

import torch

from eagle3_fast.log import say_once


def arithmetic_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype to compute in where `dtype` was asked for: float32 instead of bfloat16 on a CPU without bfloat16 instructions.

    Such a CPU emulates bfloat16 products at a tenth to a hundredth of its float32 rate; float32 is also the more exact of the two.
    """
    if dtype != torch.bfloat16 or device_type != "cpu" or cpu_multiplies_bfloat16():
        return dtype
    say_once("this CPU has no bfloat16 instructions: computing in float32")
    return torch.float32


def training_device() -> str:
    """The GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def training_dtype(hidden_states_dtype: str) -> torch.dtype:
    """What batches, frozen parts and products of a training run are in, by the run file's `hidden_states_dtype`."""
    return arithmetic_dtype(getattr(torch, hidden_states_dtype), training_device())


@cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has bfloat16 dot products (AVX-512 BF16 or AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
