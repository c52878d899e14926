"""Timing and memory: one provider on one case, alone in a process of its own or in this one, and several providers in turns.

Imported by the benches and, in an environment without eagle3_fast, by the runner of speculators: needs torch and nothing else.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH.parent / "build" / "bench"
MIB = 2**20
CUDA_CALLS, CUDA_SECONDS = 5, 0.2
"""A turn on CUDA ends after so many timed calls or so long; before them one untimed call, because memory is given back between turns."""


class Unavailable(Exception):
    """A provider cannot run this case here; the message says why and stands in the table."""


class Measured(Protocol):
    """A provider with its inputs in place."""

    error: float | None  # of its gradient against float64, relative, on the small case

    def seconds(self) -> list[float]:
        """One turn: the durations of its timed calls."""

    def peak_mib(self) -> float | None:
        """Most memory held during one call beyond its inputs (and a step's weights); None where the system does not tell."""

    def close(self) -> None: ...


class Local:
    """`call` timed and measured in this process, after one call to warm up.

    held_bytes: what `call` keeps from one call to the next beyond its inputs; counted with its peak.
    """

    def __init__(
        self, call: Callable[[], Any], device: str, error: float | None = None, held_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        self.call, self.device, self.error, self.held_bytes = call, device, error, held_bytes
        call()

    def seconds(self) -> list[float]:
        if self.device != "cuda":
            start = time.perf_counter()
            self.call()
            return [time.perf_counter() - start]
        torch.cuda.empty_cache()
        self.call()
        durations = [_cuda_seconds(self.call)]
        while len(durations) < CUDA_CALLS and sum(durations) < CUDA_SECONDS:
            durations.append(_cuda_seconds(self.call))
        return durations

    def peak_mib(self) -> float | None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.call()
            torch.cuda.synchronize()
            return (torch.cuda.max_memory_allocated() - before) / MIB
        peak = _cpu_peak_mib(self.call)
        return None if peak is None else peak + self.held_bytes() / MIB

    def close(self) -> None:
        """Nothing is held but the inputs."""


def _cuda_seconds(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _cpu_peak_mib(call: Callable[[], Any]) -> float | None:
    """From the kernel's own high-water mark, which a sampling thread could only miss and would slow down."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # blocks kept by the allocator would hide that they are needed again
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _status_kib("VmRSS")
    call()
    return (_status_kib("VmHWM") - before) / 1024


def _status_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


class Remote:
    """A provider in a process of its own, so that no allocator hands it memory that another one touched. Speaks `serve`'s lines."""

    def __init__(self, command: Sequence[str], threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.error = self._answer()["error"]
        except BaseException:
            self.close()
            raise

    def _answer(self) -> dict[str, Any]:
        line = _opened(self.process.stdout).readline()
        if not line:
            raise RuntimeError(f"{' '.join(self.process.args)}: ended with code {self.process.wait()}")  # type: ignore[arg-type]
        answer = json.loads(line)
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"])
        return answer

    def _ask(self, question: str) -> Any:
        pipe = _opened(self.process.stdin)
        print(question, file=pipe, flush=True)
        return self._answer()[question]

    def seconds(self) -> list[float]:
        return self._ask("seconds")

    def peak_mib(self) -> float | None:
        return self._ask("peak_mib")

    def close(self) -> None:
        _opened(self.process.stdin).close()
        self.process.wait()


def _opened(pipe: Any) -> TextIO:
    assert pipe is not None, "the process was started with pipes"
    return pipe


def serve(make: Callable[[], Measured]) -> None:
    """Answer a `Remote`: make the provider, then one JSON line for each line read. Anything else that prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        measured = make()
    except Unavailable as reason:
        print(json.dumps({"unavailable": str(reason)}), file=answers, flush=True)
        return
    print(json.dumps({"error": measured.error}), file=answers, flush=True)
    for line in sys.stdin:
        question = line.strip()
        print(json.dumps({question: getattr(measured, question)()}), file=answers, flush=True)


@dataclass
class Started:
    """Providers that run, and why the others do not: what this machine lacks, or a fault."""

    running: dict[str, Measured] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@contextmanager
def started(makers: dict[str, Callable[[], Measured]]) -> Iterator[Started]:
    """Start every provider. A faulty one, beyond its error budget for one, does not keep the others from being timed."""
    all_of_them = Started()
    try:
        for name, make in makers.items():
            try:
                all_of_them.running[name] = make()
            except Unavailable as reason:
                all_of_them.unavailable[name] = str(reason)
            except (AssertionError, ImportError, RuntimeError, TypeError) as fault:
                all_of_them.failed[name] = f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"
        yield all_of_them
    finally:
        for measured in all_of_them.running.values():
            measured.close()


class Turns:
    """Providers timed in turns, so that what else the machine does hits all of them alike."""

    def __init__(self, running: dict[str, Measured]) -> None:
        self.running = running
        self.peaks = {name: measured.peak_mib() for name, measured in running.items()}
        self.timings: dict[str, list[float]] = {name: [] for name in running}

    def take(self, name: str) -> None:
        self.timings[name] += self.running[name].seconds()

    def results(self) -> dict[str, dict[str, Any]]:
        """Per provider: seconds (median, interquartile range, all) and their ratios, peak MiB, gradient error."""
        results = {
            name: {**spread(seconds), "seconds": seconds, "peak_mib": self.peaks[name], "error": self.running[name].error}
            for name, seconds in self.timings.items()
        }
        add_ratios(results)
        return results


OURS = ("fused", "auto", "workers 0")
"""Providers that are this project, as the benches name them."""


def add_ratios(results: dict[str, dict[str, Any]]) -> None:
    """Each provider's median over ours, and over that of the bare products, where these ran."""
    for label, names in (("times_ours", OURS), ("times_gemm", ("gemm",))):
        whole = next((results[name]["median"] for name in names if name in results), None)
        for values in results.values():
            values[label] = values["median"] / whole if whole else None


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and interquartile range."""
    if len(seconds) < 2:
        return {"median": seconds[0], "iqr": 0.0}
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return {"median": middle, "iqr": high - low}


def require_memory(needed: int, device: str) -> None:
    """Refuse what this machine's free memory (CPU) cannot hold; a GPU says so itself."""
    lines = Path("/proc/meminfo").read_text().splitlines() if device == "cpu" else []
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), needed)
    if needed > free:
        raise Unavailable(f"would need about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free")


def gemms(shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: str) -> Callable[[], None]:
    """Bare `torch.mm` [m, k] x [k, n] into buffers that exist: the products that any implementation needs, as PyTorch computes them.

    A packed frozen head (`ops._heads`) can be a tenth faster than this on a bfloat16 CPU.
    Equal shapes share their buffers, as a chunked implementation does.
    """
    buffers = {
        (m, k, n): (
            torch.randn(m, k, dtype=dtype, device=device),
            torch.randn(n, k, dtype=dtype, device=device).T,
            torch.empty(m, n, dtype=dtype, device=device),
        )
        for m, k, n in set(shapes)
    }

    def call() -> None:
        for shape in shapes:
            a, b, out = buffers[shape]
            torch.mm(a, b, out=out)

    return call


def gemm_flops(shapes: Sequence[tuple[int, int, int]]) -> int:
    return sum(2 * m * k * n for m, k, n in shapes)


def environment(device: str) -> dict[str, Any]:
    """Machine, versions and commit that a result holds for."""
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.processor())
    flags = next((line.split(":")[1].split() for line in info if line.startswith("flags")), [])
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=BENCH, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    return {
        "cpu": cpu,
        "features": sorted(set(flags) & {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16"}),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in ("torch", "triton", "liger-kernel")},
        "commit": commit or None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


KEY = ("case", "device", "dtype", "threads")
"""What tells results of a bench apart: a new one replaces the old one of the same key."""


def save(bench: str, result: dict[str, Any]) -> None:
    """Add one case's result to `build/bench/<bench>.json`."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{bench}.json"
    kept = json.loads(path.read_text()) if path.exists() else []
    kept = [old for old in kept if any(old[name] != result[name] for name in KEY)]
    path.write_text(json.dumps([*kept, result], indent=1) + "\n")
