"""Norm and SwiGLU: their formulas, and liger-kernel taken where it should be and nowhere else (a stand-in plays it)."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from eagle3_fast.model import elementwise


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """A package of liger's layout that notes what it is asked; tensors count as CUDA ones."""
    seen: list[tuple] = []

    def record(name: str) -> SimpleNamespace:
        return SimpleNamespace(apply=lambda *arguments: seen.append((name, *arguments)) or arguments[0])

    for name, members in {
        "liger_kernel": {},
        "liger_kernel.ops": {},
        "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": record("rms_norm")},
        "liger_kernel.ops.swiglu": {"LigerSiLUMulFunction": record("swiglu")},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("rms_norm", "swiglu"):
        monkeypatch.setattr(sys.modules["liger_kernel.ops"], name, sys.modules[f"liger_kernel.ops.{name}"], raising=False)
    elementwise._liger.cache_clear()
    yield seen
    elementwise._liger.cache_clear()


def on_cuda(x: Tensor) -> Tensor:
    """A CPU tensor that says it is on CUDA."""

    class Pretended(torch.Tensor):
        is_cuda = True

    return x.as_subclass(Pretended)


def test_cpu_tensors_never_reach_liger(calls: list[tuple]) -> None:
    x = torch.randn(3, 8)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * 2
    assert torch.allclose(elementwise.rms_norm(x, torch.full((8,), 2.0), 1e-6), expected, rtol=1e-5)
    assert torch.allclose(elementwise.swiglu(x, x), x.sigmoid() * x * x)
    assert calls == []


def test_gradients_are_those_of_the_formulas() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight, up = (
        torch.randn(*shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in ((3, 2, 8), (8,), (3, 2, 8))
    )
    assert torch.autograd.gradcheck(lambda x, weight: elementwise.rms_norm(x, weight, 1e-2), (x, weight))
    assert torch.autograd.gradcheck(lambda weight: elementwise.rms_norm(x.detach(), weight, 1e-2), (weight,))
    assert torch.autograd.gradcheck(elementwise.swiglu, (x, up))


@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16])
def test_bfloat16_rows_are_normed_in_float32(of_weight: torch.dtype) -> None:
    """Result and gradients are off by one rounding of each, whatever dtype the weight is in."""
    draw = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(64, 512, generator=draw).bfloat16() for _ in range(2))
    weight = torch.randn(512, generator=draw).to(of_weight)
    narrow, exact = (
        [value, *torch.autograd.grad(value, inputs, grad.to(value.dtype))]
        for inputs in ([y.clone().requires_grad_() for y in (x, weight)], [y.double().requires_grad_() for y in (x, weight)])
        for value in [elementwise.rms_norm(*inputs, 1e-5)]
    )
    for found, wanted, original in zip(narrow, exact, (x, x, weight), strict=True):
        assert found.dtype == original.dtype
        assert float(((found - wanted).norm() / wanted.norm()).detach()) < (2.5e-3 if found.dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_pass_keeps_inputs_and_little_else(dtype: torch.dtype) -> None:
    x, gate, up = (torch.randn(16, 64, dtype=dtype, requires_grad=True) for _ in range(3))
    weight, kept = torch.ones(64, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        elementwise.rms_norm(x, weight, 1e-5)
        elementwise.swiglu(gate, up)
    inputs = {value.data_ptr() for value in (x, weight, gate, up)}
    assert sum(value.nbytes for value in kept if value.data_ptr() not in inputs) == 16 * 4  # 1 / rms of each row


def test_cuda_tensors_do(calls: list[tuple]) -> None:
    x, weight = on_cuda(torch.randn(3, 8)), torch.ones(8)
    elementwise.rms_norm(x, weight, 1e-6)
    elementwise.swiglu(x, x)
    assert [name for name, *_ in calls] == ["rms_norm", "swiglu"]
    assert calls[0][3:] == (1e-6, 0.0, "gemma", False)


@pytest.mark.parametrize("error", [ImportError("no"), RuntimeError("no active driver")])
def test_a_liger_that_cannot_be_used_is_left_alone(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr("importlib.import_module", broken)
    elementwise._liger.cache_clear()
    assert elementwise.swiglu(on_cuda(torch.zeros(2)), torch.ones(2)).tolist() == [0, 0]
    elementwise._liger.cache_clear()


@pytest.mark.parametrize("size", [0, 1])
def test_the_placeholder_of_a_partitioned_weight_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"weight must be \[8\], got .*ZeRO-3"):
        elementwise.rms_norm(torch.ones(3, 8), torch.ones(size), 1e-6)
