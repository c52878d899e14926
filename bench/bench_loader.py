"""Packed batches from stored hidden states: our loader against reading the same files and nothing else. One epoch, page cache warm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from batches import AUX_LAYERS
from bench_train_step import draft_config
from measure import Local
from presets import Case
from safetensors.torch import save_file

from eagle3_fast.config import RunConfig
from eagle3_fast.extract.store import sample_path, write_sample
from eagle3_fast.model.config import parse_draft_config
from eagle3_fast.prepare.dataset import FEATURES
from eagle3_fast.records import HiddenStates
from eagle3_fast.train.loader import PackedRows, training_loader
from eagle3_fast.train.ranks import Ranks

AXES = ()
BATCHES = 4


def write_data(folder: Path, case: Case) -> None:
    """Rows of `case.document` tokens with their hidden states in bfloat16, enough for `BATCHES` batches."""
    draw = torch.Generator().manual_seed(0)
    documents, tokens = BATCHES * case.rows // case.document, case.document
    ids = torch.randint(case.model.verifier_vocab, (documents, tokens), generator=draw)
    columns = {"input_ids": ids.tolist(), "loss_mask": [[1] * tokens] * documents, "seq_len": [tokens] * documents}
    datasets.Dataset.from_dict(columns, features=FEATURES).save_to_disk(str(folder))
    (folder / "verifier").mkdir()  # the loader compares its fingerprint; any checkpoint will do
    (folder / "verifier" / "config.json").write_text("{}")
    save_file({"weight": torch.zeros(1)}, folder / "verifier" / "model.safetensors")
    states = torch.randn(tokens, len(AUX_LAYERS) + 1, case.model.hidden, generator=draw, dtype=torch.bfloat16)
    (folder / "hidden_states").mkdir()
    for row in range(documents):
        write_sample(folder / "hidden_states", row, HiddenStates(ids[row], states))


def epoch(folder: Path, case: Case, workers: int) -> Callable[[], int]:
    data: dict[str, Any] = {"data_path": str(folder), "total_seq_len": case.rows, "train_data_ratio": 1.0, "num_workers": workers}
    config = RunConfig.model_validate({"train": {"verifier": {"verifier_name_or_path": str(folder / "verifier")}, "data": data}})
    rows = PackedRows(config, parse_draft_config(draft_config(case), str(case)), online=False)
    loader = training_loader(rows, rows.splits()[0], config, Ranks(), slots=1)
    return lambda: sum(batch.input_ids.numel() for step in loader.steps(0) for batch in step)


def read(folder: Path, case: Case) -> Callable[[], int]:
    """Every byte of every file, in order."""
    rows = range(BATCHES * case.rows // case.document)
    return lambda: sum(len(sample_path(folder / "hidden_states", row).read_bytes()) for row in rows)


def test_loader(compare, case: Case, tmp_path: Path) -> None:
    """All in this process; memory does not count what workers hold."""
    write_data(tmp_path / "data", case)
    calls = {"workers 0": (epoch, 0), "workers 1": (epoch, 1), "read": (read,)}
    makers = {
        name: partial(lambda make, *rest: Local(make(tmp_path / "data", case, *rest), "cpu"), *parts)
        for name, parts in calls.items()
    }
    compare("loader", list(makers), case, makers=makers, tokens=BATCHES * case.rows)
