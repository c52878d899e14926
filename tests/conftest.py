"""Settings and fixtures of all tests: one torch thread, no network, a small ready-made verifier."""

from __future__ import annotations

import logging
import os
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import pytest
import torch
from verifiers import toy_llama

from eagle3_fast.log import logger

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def as_a_library() -> None:
    """The package's log as a library has it, whatever command an earlier test ran in this process."""
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama verifier: vocabulary 64, hidden 32, 6 layers, 4/2 heads of 8."""
    return toy_llama(tmp_path_factory.mktemp("toy"))
