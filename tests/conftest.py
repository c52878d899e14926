"""Settings and fixtures of all tests: one torch thread, no network, a small ready-made verifier."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import pytest
import torch
from verifiers import toy_llama

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama verifier: vocabulary 64, hidden 32, 6 layers, 4/2 heads of 8."""
    return toy_llama(tmp_path_factory.mktemp("toy"))
