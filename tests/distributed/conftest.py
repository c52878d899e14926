"""A prepared toy run, shared by all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from train.runs import changed, prepared_run

from eagle3_fast.config import RunConfig


@pytest.fixture(scope="session")
def run_file(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> RunConfig:
    config = prepared_run(tmp_path_factory.mktemp("run"), toy, chats=60)
    return changed(
        config, **{"train.optimizer": {"optimizer": "adamw", "lr": 1e-3}, "train.trainer": {"epochs": 20, "max_steps": 20}}
    )
