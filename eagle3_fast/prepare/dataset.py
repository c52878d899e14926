"""The folder of prepared rows, as it is read: `datasets` Arrow files in the layout of speculators 0.9."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np

from eagle3_fast.errors import InputError
from eagle3_fast.extract.pt_samples import holds_pt_samples

FEATURES = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("int64")),
        "seq_len": datasets.Value("int64"),
    }
)
BATCH_ROWS = 1024


def open_prepared(data_path: str | os.PathLike[str]) -> datasets.Dataset:
    """The rows of a prepared folder, memory-mapped.

    Columns: `input_ids` list of int32 (ours) or int64 (written by others), `loss_mask` list of int64, `seq_len` int64.
    Raises InputError for a missing or half-written folder and for missing columns.
    """
    path = Path(data_path)
    if not (path / "state.json").is_file() or not (path / "dataset_info.json").is_file():
        if holds_pt_samples(path):
            raise InputError(
                f"{path}: holds .pt samples of speculators; `train` and `show-mask` read them as they are, nothing else does"
            )
        raise InputError(f"{path}: holds no finished rows; run `prepare` with train.data.data_path set to it")
    try:
        rows = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: its rows cannot be read ({' '.join(str(error).split())}); run `prepare` again") from None
    missing = [name for name in FEATURES if name not in rows.column_names]
    if missing:
        raise InputError(
            f"{path}: lacks the columns {', '.join(missing)}; it has {', '.join(rows.column_names)}; run `prepare` again"
        )
    for name in ("input_ids", "loss_mask"):
        kind = getattr(getattr(rows.features[name], "feature", None), "dtype", None)
        if kind not in ("int32", "int64"):
            raise InputError(f"{path}: column {name} holds {rows.features[name]}, not lists of integers; run `prepare` again")
    return rows


def validate_ids(rows: datasets.Dataset, vocab_size: int) -> None:
    """Raise InputError naming the first row that holds a token id outside [0, vocab_size)."""
    for first, ids, _, lengths in _columns(rows):
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if wrong.size:
            row = first + int(np.searchsorted(np.cumsum(lengths), wrong[0], side="right"))
            raise InputError(
                f"row {row}: token id {ids[wrong[0]]} is outside the verifier's vocabulary of {vocab_size}; "
                "the rows were made with another tokenizer: run `prepare` again"
            )


def count_supervised(rows: datasets.Dataset) -> tuple[dict[int, int], int]:
    """How often each token id is supervised, by ascending id, and the number of all tokens."""
    counts: Counter[int] = Counter()
    tokens = 0
    for _, ids, mask, _ in _columns(rows):
        found, times = np.unique(ids[mask == 1], return_counts=True)
        counts.update(dict(zip(found.tolist(), times.tolist(), strict=True)))
        tokens += len(ids)
    return dict(sorted(counts.items())), tokens


def _columns(rows: datasets.Dataset) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """First row, flat ids, flat mask and lengths of one batch of rows after another."""
    first = 0
    for batch in rows.select_columns(["input_ids", "loss_mask"]).with_format("arrow").iter(batch_size=BATCH_ROWS):
        ids, mask = batch["input_ids"].combine_chunks(), batch["loss_mask"].combine_chunks()
        lengths = ids.value_lengths().to_numpy(zero_copy_only=False)
        yield first, ids.flatten().to_numpy(zero_copy_only=False), mask.flatten().to_numpy(zero_copy_only=False), lengths
        first += len(lengths)
