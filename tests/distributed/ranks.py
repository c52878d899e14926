"""Starts the ranks of a run as processes of their own, as a launcher does, and collects what they say."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from eagle3_fast.config import RunConfig

TRAIN = "import sys; from eagle3_fast.cli import main; sys.exit(main(['train', '--config', sys.argv[1]]))"


@dataclass
class Rank:
    """A process and the file that its output goes to."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float) -> int:
        return self.process.wait(timeout=seconds)


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
        environment = {**os.environ, **{key: str(value) for key, value in place.items()}, "OMP_NUM_THREADS": "1"}
        log = folder / f"rank{rank}.log"
        source = script if isinstance(script, str) else script[rank]
        command = [sys.executable, "-c", source, str(folder / "run.yaml")]
        started.append(Rank(subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment), log))
    return started


def finish(ranks: Sequence[Rank], seconds: float = 120) -> list[int]:
    """Exit codes; kills what has not ended by then and fails."""
    until = time.monotonic() + seconds
    try:
        return [rank.wait(max(0.1, until - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        said = "\n".join(f"--- {rank.log.name}: {rank.said[-2000:]}" for rank in ranks)
        raise AssertionError(f"not ended after {seconds} s\n{said}") from None
    finally:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.kill()


def run(config: RunConfig, folder: Path, size: int, script: str | Sequence[str] = TRAIN) -> list[Rank]:
    """Start all ranks and see them end well."""
    ranks = start(config, folder, size, script)
    codes = finish(ranks)
    assert codes == [0] * size, "\n".join(rank.said[-3000:] for rank in ranks)
    return ranks
