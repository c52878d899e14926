"""Checkpoints in the layout of speculators: read whatever form they take, refused in one line where they are not this run's.

`tests/peers/test_checkpoints.py` compares with their trainers; here their files are made from ours.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train.runs import changed, prepared_run
from verifiers import toy_llama

from eagle3_fast.cli import main
from eagle3_fast.config import RunConfig, run_file
from eagle3_fast.errors import InputError
from eagle3_fast.train.checkpoint import drop_old, latest_checkpoint, servable_checkpoint
from eagle3_fast.train.speculators_checkpoint import OPTIMIZER, SCHEDULER
from eagle3_fast.train.trainer import Trainer

Edit = Callable[[Path], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("run")
    verifier = toy_llama(folder / "verifier")
    weights = load_file(verifier / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in weights.items()}, verifier / "model.safetensors", {"format": "pt"})
    return prepared_run(folder, verifier)


def theirs_from_ours(run: RunConfig, folder: Path, optimizer: str) -> tuple[RunConfig, dict[str, Any]]:
    """A run that stopped after its first epoch as speculators would have left it, and the state that it had here."""
    config = changed(run, **{"train.trainer": {"save_path": str(folder)}, "train.optimizer": {"optimizer": optimizer}})
    trainer = Trainer(changed(config, **{"train.trainer": {"epochs": 1}}))
    trainer.run()
    (folder / "run.yaml").write_text(run_file(config))
    assert main(["export", "--config", str(folder / "run.yaml"), "--training-state"]) == 0
    (folder / "0" / "engine_state.pt").unlink()
    return config, {**trainer.engine.state_dict(), "global_step": trainer.position.global_step}


@pytest.fixture(scope="module")
def left(run: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, dict[str, Any]]:
    return theirs_from_ours(run, tmp_path_factory.mktemp("left"), "adamw")


@pytest.fixture
def copied(left: tuple[RunConfig, dict[str, Any]], tmp_path: Path) -> RunConfig:
    """The run of `left` with its own copy of the checkpoint to edit."""
    config, _ = left
    shutil.copytree(config.train.trainer.save_path, tmp_path / "checkpoints", symlinks=True)
    return changed(config, **{"train.trainer": {"save_path": str(tmp_path / "checkpoints")}})


def resumed(config: RunConfig) -> Trainer:
    trainer = Trainer(config)
    trainer._resume()
    return trainer


def assert_rounded(state: dict[str, Any], before: dict[str, Any]) -> None:
    """`state` is `before`, through bfloat16; steps, which it would round, are exact."""
    assert state["updates"] == before["updates"]
    for name, value in before["masters"].items():
        assert torch.equal(state["masters"][name], value.bfloat16().float()), name
        moments = state["moments"][name]
        assert moments.keys() == before["moments"][name].keys()
        for key, moment in before["moments"][name].items():
            assert torch.equal(moments[key], moment if key == "step" else moment.bfloat16().float()), (name, key)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_optimizer_and_place_go_on(run: RunConfig, tmp_path: Path, optimizer: str) -> None:
    config, before = theirs_from_ours(run, tmp_path / "checkpoints", optimizer)
    assert isinstance(torch.load(tmp_path / "checkpoints" / "0" / OPTIMIZER), dict if optimizer == "adamw" else list)
    trainer = resumed(config)
    assert_rounded(trainer.engine.state_dict(), before)
    assert (trainer.position.epoch, trainer.position.local_step) == (1, 0)
    assert trainer.position.global_step == before["global_step"]
    trainer.run()
    assert latest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "1"


def sharded(checkpoint: Path) -> None:
    """As FSDP writes it: by parameter name."""
    whole = torch.load(checkpoint / OPTIMIZER)
    (group,) = whole["param_groups"]
    names = dict(zip(group["params"], group.pop("param_names"), strict=True))
    states = {names[key]: state for key, state in whole["state"].items()}
    torch.save({"state": states, "param_groups": [{**group, "params": list(names.values())}]}, checkpoint / OPTIMIZER)


def of_release_03(checkpoint: Path) -> None:
    (checkpoint / "training_state.json").unlink()
    (checkpoint / "generation_config.json").write_text("{}")


def with_ours_beside(checkpoint: Path) -> None:
    """As their trainer leaves a folder that ours wrote first: its own three numbers, over our engine's older state."""
    about = json.loads((checkpoint / "training_state.json").read_text())
    about = {name: about[name] for name in ("epoch", "local_step", "global_step")}
    (checkpoint / "training_state.json").write_text(json.dumps(about))
    (checkpoint / "engine_state.pt").write_bytes(b"older")


@pytest.mark.parametrize("form", [sharded, of_release_03, with_ours_beside], ids=lambda form: form.__name__)
def test_every_form_of_it_is_read(copied: RunConfig, left: tuple[RunConfig, dict[str, Any]], form: Edit) -> None:
    form(Path(copied.train.trainer.save_path) / "0")
    trainer = resumed(copied)
    assert_rounded(trainer.engine.state_dict(), left[1])
    assert (trainer.position.epoch, trainer.position.global_step) == (1, left[1]["global_step"])


def test_in_the_middle_of_an_epoch(copied: RunConfig) -> None:
    path = Path(copied.train.trainer.save_path) / "0" / "training_state.json"
    path.write_text(json.dumps({"epoch": 0, "local_step": 2, "global_step": 2}))
    trainer = resumed(copied)
    assert (trainer.position.epoch, trainer.position.local_step, trainer.position.global_step) == (0, 2, 2)


class _Run:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def code(name: str) -> Edit:
    def edit(checkpoint: Path) -> None:
        torch.save({"state": _Run(f"touch {checkpoint / 'ran'}")}, checkpoint / name)

    return edit


def another_head(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors, checkpoint / "model.safetensors")


def without(name: str) -> Edit:
    def edit(checkpoint: Path) -> None:
        tensors = load_file(checkpoint / "model.safetensors")
        del tensors[name]
        save_file(tensors, checkpoint / "model.safetensors")

    return edit


def other_layers(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    (checkpoint / "config.json").write_text(json.dumps(config))


def no_moments(checkpoint: Path) -> None:
    whole = torch.load(checkpoint / OPTIMIZER)
    whole["state"].popitem()
    torch.save(whole, checkpoint / OPTIMIZER)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (code(OPTIMIZER), "optimizer_state_dict.pt: damaged, or wants to run code"),
        (code(SCHEDULER), "scheduler_state_dict.pt: damaged, or wants to run code"),
        (lambda checkpoint: (checkpoint / OPTIMIZER).write_bytes(b"PK\x03\x04 cut"), "optimizer_state_dict.pt: cannot be read"),
        (lambda checkpoint: torch.save([3], checkpoint / OPTIMIZER), "optimizer_state_dict.pt: not an optimizer state"),
        (lambda checkpoint: torch.save({}, checkpoint / SCHEDULER), "scheduler_state_dict.pt: not the state of a schedule"),
        (another_head, "lm_head.weight holds other values"),
        (without("fc.weight"), "fc.weight is missing"),
        (other_layers, r"another draft in eagle_aux_hidden_state_layer_ids \(\[1, 2, 3\], in the run file \[1, 3, 5\]\)"),
        (no_moments, "holds no adamw state of"),
    ],
)
def test_what_is_not_of_this_run_is_refused(copied: RunConfig, edit: Edit, message: str) -> None:
    checkpoint = Path(copied.train.trainer.save_path) / "0"
    edit(checkpoint)
    with pytest.raises(InputError, match=message) as error:
        resumed(copied)
    assert "\n" not in str(error.value)
    assert not (checkpoint / "ran").exists()


def test_another_optimizer_is_refused(copied: RunConfig) -> None:
    with pytest.raises(InputError, match=r"holds no muon state of .*set train.optimizer.optimizer"):
        resumed(changed(copied, **{"train.optimizer": {"optimizer": "muon"}}))


def test_theirs_is_served_but_never_deleted(copied: RunConfig) -> None:
    folder = Path(copied.train.trainer.save_path)
    shutil.copytree(folder / "0", folder / "1")
    with_ours_beside(folder / "1")
    drop_old(folder, 1)
    assert (folder / "0").is_dir() and (folder / "1").is_dir()
    assert servable_checkpoint(folder).resolve() in {folder / "0", folder / "1"}


def test_a_worse_epoch_does_not_take_the_link_from_theirs(copied: RunConfig) -> None:
    folder = Path(copied.train.trainer.save_path)
    (folder / "0" / "val_metrics.json").write_text(json.dumps({"loss_epoch": 0.0}))
    Trainer(copied).run()
    assert (folder / "checkpoint_best").resolve() == folder / "0"
    assert (folder / "1" / "val_metrics.json").is_file()


def test_a_trained_head_cannot_go_on_there(run: RunConfig, tmp_path: Path) -> None:
    engine = {"compat": "0.3", "verifier_norm": False}
    config = changed(run, engine=engine, **{"train.trainer": {"save_path": str(tmp_path), "epochs": 1}})
    Trainer(config).run()
    (tmp_path / "run.yaml").write_text(run_file(config))
    assert main(["export", "--config", str(tmp_path / "run.yaml"), "--training-state"]) == 2
    assert not (tmp_path / "0" / OPTIMIZER).exists()


def test_nothing_to_add_to(run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(run_file(changed(run, **{"train.trainer": {"save_path": str(tmp_path / "none")}})))
    assert main(["export", "--config", str(tmp_path / "run.yaml"), "--training-state"]) == 2
    assert "none: not a checkpoint of this trainer; nothing to add to" in capsys.readouterr().err
