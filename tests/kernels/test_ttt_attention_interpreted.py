"""The kernels of `ttt_attention`, run on the CPU by Triton's interpreter, against the float64 reference.

Whether a kernel is compiled or interpreted is decided when triton is imported, for a whole process. So pytest finds one test here,
which runs the functions called `check_*` in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from eagle3_fast.reference import ttt_attention as reference
from eagle3_fast.testing.budget import assert_within_budget
from eagle3_fast.testing.cases import TTT_ATTENTION, TTTAttentionCase

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IN_BFLOAT16 = ("three query heads a key head", "fewer queries at every step")

if INTERPRETED:
    import numpy as np
    import triton
    import triton.experimental.gluon  # on Python 3.10 it cannot be imported once the language is patched
    import triton.language as tl
    from triton.runtime import interpreter

    from eagle3_fast.kernels import ttt_attention as kernels

    @triton.jit
    def _product(a, b, out, SIZE: tl.constexpr):
        cells = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        tl.store(out + cells, tl.dot(tl.load(a + cells), tl.load(b + cells)))


def test_kernels_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-x", "--durations=5", "-o", "python_functions=check_*", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module", autouse=INTERPRETED)
def mended() -> None:
    """Two faults of triton 3.9's interpreter put right, for this process alone, and a canary that they are.

    It keeps bf16 as 16-bit integers and multiplies matrices of them as such. And it prepares the language anew at each call of a
    function from a kernel, which takes most of its time; once is enough.
    """
    product = interpreter.InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: product(self, widened(a), widened(b), *rest)
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)

    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(16, 16, generator=draw).to(dtype) for _ in range(2))
        out = torch.empty(16, 16)
        _product[(1,)](a, b, out, SIZE=16)
        assert torch.allclose(out.double(), a.double() @ b.double(), atol=1e-5)


def results(implementation: tuple, inputs: dict[str, Any]) -> list[Tensor]:
    """Output, log-sum-exp and all gradients."""
    forward, backward = implementation
    out, lse = forward(**inputs)
    probe = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    return [out, lse, *backward(probe, out, lse, *inputs.values())]


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [cast(item, dtype) for item in value]
    return value.detach().to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def assert_agrees(inputs: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    plain = (reference.ttt_attention, reference.ttt_attention_backward)
    inputs = {name: cast(value, dtype) for name, value in inputs.items()}
    exact = results(plain, {name: cast(value, torch.float64) for name, value in inputs.items()})
    eager = results(plain, inputs)
    actual = results((kernels.forward, kernels.backward), inputs)
    for index, triple in enumerate(zip(actual, exact, eager, strict=True)):
        assert_within_budget(*triple, f"result {index}")
    return actual


@pytest.mark.parametrize("case", TTT_ATTENTION, ids=lambda case: case.name)
def check_float32(case: TTTAttentionCase) -> None:
    assert_agrees(case.inputs(torch.float32), torch.float32)


@pytest.mark.parametrize("case", [case for case in TTT_ATTENTION if case.name in IN_BFLOAT16], ids=lambda case: case.name)
def check_bfloat16(case: TTTAttentionCase) -> None:
    assert_agrees(case.inputs(torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(96, None), (112, None), (192, 128), (256, None)])
def check_head_sizes(head_dim: int, value_dim: int | None) -> None:
    """Two powers of two, padding, unequal widths."""
    case = TTTAttentionCase("wide", (5, 9), heads=(2, 1), head_dim=head_dim, value_dim=value_dim, steps=1, spare=1)
    assert_agrees(case.inputs(torch.bfloat16), torch.bfloat16)


def check_a_row_that_sees_nothing() -> None:
    inputs = TTTAttentionCase("none", (40,), heads=(2, 1), steps=0).inputs(torch.float32)
    inputs["key_range_N2"][2] = torch.tensor([2, 2])
    inputs["key_range_N2"][39] = torch.tensor([40, 40])
    out, lse, grad_q, *_ = assert_agrees(inputs, torch.float32)
    for result in (out, lse, grad_q):
        assert (result[[2, 39]] == 0).all()


def check_no_queries() -> None:
    inputs = TTTAttentionCase("few", (5,), steps=1).inputs(torch.float32)
    inputs |= {
        "q_NQD": inputs["q_NQD"][:0],
        "key_range_N2": inputs["key_range_N2"][:0],
        "own_rows": [x[:0] for x in inputs["own_rows"]],
    }
    assert_agrees(inputs, torch.float32)


def check_views_are_taken() -> None:
    """Inputs cut from larger tensors, as the projections of q, k and v in one matrix would be."""
    inputs = TTTAttentionCase("views", (20,), heads=(2, 2), steps=1).inputs(torch.float32)
    inputs["q_NQD"], inputs["k_TKD"] = torch.cat((inputs["q_NQD"], inputs["k_TKD"]), dim=1).detach().split(2, dim=1)
    assert not inputs["q_NQD"].is_contiguous()
    assert_agrees(inputs, torch.float32)


def check_what_has_no_kernel_is_refused() -> None:
    for case, dtype in (
        (TTTAttentionCase("wide", (2,), head_dim=320), torch.float32),
        (TTTAttentionCase("exact", (2,)), torch.float64),
    ):
        with pytest.raises(ValueError, match="ops.impl to reference"):
            kernels.forward(**case.inputs(dtype))
