"""What the op tests share: memory that nobody has written is NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.empty` fills its result, so that an output or buffer that a kernel forgot shows."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
