"""Which dtype a run computes in: bfloat16 where the device multiplies it, float32 where a CPU would only emulate it."""

from __future__ import annotations

import pytest
import torch

from eagle3_fast.precision import arithmetic_dtype


@pytest.mark.parametrize(
    ("asked", "device", "native", "expected"),
    [
        (torch.bfloat16, "cpu", True, torch.bfloat16),
        (torch.bfloat16, "cpu", False, torch.float32),
        (torch.bfloat16, "cuda", False, torch.bfloat16),
        (torch.float32, "cpu", True, torch.float32),
        (torch.float16, "cpu", False, torch.float16),
    ],
)
def test_arithmetic_dtype(
    asked: torch.dtype, device: str, native: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3_fast.precision.cpu_multiplies_bfloat16", lambda: native)
    assert arithmetic_dtype(asked, device) == expected
