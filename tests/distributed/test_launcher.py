"""The real `deepspeed` command: one node with two ranks, and two nodes as two launchers that meet over loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from distributed.ranks import free_port
from distributed.test_same_mathematics import assert_same, into, losses
from train.runs import changed

from eagle3_fast.config import RunConfig
from eagle3_fast.train.trainer import train

DEEPSPEED = Path(sys.executable).with_name("deepspeed")


def launch(config: RunConfig, folder: Path, *options: str) -> tuple[subprocess.Popen[bytes], Path]:
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [str(DEEPSPEED), *options, "--module", "eagle3_fast", "train", "--config", str(folder / "run.yaml")]
    log = folder / "log"
    streams = {"stdout": log.open("wb"), "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True, **streams), log


@pytest.fixture(scope="module")
def six(run_file: RunConfig) -> RunConfig:
    return changed(run_file, **{"train.trainer": {"max_steps": 6}})


@pytest.fixture(scope="module")
def alone(six: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train(into(six, folder, engine={"accumulation": 2}))
    return folder


def test_one_node(six: RunConfig, alone: Path, tmp_path: Path) -> None:
    launcher, log = launch(into(six, tmp_path / "run"), tmp_path, "--num_accelerators", "2", "--master_port", str(free_port()))
    assert launcher.wait(120) == 0, log.read_text()[-3000:]
    assert_same(tmp_path / "run", alone)


def test_two_nodes(six: RunConfig, alone: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=1\n")
    config = into(six, tmp_path / "run")
    meet = ["--hostfile", str(tmp_path / "hosts"), "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    nodes = [launch(config, tmp_path / f"node{rank}", *meet, "--node_rank", str(rank)) for rank in (0, 1)]
    for launcher, log in nodes:
        assert launcher.wait(120) == 0, log.read_text()[-3000:]
    assert_same(tmp_path / "run", alone)


def test_ctrl_c_saves(run_file: RunConfig, tmp_path: Path) -> None:
    """A terminal sends it to launcher and ranks alike, and the launcher sends the ranks SIGTERM on top."""
    config = changed(into(run_file, tmp_path / "run"), **{"train.trainer": {"max_steps": None, "epochs": 400}})
    launcher, log = launch(config, tmp_path, "--num_accelerators", "2", "--master_port", str(free_port()))
    metrics, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 90
    while (not metrics.exists() or len(losses(tmp_path / "run")) < 3) and time.monotonic() < until:
        time.sleep(0.2)
    os.killpg(launcher.pid, signal.SIGINT)
    try:
        launcher.wait(60)
        while "run the same command to go on" not in log.read_text() and time.monotonic() < until + 30:
            time.sleep(0.2)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    assert "interrupted at step" in log.read_text(), log.read_text()[-2000:]
