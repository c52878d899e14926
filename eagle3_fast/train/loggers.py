"""Where metrics go beside `metrics.jsonl`: TensorBoard, Weights & Biases, Trackio, MLflow, by the names that speculators gives them.

A run that goes on after a stop is the same run there: `loggers.json` beside the checkpoints holds its name and the ids that the services
gave it. A logger that fails while training is named once and left out; training does not end for it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.files import read_json, write_json
from eagle3_fast.log import logger

PROJECT = "speculators"  # of Trackio, and MLflow's experiment, as speculators names them
RECORD = "loggers.json"
RENAMED = {"tokens_per_s": "profile/tokens_per_s", "skipped_samples": "train/error_records"}
LONGEST_PARAMETER = 500  # characters of a value that MLflow takes in every release


@dataclass(frozen=True)
class Start:
    """What a logger begins with. step: the last one before; 0 where the run is new. ids: by logger; a service adds the one it gave."""

    name: str
    folder: Path
    settings: dict[str, Any]
    step: int
    ids: dict[str, str]


class Board(Protocol):
    """One logger of one run; making it imports its package.

    errors: what it raises where its service, its settings or the disk fail. held: the last step that it has already and keeps.
    """

    errors: tuple[type[Exception], ...]
    held: int

    def open(self, start: Start) -> None: ...

    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self, failed: bool) -> None: ...


def require_loggers(config: RunConfig) -> None:
    """Raise InputError where a logger that the run file names is not installed: before training, not at its first line."""
    absent = [name for name in config.train.logging.loggers if not _installed(name)]
    if absent:
        raise InputError(
            f"train.logging.logger names {', '.join(absent)}, which is not installed: pip install 'eagle3_fast[{','.join(absent)}]'"
        )


def _installed(package: str) -> bool:
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None  # a folder of logs named like its package has no origin


class Boards:
    """The loggers of a run, for its first rank."""

    def __init__(self, config: RunConfig, step: int) -> None:
        """step: the one after which the run goes on; at 0 it begins anew, whatever an earlier run recorded.

        Raises InputError where a logger cannot be opened.
        """
        section = config.train.logging
        path = Path(config.train.trainer.save_path) / RECORD
        asked = {"run_name": section.run_name, "log_dir": section.log_dir}
        before = read_json(path) if step and path.is_file() else {}
        record = before if before.items() >= asked.items() else {**asked, "name": section.name, "ids": {}}
        start = Start(record["name"], Path(section.log_dir), _settings(config), step, record["ids"])
        self.boards: dict[str, Board] = {}
        for name in section.loggers:
            self.boards[name] = BOARDS[name]()
            try:
                self.boards[name].open(start)
            except self.boards[name].errors as error:
                raise InputError(
                    f"{name} cannot be opened ({_line(error)}); see docs/logging.md, or take it out of train.logging.logger"
                ) from None
        if self.boards:
            write_json(path, record)

    def log(self, values: dict[str, Any], step: int) -> None:
        """Values of one line of `metrics.jsonl`."""
        named, training = board_values(values, step), values["split"] == "train"
        for name, board in list(self.boards.items()):
            # A stop may have come between the last step that the service holds and the validation after it.
            if step < board.held or (training and step == board.held):
                continue
            try:
                board.log(named, step)
            except board.errors as error:
                self._leave_out(name, error)

    def close(self, failed: bool = False) -> None:
        """failed: the run ends before its end."""
        for name, board in list(self.boards.items()):
            try:
                board.close(failed)
            except board.errors as error:
                self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        logger.warning("%s failed (%s); training goes on without it, metrics.jsonl has everything", name, _line(error))
        del self.boards[name]


def board_values(values: dict[str, Any], step: int) -> dict[str, float]:
    """A line of `metrics.jsonl` by the names of speculators 0.9: `train/loss`, `val/loss_epoch`, `lr/AdamW`, `epoch`, `global_step`.

    The epoch is that of the training step: a validation comes after it, when ours already counts the next one.
    """
    measured = {name: float(value) for name, value in values.items() if name not in ("split", "epoch")}
    if values["split"] != "train":
        return {f"val/{name}_epoch": value for name, value in measured.items()}
    named: dict[str, float] = {"epoch": values["epoch"], "global_step": step}
    for name, value in measured.items():
        named[name if name.startswith(("lr/", "profile/")) else RENAMED.get(name, f"train/{name}")] = value
    if "lr/AdamW" in named and "lr/Muon" not in named:
        named["lr"] = named.pop("lr/AdamW")
    return named


def _settings(config: RunConfig) -> dict[str, Any]:
    """What training follows, `optimizer/lr`: the groups of `train:` by speculators' names, and our own sections beside them."""
    sections = config.model_dump(mode="json", include={"train", "ops", "engine", "deepspeed"})
    return _flat({**sections.pop("train"), **sections})


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


class TensorBoard:
    """Files in `log_dir/<run name>`, one run a folder: what was written there after the step that a run goes on from is hidden."""

    errors: tuple[type[Exception], ...] = (OSError,)  # its writing thread hands a full disk on to the next call
    held = 0

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer_of: Any = SummaryWriter

    def open(self, start: Start) -> None:
        folder = str(start.folder / start.name)
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in start.settings.items()
        }
        # The settings come in a file of their own, closed before the first value: a reader goes through the files in their order.
        with self.writer_of(folder) as first:
            first.add_hparams(plain, {}, run_name=".")
        self.writer = self.writer_of(folder, purge_step=start.step + 1)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Files in `log_dir/wandb`, and the service. A step cannot be taken back there: those that it holds stay as they were."""

    def __init__(self) -> None:
        import wandb

        self.wandb: Any = wandb
        self.errors: tuple[type[Exception], ...] = (OSError, wandb.Error)  # its background process gone is an OSError
        self.held = 0

    def open(self, start: Start) -> None:
        start.folder.mkdir(parents=True, exist_ok=True)
        self.run = self.wandb.init(
            name=start.name, dir=str(start.folder), id=start.ids.get("wandb"), resume="allow", config=start.settings
        )
        start.ids["wandb"] = self.run.id
        self.held = self.run.step - 1  # the step of the next call; 0 in a new run, and offline

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class Trackio:
    """In Trackio's own database or server, project `speculators`. It goes on by the run's name and does not say which steps it holds."""

    # Wrong settings are ValueErrors, its database is SQLite. What fails later it keeps to itself: its log and finish only warn.
    errors: tuple[type[Exception], ...] = (OSError, ValueError, sqlite3.Error)
    held = 0

    def __init__(self) -> None:
        import trackio

        self.trackio: Any = trackio

    def open(self, start: Start) -> None:
        resume = "allow" if start.step else "never"
        self.run = self.trackio.init(project=PROJECT, name=start.name, config=start.settings, resume=resume)

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish()


class MLflow:
    """Where MLFLOW_TRACKING_URI says, experiment MLFLOW_EXPERIMENT_NAME, tags MLFLOW_TAGS. Steps that it holds stay as they were."""

    def __init__(self) -> None:
        import mlflow
        from mlflow.exceptions import MlflowException

        self.mlflow: Any = mlflow
        self.errors: tuple[type[Exception], ...] = (OSError, MlflowException)
        self.held = 0

    def open(self, start: Start) -> None:
        tags = _mlflow_tags()
        self.mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        run = self.mlflow.start_run(run_id=start.ids.get("mlflow"), run_name=start.name, tags=tags)
        self.held = int(run.data.metrics.get("global_step", 0))
        if "mlflow" not in start.ids:  # a parameter cannot change
            self.mlflow.log_params({name: str(value)[:LONGEST_PARAMETER] for name, value in start.settings.items()})
        start.ids["mlflow"] = run.info.run_id

    def log(self, values: dict[str, float], step: int) -> None:
        self.mlflow.log_metrics(values, step=step)

    def close(self, failed: bool) -> None:
        self.mlflow.end_run("FAILED" if failed else "FINISHED")


def _mlflow_tags() -> dict[str, str]:
    text = os.environ.get("MLFLOW_TAGS", "{}")
    try:
        tags = json.loads(text)
    except ValueError:
        tags = None
    if not isinstance(tags, dict):
        raise InputError(f'MLFLOW_TAGS is {text!r}, must be a JSON object such as {{"team": "a"}}')
    return {name: str(value) for name, value in tags.items()}


BOARDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio, "mlflow": MLflow}
