"""Starts the ranks of a run as processes of their own, as a launcher does, and collects what they say.

They are forked from one process that has imported torch, DeepSpeed and the trainer but computed nothing: importing takes ten seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import yaml

from eagle3_fast.config import RunConfig

TRAIN = "import sys; from eagle3_fast.cli import main; sys.exit(main(['train', '--config', sys.argv[1]]))"

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["deepspeed", "eagle3_fast.cli", "eagle3_fast.train.trainer", "eagle3_fast.train.deepspeed_engine"])


@dataclass
class Rank:
    """A process and the file that its output goes to."""

    process: ForkServerProcess
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float) -> int:
        """Exit code; minus the signal that killed it. Raises TimeoutError."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            raise TimeoutError
        return self.process.exitcode


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(
    config: RunConfig, folder: Path, size: int, script: str | Sequence[str] = TRAIN, ranks: Sequence[int] | None = None
) -> list[Rank]:
    """Start `ranks` (all, if none) of a run of `size`; `script` is Python source that finds the run file in sys.argv[1], one for each rank
    where it is a sequence."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    port, started = free_port(), []
    for rank in range(size) if ranks is None else ranks:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        log = folder / f"rank{rank}.log"
        log.touch()
        source = script if isinstance(script, str) else script[rank]
        environment = {key: str(value) for key, value in place.items()}
        process = FORKS.Process(target=_rank, args=(source, str(folder / "run.yaml"), environment, str(log)))
        process.start()
        started.append(Rank(process, log))
    return started


def _rank(source: str, run_file: str, environment: dict[str, str], log: str) -> None:
    """What a new process does: its output into `log`, one thread, products in float32, then the script as the main program."""
    import torch

    from eagle3_fast import precision

    precision.cpu_multiplies_bfloat16 = lambda: False
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = ["-c", run_file]
    exec(compile(source, "<rank>", "exec"), {"__name__": "__main__"})


def finish(ranks: Sequence[Rank], seconds: float = 120) -> list[int]:
    """Exit codes; kills what has not ended by then and fails."""
    until = time.monotonic() + seconds
    try:
        return [rank.wait(max(0.1, until - time.monotonic())) for rank in ranks]
    except TimeoutError:
        said = "\n".join(f"--- {rank.log.name}: {rank.said[-2000:]}" for rank in ranks)
        raise AssertionError(f"not ended after {seconds} s\n{said}") from None
    finally:
        for rank in ranks:
            rank.process.kill()


def run(config: RunConfig, folder: Path, size: int, script: str | Sequence[str] = TRAIN) -> list[Rank]:
    """Start all ranks and see them end well."""
    ranks = start(config, folder, size, script)
    codes = finish(ranks)
    assert codes == [0] * size, "\n".join(rank.said[-3000:] for rank in ranks)
    return ranks
