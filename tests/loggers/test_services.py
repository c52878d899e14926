"""A training and its continuation, logged to the real Weights & Biases, Trackio and MLflow, none of which may leave this machine.

They come in an environment of their own: `make test-loggers`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from train.runs import changed, prepared_run

from eagle3_fast.config import RunConfig
from eagle3_fast.train.trainer import train

WANDB_HEADER = 7  # bytes before the first record


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
    assert logged.data.tags["team"] == "a" and logged.data.params["trainer/epochs"] == "2"
    assert logged.info.run_name == "two parts" and logged.info.status == "FINISHED"


def test_wandb(run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    trained_in_two_parts(run, tmp_path, "wandb")
    files, steps = sorted((tmp_path / "logs").rglob("*.wandb")), []
    for data in [data for path in files for data in leveldb_log(path.read_bytes()[WANDB_HEADER:])]:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        names = {"/".join(item.nested_key) or item.key for item in record.history.item}
        steps += [record.history.step.num] if "train/loss" in names else []
    assert steps == [1, 2, 3, 4, 5]
    assert len(files) == 2 and len({path.stem.split("-")[-1] for path in files}) == 1, "one run, in two parts"


def leveldb_log(log: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's format: blocks of 32 KiB, chunks of them headed by CRC, length and kind (1 whole, 4 the last).

    W&B counts its file's header into the first block.
    """
    position, record = WANDB_HEADER, b""
    while position < len(log) + WANDB_HEADER:
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        at = position - WANDB_HEADER
        _, length, kind = struct.unpack("<IHB", log[at : at + 7])
        record += log[at + 7 : at + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def test_trackio(run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    import trackio
    from trackio.sqlite_storage import SQLiteStorage  # its public interface does not give metrics back

    trained_in_two_parts(run, tmp_path, "trackio")
    (logged,) = trackio.Api().runs("speculators")
    assert logged.name == "two parts"
    losses = SQLiteStorage.get_metric_values("speculators", logged.name, "train/loss")
    assert [value["step"] for value in losses] == [1, 2, 3, 4, 5]
