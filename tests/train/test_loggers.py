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
from tensorboard.summary.writer import event_file_writer
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
        self.ended: list[Any] = []
        self.failing = self.closed = False
        self.id = "given-by-the-service"
        self.info = SimpleNamespace(run_id="mlflow-run")

    @property
    def step(self) -> int:
        """wandb's: that of the next call."""
        return max((step for step, _ in self.logged), default=-1) + 1

    @property
    def data(self) -> SimpleNamespace:
        """MLflow's: the last value of each metric."""
        return SimpleNamespace(metrics={"global_step": float(self.step - 1)} if self.logged else {})

    def init(self, **arguments: Any) -> Service:
        if self.closed:
            raise self.Error("nobody\nis logged in")
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

    def finish(self, exit_code: int | None = None) -> None:
        self.ended.append(exit_code)

    def end_run(self, status: str) -> None:
        self.ended.append(status)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service()
    exceptions = SimpleNamespace(MlflowException=Service.Error)
    for name, module in (("wandb", service), ("trackio", service), ("mlflow", service), ("mlflow.exceptions", exceptions)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin="stand-in"))
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.delenv("MLFLOW_TAGS", raising=False)
    return service


@pytest.fixture(autouse=True)
def files_of_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads files by name: second, process, count. Within a second a tenth file of this process would come before the ninth."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


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
    assert board_values({"split": "val", "epoch": 1, "loss": 2.0}, 7) == {"val/loss_epoch": 2.0}


def scalars(folder: Path) -> dict[str, list[int]]:
    """Steps of every curve in TensorBoard's only run below `folder`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (where,) = {path.parent for path in folder.rglob("events.*")}
    events = EventAccumulator(str(where)).Reload()
    assert b"optimizer/lr" in events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_resumed_run_goes_on_in_its_tensorboard_curves(run: RunConfig, tmp_path: Path) -> None:
    train(logging_to(run, tmp_path, "tensorboard", max_steps=3))
    train(logging_to(run, tmp_path, "tensorboard", max_steps=5))
    curves = scalars(tmp_path / "logs")
    assert curves["train/loss"] == [1, 2, 3, 4, 5]
    assert {"train/cond_acc_0", "train/tau", "val/loss_epoch", "lr/Muon", "profile/tokens_per_s"} <= curves.keys()


def logged_after_a_kill(config: RunConfig, folder: Path) -> None:
    """Three steps and the start of another process after step 2, which validates at 3 what the first had not."""
    (folder / "checkpoints").mkdir()
    for after, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        boards = Boards(config, after)
        for step in steps:
            boards.log(LINE, step)
            if after and step == 3:
                boards.log({"split": "val", "epoch": 1, "loss": 2.0}, 3)
        boards.close()


def test_tensorboard_hides_steps_after_the_last_checkpoint(run: RunConfig, tmp_path: Path) -> None:
    logged_after_a_kill(logging_to(run, tmp_path, "tensorboard"), tmp_path)
    assert scalars(tmp_path / "logs")["train/loss"] == [1, 2, 3, 4]


@pytest.mark.parametrize(("name", "kept"), [("wandb", True), ("mlflow", True), ("trackio", False)])
def test_services_keep_steps_after_the_last_checkpoint(
    run: RunConfig, tmp_path: Path, service: Service, name: str, kept: bool
) -> None:
    logged_after_a_kill(logging_to(run, tmp_path, name), tmp_path)
    assert [step for step, values in service.logged if "train/loss" in values] == ([1, 2, 3, 4] if kept else [1, 2, 3, 3, 4])
    assert [step for step, values in service.logged if "val/loss_epoch" in values] == [3]


def test_what_a_run_tells_last_is_not_lost_when_it_fails(run: RunConfig, tmp_path: Path, service: Service) -> None:
    config = logging_to(run, tmp_path, "tensorboard", "wandb", "mlflow", max_steps=3)
    with pytest.raises(InputError, match="not finite"):
        train(
            changed(config, **{"train.optimizer": {"lr": 1e30, "muon_lr": 1e30}, "train.scheduler": {"scheduler_warmup_steps": 0}})
        )
    assert service.ended == [1, "FAILED"]
    assert scalars(tmp_path / "logs")["train/loss"][0] == 1


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_services_get_every_step_once_and_the_run_again(run: RunConfig, tmp_path: Path, service: Service, name: str) -> None:
    train(logging_to(run, tmp_path, name, max_steps=3))
    train(logging_to(run, tmp_path, name, max_steps=5))
    assert [step for step, values in service.logged if "train/loss" in values] == [1, 2, 3, 4, 5]
    assert any("val/loss_epoch" in values for _, values in service.logged)
    assert service.ended == [{"wandb": 0, "trackio": None, "mlflow": "FINISHED"}[name]] * 2
    first, again = service.started
    key = "run_name" if name == "mlflow" else "name"
    assert first[key] == again[key]
    assert {"wandb": again.get("id") == service.id, "mlflow": again.get("run_id") == "mlflow-run", "trackio": True}[name]
    resume = {"wandb": ("allow", "allow"), "trackio": ("never", "allow"), "mlflow": (None, None)}[name]
    assert (first.get("resume"), again.get("resume")) == resume
    if name == "mlflow":
        assert service.experiment == "speculators" and service.parameters["trainer/max_steps"] == "3"
    else:
        assert first["config"]["optimizer/lr"] == 1e-3 and first["config"]["engine/compat"] == "0.9"


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


def test_a_folder_of_logs_is_no_package(tmp_path: Path, run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="trackio, which is not installed"):
        train(logging_to(run, tmp_path, "trackio"))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_what_cannot_be_opened_is_refused_before_the_first_step(
    run: RunConfig, tmp_path: Path, service: Service, name: str
) -> None:
    service.closed = True
    with pytest.raises(InputError, match=rf"{name} cannot be opened \(nobody is logged in\)"):
        train(logging_to(run, tmp_path, name))
    assert not (tmp_path / "checkpoints" / "0").exists()


def test_a_folder_that_cannot_be_made_is_named(run: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    with pytest.raises(InputError, match=r"tensorboard cannot be opened \(.*logs"):
        train(logging_to(run, tmp_path, "tensorboard"))


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
