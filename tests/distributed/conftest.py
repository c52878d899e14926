"""A prepared toy run, shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from train.runs import changed, prepared_run

from eagle3_fast.config import RunConfig


@pytest.fixture(scope="package", autouse=True)
def float32() -> Iterator[None]:
    """The runs of this process in float32 on every machine, as those of the ranks: Muon iterates in bfloat16 where the CPU multiplies it,
    and that rounding would hide what ranks and stages change."""
    with patch("eagle3_fast.precision.cpu_multiplies_bfloat16", lambda: False):
        yield


@pytest.fixture(scope="session")
def run_file(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> RunConfig:
    config = prepared_run(tmp_path_factory.mktemp("run"), toy, chats=60)
    return changed(
        config, **{"train.optimizer": {"optimizer": "adamw", "lr": 1e-3}, "train.trainer": {"epochs": 20, "max_steps": 20}}
    )
