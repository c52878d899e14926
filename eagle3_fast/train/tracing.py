"""A window of optimizer steps under torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from eagle3_fast.errors import InputError


class Untraced:
    """What a run without a trace counts its steps on."""

    def step(self) -> None: ...


@contextmanager
def trace(steps: tuple[int, int] | None, folder: Path, rank: int) -> Iterator[profile | Untraced]:
    """Record optimizer steps first..last, counted from 1 in this process; its `step` is called after each. TensorBoard reads the files."""
    if steps is None:
        yield Untraced()
        return
    first, last = steps
    if not 1 <= first <= last:
        raise InputError(f"engine.profile_steps {list(steps)}: first and last step of a window, 1 or later")
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    warmup = min(1, first - 1)  # the profiler starts a step early, so that its own start is not in the trace
    window = schedule(wait=first - 1 - warmup, warmup=warmup, active=last - first + 1, repeat=1)
    with profile(
        activities=activities, schedule=window, on_trace_ready=tensorboard_trace_handler(str(folder), f"rank{rank}")
    ) as tracer:
        yield tracer
