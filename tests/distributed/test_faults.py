"""Whatever ends a rank, nothing but the step under way is lost, the others end in bounded time, and the same command goes on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from distributed.ranks import Rank, finish, run, start
from distributed.test_same_mathematics import assert_same, into, losses, state
from openai_server import serving
from train.runs import changed
from vllm_stub import VllmStub

from eagle3_fast.config import RunConfig
from eagle3_fast.files import read_json
from eagle3_fast.train.checkpoint import latest_checkpoint
from eagle3_fast.train.trainer import train

INTERRUPTED = 75

INJECT = """
import os, resource, signal, sys
import torch
from eagle3_fast.cli import main
from eagle3_fast.train import checkpoint, engine, metrics, trainer
from eagle3_fast.train.trainer import Trainer

def before(owner, name, act):
    original = getattr(owner, name)
    def call(*args, **kwargs):
        act(*args)
        return original(*args, **kwargs)
    setattr(owner, name, call)

{fault}
sys.exit(main(['train', '--config', sys.argv[1]]))
"""


def injected(fault: str) -> str:
    return INJECT.format(fault=fault)


NOTHING = injected("")


def saved_step(folder: Path) -> int:
    """Optimizer steps of the newest whole checkpoint."""
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    return read_json(checkpoint / "training_state.json")["global_step"]


TERMINATED = "os.kill(os.getpid(), signal.SIG{name}) if {when} else None"


@pytest.fixture(scope="module")
def ten(run_file: RunConfig) -> RunConfig:
    """Ten steps of two ranks, an epoch of eight and a bit, with a checkpoint after the third step and at the end of the epoch."""
    return changed(run_file, **{"train.trainer": {"max_steps": 10, "checkpoint_freq": 0.4}})


@pytest.fixture(scope="module")
def undisturbed(ten: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    train(into(ten, folder, engine={"accumulation": 2}))
    return folder


@pytest.mark.parametrize(
    ("where", "name", "when", "stopped"),
    [
        ("before(Trainer, '_report', lambda self, *a: {act})", "TERM", "self.position.global_step == 5", 5),
        ("before(Trainer, '_validate', lambda self, *a: {act})", "INT", "self.position.global_step == 8", 9),
        ("before(trainer, 'save_checkpoint', lambda *a: {act})", "TERM", "a[3].global_step == 3", 4),
    ],
    ids=["in a step", "in a validation", "in a save"],
)
def test_a_signal_to_one_rank_stops_all_after_a_save(
    ten: RunConfig, undisturbed: Path, tmp_path: Path, where: str, name: str, when: str, stopped: int
) -> None:
    where = where.format(act=TERMINATED.format(name=name, when=when))
    config = into(ten, tmp_path / "run")
    ranks = start(config, tmp_path, 2, [NOTHING, injected(where)])
    assert finish(ranks) == [INTERRUPTED] * 2, ranks[0].said[-2000:]
    assert "run the same command to go on" in ranks[0].said
    assert saved_step(tmp_path / "run") == stopped
    train(changed(config, engine={"accumulation": 2}))
    assert_same(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_by_the_others(ten: RunConfig, undisturbed: Path, tmp_path: Path, victim: int) -> None:
    fault = injected(
        "before(Trainer, '_report', lambda self, *a: os.kill(os.getpid(), 9) if self.position.global_step == 6 else None)"
    )
    config = into(ten, tmp_path / "run")
    ranks = start(config, tmp_path, 2, [fault if rank == victim else NOTHING for rank in (0, 1)])
    codes = finish(ranks, 90)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == INTERRUPTED, ranks[1 - victim].said[-2000:]
    assert f"rank {victim} of 2 is gone" in ranks[1 - victim].said
    assert saved_step(tmp_path / "run") == 3
    train(changed(config, engine={"accumulation": 2}))
    assert_same(tmp_path / "run", undisturbed)


def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(
    ten: RunConfig, undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fault = injected("torch.save = lambda *a: os.kill(os.getpid(), 9)")
    config = into(ten, tmp_path / "run")
    train(changed(config, **{"train.trainer": {"max_steps": 5}}, engine={"accumulation": 2}))
    before = latest_checkpoint(tmp_path / "run")
    finish(start(config, tmp_path, 2, [fault, NOTHING]))
    assert latest_checkpoint(tmp_path / "run") == before
    caplog.set_level("INFO", logger="eagle3_fast")
    train(changed(config, engine={"accumulation": 2}))
    assert "a save was cut short, passed over" in caplog.text
    assert f"resumed from {before}" in caplog.text
    assert_same(tmp_path / "run", undisturbed)


def test_a_full_disk_stops_all_ranks_with_one_line(ten: RunConfig, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: writing the state fails in the middle."""
    limit = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))"
    config = into(ten, tmp_path / "run")
    train(changed(config, **{"train.trainer": {"max_steps": 4}}, engine={"accumulation": 2}))
    before, whole = latest_checkpoint(tmp_path / "run"), state(tmp_path / "run")
    ranks = start(config, tmp_path, 2, [injected(limit), NOTHING])
    assert finish(ranks) == [2, 2]
    assert all("cannot be written" in rank.said and "earlier ones are untouched" in rank.said for rank in ranks), ranks[0].said
    assert latest_checkpoint(tmp_path / "run") == before
    assert not list((tmp_path / "run").glob(".*.partial"))
    assert torch.equal(state(tmp_path / "run")["masters"]["fc.weight"], whole["masters"]["fc.weight"])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(ten: RunConfig, tmp_path: Path, stage: int) -> None:
    """The loss alone is not finite, its gradient would be."""
    fault = injected(
        "original = trainer.poisoned\n"
        "calls = []\n"
        "def poisoned(loss):\n"
        "    calls.append(1)\n"
        "    return original(loss + float('inf') if len(calls) == 3 else loss)\n"
        "trainer.poisoned = poisoned"
    )
    config = into(ten, tmp_path / "run", engine={"on_nan": "skip"}, deepspeed={"stage": stage})
    ranks = start(changed(config, **{"train.trainer": {"max_steps": 4}}), tmp_path, 2, [NOTHING, fault])
    assert finish(ranks) == [0, 0], ranks[0].said[-2000:]
    assert "step 3: loss or gradient is not finite; no update" in ranks[0].said
    assert all(torch.isfinite(value).all() for value in state(tmp_path / "run")["masters"].values())
    assert float(state(tmp_path / "run")["moments"]["fc.weight"]["step"]) == 3


def test_a_damaged_checkpoint_is_one_line(ten: RunConfig, tmp_path: Path) -> None:
    config = into(ten, tmp_path / "run")
    train(changed(config, **{"train.trainer": {"max_steps": 2}}, engine={"accumulation": 2}))
    damaged = tmp_path / "run" / "0" / "engine_state.pt"
    damaged.write_bytes(damaged.read_bytes()[:-2000])
    ranks = start(config, tmp_path, 2)
    assert finish(ranks) == [2, 2]
    assert f"{damaged}: cannot be read" in ranks[0].said
    assert "Traceback" not in ranks[0].said


def test_a_folder_belongs_to_one_run(ten: RunConfig, tmp_path: Path) -> None:
    wait = injected("import time; before(Trainer, 'run', lambda *a: (print('in', flush=True), time.sleep(60)))")
    (first,) = start(into(ten, tmp_path / "run"), tmp_path / "first", 1, wait)
    until = time.monotonic() + 60
    while "in\n" not in first.said and time.monotonic() < until:
        time.sleep(0.2)
    try:
        (second,) = start(into(ten, tmp_path / "run"), tmp_path / "second", 1)
        assert finish([second]) == [2]
        assert "another run is training into this folder" in second.said
    finally:
        first.process.kill()


def test_a_rank_that_never_joins_is_waited_for_in_bounds(ten: RunConfig, tmp_path: Path) -> None:
    config = into(ten, tmp_path / "run", deepspeed={"join_timeout": 4})
    began = time.monotonic()
    ranks: list[Rank] = start(config, tmp_path, 2, ranks=[0])
    assert finish(ranks) == [2]
    assert time.monotonic() - began < 40
    assert "not all ranks joined within 4 s" in ranks[0].said
    assert "NCCL_P2P_DISABLE=1" in ranks[0].said


def test_an_unusable_sample_is_counted_once_whatever_rank_meets_it(ten: RunConfig, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(ten.hidden_states_path, tmp_path / "hs")
    (tmp_path / "hs" / "hs_3.safetensors").unlink()
    truncated = tmp_path / "hs" / "hs_7.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-100])
    config = changed(ten, extract={"hidden_states_path": str(tmp_path / "hs")}, **{"train.generation": {"on_missing": "skip"}})
    config = changed(config, **{"train.trainer": {"max_steps": None, "epochs": 1}})
    ranks = run(into(config, tmp_path / "two"), tmp_path, 2)
    said = ranks[0].said + ranks[1].said
    assert said.count("hs_3.safetensors") == said.count("hs_7.safetensors") == 1
    assert "2 unusable samples were skipped in training" in ranks[0].said
    train(into(config, tmp_path / "one", engine={"accumulation": 2}))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


LOSES_ITS_SERVER = injected(
    """
from eagle3_fast.endpoint import EndpointError
from eagle3_fast.extract.vllm_states import VllmStates

asked = []
def lose(self, row):
    asked.append(row)
    if len(asked) > 25:
        raise EndpointError("the server is gone")
before(VllmStates, 'load', lose)
"""
)


def test_a_server_of_hidden_states_that_one_rank_loses_stops_all_after_a_save(
    ten: RunConfig, undisturbed: Path, toy: Path, tmp_path: Path
) -> None:
    with serving(VllmStub(toy, [1, 3, 5], tmp_path / "exchange")) as url:
        config = changed(
            into(ten, tmp_path / "run", extract={"hidden_states_path": str(tmp_path / "none")}),
            **{"train.generation": {"vllm_endpoint": url, "on_missing": "generate"}, "train.data": {"prefetch_factor": 1}},
        )
        ranks = start(config, tmp_path, 2, [NOTHING, LOSES_ITS_SERVER])
        assert finish(ranks) == [2, 2]
        reached = saved_step(tmp_path / "run")
        assert 0 < reached < 10
        assert f"step {reached}: another rank has lost its server; saved to" in ranks[0].said
        assert f"step {reached}: the server is gone; saved to" in ranks[1].said
        run(config, tmp_path, 2)
    assert losses(tmp_path / "run") == pytest.approx(losses(undisturbed), rel=2e-3)
