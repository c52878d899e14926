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
