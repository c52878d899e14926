"""A run goes on with another number of ranks, another stage or an offloaded optimizer as if nothing had changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed.ranks import run
from distributed.test_same_mathematics import assert_same, into, state
from safetensors.torch import load_file
from train.runs import changed, prepared_run

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.train.checkpoint import latest_checkpoint
from eagle3_fast.train.trainer import Trainer, train


def on(ranks: int, config: RunConfig, folder: Path, steps: int) -> None:
    """Train to `steps` on that many ranks: one plain process, or ZeRO-3."""
    limited = changed(config, **{"train.trainer": {"max_steps": steps}})
    if ranks == 1:
        train(limited)
    else:
        run(limited, folder, ranks)


@pytest.fixture(scope="module")
def whole(run_file: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine steps of four batches in one process; an epoch has fewer than five, so all stops below are in the middle of one."""
    folder = tmp_path_factory.mktemp("whole")
    train(changed(into(run_file, folder, engine={"accumulation": 4}), **{"train.trainer": {"max_steps": 9}}))
    return folder


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_another_number_of_ranks(run_file: RunConfig, whole: Path, tmp_path: Path, before: int, after: int) -> None:
    config = into(run_file, tmp_path / "run", engine={"accumulation": 4 // before})
    on(before, config, tmp_path, 5)
    on(after, config, tmp_path, 9)  # still says the accumulation of the run before
    assert_same(tmp_path / "run", whole)


def test_ranks_that_cannot_share_a_step_are_refused(run_file: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = into(run_file, tmp_path, engine={"accumulation": 4})
    on(1, config, tmp_path, 1)
    trainer = Trainer(config)
    trainer.ranks.size = 3
    with pytest.raises(InputError, match="4 packed batches a step, which 3 ranks cannot share"):
        trainer._batches_of_a_step()


def test_another_stage_and_an_offloaded_optimizer(run_file: RunConfig, tmp_path: Path) -> None:
    muon = changed(run_file, **{"train.optimizer": {"optimizer": "muon"}, "train.trainer": {"max_steps": 6}})
    train(into(muon, tmp_path / "alone", engine={"accumulation": 2}))
    config = into(muon, tmp_path / "run")
    run(changed(config, deepspeed={"stage": 2}, **{"train.trainer": {"max_steps": 3}}), tmp_path, 2)
    run(changed(config, deepspeed={"stage": 3, "offload_optimizer": True}), tmp_path, 2)
    assert_same(tmp_path / "run", tmp_path / "alone")


BFLOAT16 = (
    "import sys\n"
    "import eagle3_fast.precision as precision\n"
    "precision.cpu_multiplies_bfloat16 = lambda: True\n"
    "from eagle3_fast.cli import main\n"
    "sys.exit(main(['train', '--config', sys.argv[1]]))\n"
)


@pytest.mark.parametrize("stage", [1, 3])
def test_bfloat16_keeps_float32_masters(toy: Path, tmp_path: Path, stage: int) -> None:
    """Norm weights move by less than a bfloat16 step; a resume goes on from the masters, not from their rounding."""
    data = {"train.data": {"hidden_states_dtype": "bfloat16"}, "train.trainer": {"max_steps": 6, "epochs": 20}}
    config = changed(prepared_run(tmp_path, toy, **data), deepspeed={"stage": stage})  # 1: an optimizer of its own in DeepSpeed
    run(into(config, tmp_path / "whole"), tmp_path, 2, BFLOAT16)
    parts = into(config, tmp_path / "parts")
    run(changed(parts, **{"train.trainer": {"max_steps": 3}}), tmp_path, 2, BFLOAT16)
    halfway = state(tmp_path / "parts")["masters"]["norm.weight"]
    assert halfway.dtype == torch.float32
    assert (halfway != 1).any()
    assert not torch.equal(halfway, halfway.bfloat16().float())
    run(parts, tmp_path, 2, BFLOAT16)
    for name, value in state(tmp_path / "whole")["masters"].items():
        assert torch.equal(state(tmp_path / "parts")["masters"][name], value), name
    served = latest_checkpoint(tmp_path / "parts")
    assert served is not None
    assert all(value.numel() for value in load_file(served / "model.safetensors").values())


def test_more_ranks_than_batches(toy: Path, tmp_path: Path) -> None:
    """Four ranks, an epoch of three samples and one for validation: some ranks have padding only, all do the same steps."""
    config = prepared_run(tmp_path, toy, chats=4, **{"train.trainer": {"epochs": 3}, "train.data": {"train_data_ratio": 0.75}})
    config = changed(config, **{"train.optimizer": {"optimizer": "adamw"}})
    run(into(config, tmp_path / "four"), tmp_path, 4)
    train(into(config, tmp_path / "one", engine={"accumulation": 4}))
    assert_same(tmp_path / "four", tmp_path / "one")


def test_a_warm_start_on_two_ranks_keeps_weights_mapping_and_frozen_parts(run_file: RunConfig, tmp_path: Path) -> None:
    train(changed(into(run_file, tmp_path / "first"), **{"train.trainer": {"max_steps": 2}}))
    start = str(latest_checkpoint(tmp_path / "first"))
    config = into(run_file, tmp_path / "second", engine={"on_nan": "stop"})
    data = config.model_dump(exclude_unset=True)
    data["train"]["draft"] = {"from_pretrained": start}
    data["train"]["optimizer"] = {"optimizer": "adamw", "lr": 1e-12, "weight_decay": 0.0}
    data["train"]["trainer"]["max_steps"] = 1
    run(RunConfig.model_validate(data), tmp_path, 2)
    first, second = (load_file(Path(folder) / "model.safetensors") for folder in (start, latest_checkpoint(tmp_path / "second")))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(second[name], value), name
