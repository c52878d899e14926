"""Ranks on a folder of `.pt` samples with noise: one process's training, one look into each file, one answer to wrong states."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import finish, run, start
from distributed.test_same_mathematics import assert_same, into
from extract.pt_files import fields
from safetensors.torch import load_file

from eagle3_fast.config import RunConfig
from eagle3_fast.extract.pt_folder import NOTES
from eagle3_fast.prepare.dataset import open_prepared
from eagle3_fast.records import HiddenStates
from eagle3_fast.train.trainer import train

TOLD = (
    "from eagle3_fast.extract import pt_folder\n"
    "def told(path, read=pt_folder.open_pt_sample):\n"
    "    print('opened', path.name, flush=True)\n"
    "    return read(path)\n"
    "pt_folder.open_pt_sample = told\n"
    "import sys; from eagle3_fast.train import trainer\n"
    "trainer.Trainer.run = lambda self: {}\n"
    "from eagle3_fast.cli import main; sys.exit(main(['train', '--config', sys.argv[1]]))\n"
)
"""A run that ends before its first step and says which files it opened."""


@pytest.fixture
def samples(run_file: RunConfig, tmp_path: Path) -> RunConfig:
    """The run on `.pt` samples of its rows, with noise."""
    folder = tmp_path / "samples"
    folder.mkdir()
    rows = open_prepared(run_file.train.data.data_path)
    for row in range(len(rows)):
        tensors = load_file(run_file.hidden_states_path / f"hs_{row}.safetensors")
        sample = HiddenStates(tensors["token_ids"], tensors["hidden_states"])
        torch.save(fields(sample, torch.tensor(rows[row]["loss_mask"])), folder / f"data_{row}.pt")
    shutil.copy(Path(run_file.train.data.data_path) / "token_freq.pt", folder)
    changes: dict[str, Any] = {"train.data": {"data_path": str(folder)}, "engine": {"noise_std": 0.05}}
    return into(run_file, tmp_path / "run", **changes)


def test_two_ranks_train_what_one_process_trains(samples: RunConfig, tmp_path: Path) -> None:
    train(into(samples, tmp_path / "alone", engine={"accumulation": 2}))
    run(samples, tmp_path, 2)
    assert_same(tmp_path / "run", tmp_path / "alone")


def test_only_the_first_rank_opens_files_for_their_lengths(samples: RunConfig, tmp_path: Path) -> None:
    """And for the check of their norm; the other one reads its notes."""
    first, other = run(samples, tmp_path, 2, TOLD)
    count = len(list((tmp_path / "samples").glob("data_*.pt")))
    assert first.said.count("opened") == count + 8 and other.said.count("opened") == 0
    assert (tmp_path / "samples" / NOTES).is_file()


def test_every_rank_says_that_the_states_are_on_the_other_side(samples: RunConfig, tmp_path: Path) -> None:
    ranks = start(into(samples, tmp_path / "run", engine={"compat": "0.3"}), tmp_path, 2)
    assert finish(ranks) == [2, 2]
    assert all("data_" in rank.said and "set engine.verifier_norm to true" in rank.said for rank in ranks)
