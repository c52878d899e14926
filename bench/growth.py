"""How time and memory of ours grow with TTT steps, rows and vocabulary: `python bench/growth.py [--threads N]`, a table in Markdown.

Sizes of SmolLM2-135M, bfloat16 where the CPU multiplies it. Times are medians; the sizes of a line are timed in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import bench_linear_divergence
import bench_train_step
import bench_ttt_attention
import torch
from measure import Local
from presets import Case

from eagle3_fast.precision import arithmetic_dtype

BASE = Case("smollm2", 32_000)
STEPS, VOCABULARIES, ROWS, LENGTHS = (1, 2, 3, 5, 7), (16_000, 32_000, 49_152), (2_048, 4_096, 8_192), (2_048, 8_192, 32_768)
TURNS = 3


def measured(make: Callable[[Case], Local], cases: Sequence[Case]) -> tuple[list[float], list[float | None]]:
    """Median seconds and peak MiB of each case."""
    running = [make(case) for case in cases]
    peaks = [one.peak_mib() for one in running]
    turns = [[one.seconds()[0] for one in running] for _ in range(TURNS)]
    return [median(times) for times in zip(*turns, strict=True)], peaks


def steps(dtype: torch.dtype) -> str:
    """Every TTT step beyond the first costs what the second does, where time is affine."""
    cases = [replace(BASE, ttt_steps=count) for count in STEPS]
    seconds, _ = measured(lambda case: bench_train_step.make("auto", case, dtype, "cpu"), cases)
    first, second, *_, last = seconds
    slope = (last - second) / (STEPS[-1] - STEPS[1])
    off = max(abs(time - first - (last - first) * (n - 1) / (STEPS[-1] - 1)) / time for n, time in zip(STEPS, seconds, strict=True))
    times = ", ".join(f"{time:.2f} s" for time in seconds)
    growth = f"off a line by {off:.1%}; slope {slope / (second - first):.2f} x the second step's work"
    return f"| training step, T = {STEPS} | {times} | {growth} |"


def head(axis: str, values: Sequence[int], dtype: torch.dtype) -> str:
    cases = [replace(BASE, ttt_steps=1, **{axis: value}) for value in values]
    seconds, peaks = measured(lambda case: bench_linear_divergence.make("fused", case, dtype, "cpu"), cases)
    rates = [time / value for time, value in zip(seconds, values, strict=True)]
    times = ", ".join(f"{time:.2f} s" for time in seconds)
    return (
        f"| `linear_divergence`, {axis} {values} | {times}; {_mib(peaks)} | off proportion by {max(rates) / min(rates) - 1:.1%} |"
    )


def attention(dtype: torch.dtype) -> str:
    cases = [replace(BASE, rows=length) for length in LENGTHS]
    seconds, peaks = measured(lambda case: bench_ttt_attention.make("fused", case, dtype, "cpu"), cases)
    a_row = ", ".join(f"{1024 * (peak or 0) / length:.1f}" for peak, length in zip(peaks, LENGTHS, strict=True))
    times = ", ".join(f"{time:.2f} s" for time in seconds)
    return f"| `ttt_attention`, rows {LENGTHS}, documents of {BASE.document} | {times}; {_mib(peaks)} | KiB a row: {a_row} |"


def _mib(peaks: Sequence[float | None]) -> str:
    return ", ".join("?" if peak is None else f"{peak:.0f}" for peak in peaks) + " MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    dtype = arithmetic_dtype(torch.bfloat16, "cpu")
    print(
        f"| {str(dtype).removeprefix('torch.')}, {torch.get_num_threads()} thread(s) | time, peak above inputs | growth |\n|---|---|---|"
    )
    for line in (steps, lambda to: head("rows", ROWS, to), lambda to: head("vocab", VOCABULARIES, to), attention):
        print(line(dtype), flush=True)


if __name__ == "__main__":
    main()
