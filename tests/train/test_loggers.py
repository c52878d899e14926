"""Loggers: which names they get, where a resumed run goes on, and what happens to training when one of them fails.

TensorBoard is real; stand-ins take the place of the services. `make test-loggers` has the real ones.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from train.runs import changed, prepared_run

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.train.loggers import Boards, board_values
from eagle3_fast.train.trainer import train

LINE = {
    "split": "train",
    "epoch": 1,
    "loss": 2.0,
    "full_acc_0": 0.5,
    "tokens_per_s": 9.0,
    "skipped_samples": 1,
    "skipped_step": False,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> RunConfig:
    return prepared_run(tmp_path_factory.mktemp("run"), toy)


def logging_to(run: RunConfig, folder: Path, *names: str, **trainer: Any) -> RunConfig:
    logging = {"logger": ",".join(names), "log_dir": str(folder / "logs")}
    return changed(run, **{"train.trainer": {"save_path": str(folder / "checkpoints"), **trainer}, "train.logging": logging})


class Service:
    """A stand-in for wandb, trackio and mlflow at once: it remembers what it was told."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.parameters: dict[str, str] = {}
        self.ended = 0
        self.failing = False
        self.id = "given-by-the-service"
        self.info = SimpleNamespace(run_id="mlflow-run")

    def init(self, **arguments: Any) -> Service:
        self.started.append(arguments)
        return self

    start_run = init

    def set_experiment(self, name: str) -> None:
        self.experiment = name

    def log_params(self, parameters: dict[str, str]) -> None:
        assert not self.parameters, "MLflow takes no parameter twice"
        self.parameters = parameters

    def log(self, values: dict[str, float], step: int) -> None:
        if self.failing:
            raise self.Error("the service\nis gone")
        self.logged.append((step, values))

    log_metrics = log

    def finish(self) -> None:
        self.ended += 1

    end_run = finish


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service()
    exceptions = SimpleNamespace(MlflowException=Service.Error)
    for name, module in (("wandb", service), ("trackio", service), ("mlflow", service), ("mlflow.exceptions", exceptions)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.delenv("MLFLOW_TAGS", raising=False)
    return service


def test_names_are_those_of_speculators() -> None:
    named = board_values({**LINE, "lr/Muon": 0.1, "lr/AdamW": 0.2}, 7)
    assert named == {
        "epoch": 1,
        "global_step": 7,
        "train/loss": 2.0,
        "train/full_acc_0": 0.5,
        "profile/tokens_per_s": 9.0,
        "train/error_records": 1.0,
        "train/skipped_step": 0.0,
        "lr/Muon": 0.1,
        "lr/AdamW": 0.2,
    }
    assert board_values({"split": "train", "epoch": 0, "lr/AdamW": 0.2}, 1)["lr"] == 0.2
    assert board_values({"split": "val", "epoch": 1, "loss": 2.0}, 7) == {"epoch": 1, "global_step": 7, "val/loss_epoch": 2.0}


def scalars(folder: Path) -> dict[str, list[int]]:
    """Steps of every curve in TensorBoard's only run below `folder`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (where,) = {path.parent for path in folder.rglob("events.*")}
    events = EventAccumulator(str(where)).Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_resumed_run_goes_on_in_its_tensorboard_curves(run: RunConfig, tmp_path: Path) -> None:
    train(logging_to(run, tmp_path, "tensorboard", max_steps=3))
    train(logging_to(run, tmp_path, "tensorboard", max_steps=5))
    curves = scalars(tmp_path / "logs")
    assert curves["train/loss"] == [1, 2, 3, 4, 5]
    assert {"train/cond_acc_0", "train/tau", "val/loss_epoch", "lr/Muon", "profile/tokens_per_s"} <= curves.keys()


def test_steps_after_the_last_checkpoint_are_not_shown_twice(run: RunConfig, tmp_path: Path) -> None:
    config = logging_to(run, tmp_path, "tensorboard")
    (tmp_path / "checkpoints").mkdir()
    first = Boards(config, 0)
    for step in (1, 2, 3):
        first.log(LINE, step)
    first.close()
    second = Boards(config, 2)
    second.log(LINE, 3)
    second.close()
    assert scalars(tmp_path / "logs")["train/loss"] == [1, 2, 3]


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_services_get_every_step_once_and_the_run_again(run: RunConfig, tmp_path: Path, service: Service, name: str) -> None:
    train(logging_to(run, tmp_path, name, max_steps=3))
    train(logging_to(run, tmp_path, name, max_steps=5))
    assert [step for step, values in service.logged if "train/loss" in values] == [1, 2, 3, 4, 5]
    assert any("val/loss_epoch" in values for _, values in service.logged)
    assert service.ended == 2
    first, again = service.started
    key = "run_name" if name == "mlflow" else "name"
    assert first[key] == again[key]
    assert {"wandb": again.get("id") == service.id, "mlflow": again.get("run_id") == "mlflow-run", "trackio": True}[name]
    resume = {"wandb": ("allow", "allow"), "trackio": ("never", "allow"), "mlflow": (None, None)}[name]
    assert (first.get("resume"), again.get("resume")) == resume
    if name == "mlflow":
        assert service.experiment == "speculators" and service.parameters["trainer.max_steps"] == "3"
    else:
        assert "verifier" in str(first["config"])


def test_a_run_from_its_start_is_another_run(run: RunConfig, tmp_path: Path, service: Service) -> None:
    config = logging_to(run, tmp_path, "wandb")
    (tmp_path / "checkpoints").mkdir()
    for step in (0, 0, 4):
        Boards(config, step)
    assert [start["id"] for start in service.started] == [None, None, service.id]
    Boards(changed(config, **{"train.logging": {"run_name": "other"}}), 4)
    assert service.started[-1]["id"] is None and service.started[-1]["name"] == "other"


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_that_fails_does_not_end_training(
    run: RunConfig, tmp_path: Path, service: Service, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    service.failing = True
    train(logging_to(run, tmp_path, "tensorboard", name, max_steps=3))
    said = [record.getMessage() for record in caplog.records if "training goes on" in record.getMessage()]
    assert said == [f"{name} failed (the service is gone); training goes on without it, metrics.jsonl has everything"]
    assert scalars(tmp_path / "logs")["train/loss"] == [1, 2, 3]


def test_what_is_not_installed_is_refused_before_training(run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("wandb", "trackio") else find(name))
    with pytest.raises(InputError, match=r"wandb, trackio, which is not installed: pip install 'eagle3_fast\[wandb,trackio\]'"):
        train(logging_to(run, tmp_path, "wandb", "trackio", "tensorboard"))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("tags", ["[1]", "{team: a"])
def test_tags_that_are_no_object_are_refused(
    run: RunConfig, tmp_path: Path, service: Service, tags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TAGS", tags)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(InputError, match="MLFLOW_TAGS is .* must be a JSON object"):
        Boards(logging_to(run, tmp_path, "mlflow"), 0)
    monkeypatch.setenv("MLFLOW_TAGS", json.dumps({"team": 3}))
    Boards(logging_to(run, tmp_path, "mlflow"), 0)
    assert service.started[-1]["tags"] == {"team": "3"}
