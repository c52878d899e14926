"""What every shipped kernel becomes on sm_90 and sm_120: compiled here, where there is no card, and read from the machine code."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET is set: an interpreted kernel has no machine code", allow_module_level=True)

import triton
import triton.language as tl

from eagle3_fast.kernels import linear_divergence
from eagle3_fast.testing.aot import SHARED_LIMIT, Compiled, assert_fits, compile_kernel

ARCHITECTURES = sorted(SHARED_LIMIT)
FORMS = {
    "kl_div in bf16": ("*bf16", {"CAPPED": False, "FORM_GRADIENT": True, "NEEDS_SUMS": False, "NEEDS_JSD": False}),
    "all kinds in float32, capped": ("*fp32", {"CAPPED": True, "FORM_GRADIENT": True, "NEEDS_SUMS": True, "NEEDS_JSD": True}),
}
"""The usual form of the row kernel, and the one with most to hold."""


def compile_rows(config: linear_divergence.Config, form: str, arch: int) -> Compiled:
    logits, constants = FORMS[form]
    types: dict[str, Any] = dict.fromkeys(linear_divergence._divergence_rows.arg_names, "*fp32")
    types |= dict.fromkeys([name for name in types if name.endswith("_weight")] + ["cap"], "fp32")
    types |= {"z": logits, "t": logits, "first": "*i32", "row_weight": "*fp32", "draft_top1": "*i64", "verifier_top1": "*i64"}
    types |= {"vocab": "i32", "stride_z": "i32", "stride_t": "i32"}
    constants = {**constants, "BLOCK": config.block}
    types = {name: kind for name, kind in types.items() if name not in constants}
    divisible = [name for name, kind in types.items() if kind[0] in "*i"]
    return compile_kernel(
        linear_divergence._divergence_rows, types, constants, arch=arch, num_warps=config.num_warps, divisible=divisible
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", linear_divergence.CONFIGS, ids=lambda config: f"{config.block}/{config.num_warps}")
def test_row_kernel(config: linear_divergence.Config, form: str, arch: int) -> None:
    figures = compile_rows(config, form, arch)
    assert_fits(figures, f"row kernel, {config}, {form}")
    assert figures.wide_load_share == 1.0, figures
    # At least 16 warps on a multiprocessor: with fewer, the memory waits for the programs.
    assert figures.ctas_per_sm * config.num_warps >= 16, figures


@triton.jit
def _sums(x, out, size, stride_x, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        total += tl.load(x + tl.program_id(0) * stride_x + columns, mask=columns < size, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _product(a, b, out, size, stride_a, stride_b, BLOCK: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, size, BLOCK):
        total = tl.dot(tl.load(a + rows * stride_a + start + columns), tl.load(b + (start + rows) * stride_b + columns), total)
    tl.store(out + rows * BLOCK + columns, total)


def test_the_harness_sees_spills_and_narrow_loads() -> None:
    types = {"x": "*bf16", "out": "*fp32", "size": "i32", "stride_x": "i32"}
    spilled = compile_kernel(_sums, types, {"BLOCK": 8192}, arch=120, num_warps=1, divisible=types)
    assert spilled.stack > 0 and spilled.wide_load_share == 1.0
    with pytest.raises(AssertionError, match="local-memory accesses in loops"):
        assert_fits(spilled, "sums of 256 columns a thread")
    narrow = compile_kernel(_sums, types, {"BLOCK": 1024}, arch=120, num_warps=4, divisible=["x", "out"])
    assert narrow.local_in_loops == 0 and narrow.wide_load_share == 0.0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_harness_sees_matrix_instructions(arch: int) -> None:
    types = {"a": "*bf16", "b": "*bf16", "out": "*fp32", "size": "i32", "stride_a": "i32", "stride_b": "i32"}
    figures = compile_kernel(_product, types, {"BLOCK": 64}, arch=arch, num_warps=4, num_stages=2, divisible=types)
    assert_fits(figures, "product")
    assert (figures.mma > 0, figures.wgmma > 0) == (arch == 120, arch == 90)
    assert figures.wide_load_share == 1.0 and figures.shared > 0
