"""How a step's batches are spread over ranks, micro-batches and ZeRO stages changes nothing but rounding."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import run
from train.runs import changed

from eagle3_fast.config import RunConfig
from eagle3_fast.train.checkpoint import latest_checkpoint
from eagle3_fast.train.trainer import train

SPREAD = 1e-6
"""Of a parameter's norm, after 20 steps in float32."""


def into(config: RunConfig, folder: Path, **changes: dict[str, Any]) -> RunConfig:
    return changed(config, **{"train.trainer": {"save_path": str(folder)}}, **changes)


def state(folder: Path) -> dict[str, Any]:
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    return torch.load(checkpoint / "engine_state.pt", weights_only=True)["engine"]


def losses(folder: Path, split: str = "train") -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["split"] == split]


def assert_same(found: Path, expected: Path) -> None:
    """Parameters, optimizer states and losses of two runs."""
    a, b = state(found), state(expected)
    assert a["updates"] == b["updates"]
    for name, value in b["masters"].items():
        assert (a["masters"][name] - value).norm() <= SPREAD * value.norm(), name
        assert a["moments"][name].keys() == b["moments"][name].keys()
    assert losses(found) == pytest.approx(losses(expected), rel=1e-6)
    assert losses(found, "val")[-1] == pytest.approx(losses(expected, "val")[-1], rel=1e-6)


@pytest.fixture(scope="module")
def alone(run_file: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs of one plain process by optimizer: what all others are compared with. Four batches a step."""

    @cache
    def trained(optimizer: str) -> Path:
        folder = tmp_path_factory.mktemp(f"alone-{optimizer}")
        train(into(run_file, folder, engine={"accumulation": 4}, **{"train.optimizer": {"optimizer": optimizer}}))
        return folder

    return trained


@pytest.mark.parametrize(
    ("ranks", "accumulation", "stage", "optimizer"),
    [
        (1, 4, 3, "adamw"),
        (2, 2, 3, "adamw"),
        (4, 1, 3, "adamw"),
        (2, 2, 3, "muon"),
        (2, 2, 2, "muon"),
        (2, 2, 1, "adamw"),
        (2, 2, 0, "muon"),
    ],
)
def test_ranks_and_stages(
    run_file: RunConfig, alone: Any, tmp_path: Path, ranks: int, accumulation: int, stage: int, optimizer: str
) -> None:
    changes: dict[str, Any] = {"engine": {"accumulation": accumulation}, "deepspeed": {"stage": stage}}
    config = into(run_file, tmp_path / "run", **changes, **{"train.optimizer": {"optimizer": optimizer}})
    run(config, tmp_path, ranks)
    assert_same(tmp_path / "run", alone(optimizer))
