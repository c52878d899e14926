"""Options of all benches and the comparison that each of them calls: `pytest bench --preset smollm2 --threads 1,2 -k linear`.

Every test is one case; its providers run in turns. pytest-benchmark drives the turns and shows the first provider; the whole
result goes to `build/bench/<bench>.json`, from which `report.py` makes tables and plots.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import measure
import presets
import pytest
import torch
from measure import BENCH, Measured, Remote, Turns, started
from presets import Case
from worker import start

from eagle3_fast.precision import arithmetic_dtype


@dataclass(frozen=True)
class Setting:
    """Where and how a case is measured."""

    device: str
    dtype: str
    threads: int
    rounds: int
    together: bool  # all providers in this process
    wanted: tuple[str, ...]  # providers; none: all


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("eagle3_fast benches")
    group.addoption("--preset", default="smoke", help=f"comma-separated: {', '.join(presets.MODELS)}")
    group.addoption("--providers", default="", help="comma-separated; none: every one that runs here")
    group.addoption("--rounds", type=int, default=5, help="turns of each provider")
    group.addoption("--threads", default="1", help="comma-separated numbers of CPU threads")
    group.addoption("--ranks", type=int, default=0, help="bench_train_step: whole optimizer steps on so many ranks of one thread")
    group.addoption("--together", action="store_true", help="no process of its own for each provider: quick, memory less exact")
    group.addoption("--device", default="cpu", choices=("cpu", "cuda"))
    group.addoption(
        "--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="float32 is taken on a CPU without bfloat16"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    if "case" in metafunc.fixturenames:
        swept = [presets.cases(name, metafunc.module.AXES) for name in config.getoption("preset").split(",")]
        # Base cases of all presets first: where time is short, each preset has been seen before one is swept.
        metafunc.parametrize("case", [case for column in zip_longest(*swept) for case in column if case], ids=str)
    if "setting" in metafunc.fixturenames:
        metafunc.parametrize("setting", list(_settings(config)), ids=lambda setting: f"{setting.device}-{setting.threads}thread")


def _settings(config: pytest.Config) -> list[Setting]:
    device = config.getoption("device")
    dtype = str(arithmetic_dtype(getattr(torch, config.getoption("dtype")), device)).removeprefix("torch.")
    wanted = tuple(filter(None, config.getoption("providers").split(",")))
    threads = config.getoption("threads").split(",") if device == "cpu" else ["1"]
    # On CUDA the allocator counts exactly, so one process, which starts the driver once, is enough.
    together = device == "cuda" or config.getoption("together")
    return [Setting(device, dtype, int(count), config.getoption("rounds"), together, wanted) for count in threads]


@pytest.fixture
def compare(request: pytest.FixtureRequest, setting: Setting) -> Callable[..., None]:
    """pytest-benchmark drives the turns where it is installed; a machine with a GPU may have pytest alone."""
    plugin = request.config.pluginmanager.hasplugin("benchmark")
    return partial(_compare, request.getfixturevalue("benchmark") if plugin else None, setting)


def _compare(
    benchmark: Any,
    setting: Setting,
    bench: str,
    names: Sequence[str],
    case: Case,
    gemm_flops: int = 0,
    makers: dict[str, Callable[[], Measured]] | None = None,
    tokens: int | None = None,
) -> None:
    """Time the providers of one case in turns and store the result.

    gemm_flops: of the provider `gemm`. makers: how to start providers that `make` of the bench does not know. tokens: of one call.
    """
    chosen = [name for name in names if not setting.wanted or name in setting.wanted]
    own = {name: partial(_start, bench, name, case, setting) for name in chosen}
    with started({name: (makers or {}).get(name, maker) for name, maker in own.items()}) as all_of_them:
        turns = Turns(all_of_them.running)
        if turns.running:
            _drive(benchmark, turns, setting.rounds)
        result = {**case.record(), **asdict(setting), "bench": bench, "providers": turns.results()}
    result |= {"unavailable": all_of_them.unavailable, "failed": all_of_them.failed, "gemm_flops": gemm_flops}
    result |= {"tokens": tokens or case.rows, "environment": measure.environment(setting.device)}
    if benchmark:
        benchmark.extra_info.update(result)
    measure.save(bench, result)
    assert not all_of_them.failed, all_of_them.failed
    if not turns.running:
        pytest.skip(str(all_of_them.unavailable))


def _drive(benchmark: Any, turns: Turns, rounds: int) -> None:
    """`rounds` turns of every provider; the first one is what pytest-benchmark times, the others go before it."""
    first, *others = turns.running

    def rest() -> None:
        for name in others:
            turns.take(name)
        others.extend(others[:1])
        del others[:1]

    if benchmark:
        benchmark.pedantic(turns.take, args=(first,), setup=rest, rounds=rounds)
        return
    for _ in range(rounds):
        rest()
        turns.take(first)


def _start(bench: str, name: str, case: Case, setting: Setting) -> Measured:
    if setting.together:
        if setting.device == "cpu":
            torch.set_num_threads(setting.threads)
        return start(bench, name, case, setting.dtype, setting.device)
    command = [sys.executable, str(BENCH / "worker.py"), bench, name, json.dumps(asdict(case))]
    return Remote([*command, setting.dtype, setting.device, str(setting.threads)], setting.threads)


def pytest_report_header(config: pytest.Config) -> str:
    setting = _settings(config)[0]
    return f"benches on {setting.device} in {setting.dtype}, threads {config.getoption('threads')} of {os.cpu_count()}"
