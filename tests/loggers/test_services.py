"""A training and its continuation, logged to the real Weights & Biases, Trackio and MLflow, none of which may leave this machine.

They come in an environment of their own: `make test-loggers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from train.runs import changed, prepared_run

from eagle3_fast.config import RunConfig
from eagle3_fast.train.trainer import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> RunConfig:
    return prepared_run(tmp_path_factory.mktemp("run"), toy)


def trained_in_two_parts(run: RunConfig, folder: Path, name: str) -> None:
    for steps in (3, 5):
        sections: dict[str, dict[str, Any]] = {
            "train.trainer": {"save_path": str(folder / "checkpoints"), "max_steps": steps},
            "train.logging": {"logger": name, "log_dir": str(folder / "logs"), "run_name": "two parts"},
        }
        train(changed(run, **sections))


def test_mlflow(run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient, set_tracking_uri

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "a"}')
    set_tracking_uri(uri)
    trained_in_two_parts(run, tmp_path, "mlflow")
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("speculators")
    assert experiment is not None
    (logged,) = client.search_runs([experiment.experiment_id])
    assert [metric.step for metric in client.get_metric_history(logged.info.run_id, "train/loss")] == [1, 2, 3, 4, 5]
    assert logged.data.tags["team"] == "a" and logged.data.params["trainer.epochs"] == "2"
    assert logged.info.run_name == "two parts" and logged.info.status == "FINISHED"


def test_wandb(run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    monkeypatch.setenv("WANDB_MODE", "offline")
    trained_in_two_parts(run, tmp_path, "wandb")
    steps: list[int] = []
    for path in sorted((tmp_path / "logs").rglob("*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            names = {"/".join(item.nested_key) or item.key for item in record.history.item}
            steps += [record.history.step.num] if "train/loss" in names else []
    assert steps == [1, 2, 3, 4, 5]
    assert len({path.stem.split("-")[-1] for path in (tmp_path / "logs").rglob("*.wandb")}) == 1, "one run, in two parts"


def test_trackio(run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    import trackio

    trained_in_two_parts(run, tmp_path, "trackio")
    (name,) = trackio.Api().runs("speculators")
    assert name.name == "two parts"
    steps = [row["step"] for row in name.history() if "train/loss" in row]
    assert steps == [1, 2, 3, 4, 5]
