"""Where metrics go beside `metrics.jsonl`: TensorBoard, Weights & Biases, Trackio, MLflow, by the names that speculators gives them.

A run that goes on after a stop goes on in the same curves: `loggers.json` beside the checkpoints holds its name and the ids that the
services gave it. A logger that fails while training is named once and left out; training does not end for it.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any, Protocol

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.files import read_json, write_json
from eagle3_fast.log import logger

PROJECT = "speculators"  # of Trackio, and MLflow's experiment, as speculators names them
RECORD = "loggers.json"
ABOUT = ("split", "epoch")
"""Entries of our metrics that are no metrics."""
RENAMED = {"tokens_per_s": "profile/tokens_per_s", "skipped_samples": "train/error_records"}
LONGEST_PARAMETER = 500  # characters of a value that MLflow takes from every release


class Board(Protocol):
    """One logger of one run. `errors` are what it raises where its service, or the disk, fails."""

    errors: tuple[type[Exception], ...]

    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def require_loggers(config: RunConfig) -> None:
    """Raise InputError where a logger that the run file names is not installed: before training, not at its first line."""
    absent = [name for name in config.train.logging.loggers if importlib.util.find_spec(name) is None]
    if absent:
        raise InputError(
            f"train.logging.logger names {', '.join(absent)}, which is not installed: pip install 'eagle3_fast[{','.join(absent)}]'"
        )


class Boards:
    """The loggers of a run, for its first rank."""

    def __init__(self, config: RunConfig, step: int) -> None:
        """step: the one after which the run goes on; at 0 it begins anew, whatever an earlier run recorded."""
        section = config.train.logging
        path = Path(config.train.trainer.save_path) / RECORD
        before = read_json(path) if step and path.is_file() else {}
        same = before.get("run_name") == section.run_name and before.get("log_dir") == section.log_dir
        record = before if same else {"run_name": section.run_name, "log_dir": section.log_dir, "name": section.name}
        self.boards: dict[str, Board] = {name: OPENERS[name](config, record, step) for name in section.loggers}
        if self.boards:
            write_json(path, record)

    def log(self, values: dict[str, Any], step: int) -> None:
        """Values of one line of `metrics.jsonl`."""
        named = board_values(values, step)
        for name, board in list(self.boards.items()):
            try:
                board.log(named, step)
            except board.errors as error:
                self._leave_out(name, error)

    def close(self) -> None:
        for name, board in list(self.boards.items()):
            try:
                board.close()
            except board.errors as error:
                self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        logger.warning(
            "%s failed (%s); training goes on without it, metrics.jsonl has everything", name, " ".join(str(error).split())
        )
        del self.boards[name]


def board_values(values: dict[str, Any], step: int) -> dict[str, float]:
    """A line of `metrics.jsonl` by the names of speculators 0.9: `train/loss`, `val/loss_epoch`, `lr/AdamW`, `epoch`, `global_step`."""
    split = values["split"]
    named: dict[str, float] = {"epoch": values["epoch"], "global_step": step}
    for name, value in values.items():
        if name in ABOUT:
            continue
        if name in RENAMED or name.startswith("lr/"):
            named[RENAMED.get(name, name)] = float(value)
        else:
            named[f"train/{name}" if split == "train" else f"val/{name}_epoch"] = float(value)
    if "lr/AdamW" in named and "lr/Muon" not in named:
        named["lr"] = named.pop("lr/AdamW")
    return named


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


class TensorBoard:
    """Files in `log_dir/run_name`. What was written after the step that a run goes on from is hidden."""

    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, config: RunConfig, record: dict[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(config.train.logging.log_dir) / record["name"]
        self.writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)
        if not step:
            settings = json.dumps(config.train.model_dump(mode="json"), indent=1)
            self.writer.add_text("config", "\n".join(f"    {line}" for line in settings.splitlines()))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Files in `log_dir/wandb`. The service takes no step twice: those after the step that a run goes on from stay as they were."""

    def __init__(self, config: RunConfig, record: dict[str, Any], step: int) -> None:
        import wandb

        self.errors: tuple[type[Exception], ...] = (OSError, wandb.Error)
        Path(config.train.logging.log_dir).mkdir(parents=True, exist_ok=True)
        try:
            self.run = wandb.init(
                name=record["name"],
                dir=config.train.logging.log_dir,
                id=record.get("wandb"),
                resume="allow",
                config=config.train.model_dump(mode="json"),
            )
        except wandb.Error as error:
            raise _cannot_start("wandb", error, "WANDB_MODE=offline keeps everything here") from None
        record["wandb"] = self.run.id

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """In Trackio's own database (TRACKIO_DIR), project `speculators`. Goes on by the run's name; steps may stand there twice."""

    errors: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError)  # it has no errors of its own

    def __init__(self, config: RunConfig, record: dict[str, Any], step: int) -> None:
        import trackio

        self.run = trackio.init(
            project=PROJECT,
            name=record["name"],
            config=_flat(config.train.model_dump(mode="json")),
            resume="allow" if step else "never",
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """Where MLFLOW_TRACKING_URI says, experiment MLFLOW_EXPERIMENT_NAME, tags MLFLOW_TAGS. Steps may stand there twice."""

    def __init__(self, config: RunConfig, record: dict[str, Any], step: int) -> None:
        import mlflow
        from mlflow.exceptions import MlflowException

        self.mlflow, self.errors = mlflow, (OSError, MlflowException)
        tags = _mlflow_tags()
        try:
            mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
            run = mlflow.start_run(run_id=record.get("mlflow"), run_name=record["name"], tags=tags)
            if "mlflow" not in record:
                settings = _flat(config.train.model_dump(mode="json"))
                mlflow.log_params({name: str(value)[:LONGEST_PARAMETER] for name, value in settings.items()})
        except MlflowException as error:
            raise _cannot_start("mlflow", error, "MLFLOW_TRACKING_URI says where it writes") from None
        record["mlflow"] = run.info.run_id

    def log(self, values: dict[str, float], step: int) -> None:
        self.mlflow.log_metrics(values, step=step)

    def close(self) -> None:
        self.mlflow.end_run()


def _mlflow_tags() -> dict[str, str]:
    text = os.environ.get("MLFLOW_TAGS", "{}")
    try:
        tags = json.loads(text)
    except ValueError:
        tags = None
    if not isinstance(tags, dict):
        raise InputError(f'MLFLOW_TAGS is {text!r}, must be a JSON object such as {{"team": "a"}}')
    return {name: str(value) for name, value in tags.items()}


def _cannot_start(name: str, error: Exception, hint: str) -> InputError:
    return InputError(f"{name} cannot be started ({' '.join(str(error).split())}); {hint}")


OPENERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio, "mlflow": MLflow}
