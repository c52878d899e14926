"""Where the trainer takes hidden states from: files, or the verifier itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from datasets import Dataset
from torch import Tensor

from eagle3_fast.extract.store import SampleError, check_manifest, read_last_states, read_sample, sample_path
from eagle3_fast.extract.verifier import Verifier
from eagle3_fast.records import HiddenStates


class HiddenStateSource(Protocol):
    """Hidden states by row of the whole prepared dataset. `load` raises SampleError for a sample that cannot be used."""

    def load(self, row: int) -> HiddenStates: ...


class StoredStates:
    """Reads the files that `extract` or speculators wrote. Opens none of them before it is asked for its row.

    Raises InputError where the folder's manifest names other aux layers than `layer_ids`.
    """

    def __init__(self, folder: str | Path, dataset: Dataset, layer_ids: Sequence[int]) -> None:
        self.folder, self.dataset, self.n_aux = Path(folder), dataset, len(layer_ids)
        check_manifest(folder, {"layer_ids": sorted(layer_ids)})

    def load(self, row: int) -> HiddenStates:
        return read_sample(self.folder, row, token_ids(self.dataset, row), self.n_aux)

    def last_states(self, row: int, tokens: int) -> Tensor:
        """[t, G]: the last states of the first `tokens` tokens at most. Raises SampleError."""
        return read_last_states(self.folder, row, tokens)

    def name(self, row: int) -> str:
        """The file of a row."""
        return str(sample_path(self.folder, row))


class OnlineStates:
    """Runs the verifier whenever a row is asked for; nothing is stored."""

    def __init__(self, verifier: Verifier, dataset: Dataset) -> None:
        self.verifier, self.dataset = verifier, dataset

    def load(self, row: int) -> HiddenStates:
        return self.load_many([row])[0]

    def load_many(self, rows: Sequence[int]) -> list[HiddenStates]:
        """One padded forward pass for all `rows`."""
        batch = [token_ids(self.dataset, row) for row in rows]
        for row, ids in zip(rows, batch, strict=True):
            if len(ids) == 0 or not 0 <= int(ids.min()) <= int(ids.max()) < self.verifier.shape.vocab_size:
                raise SampleError(f"row {row}", f"has no tokens or ids outside 0..{self.verifier.shape.vocab_size - 1}")
        states = self.verifier.hidden_states(batch)
        for row, state in zip(rows, states, strict=True):
            if not torch.isfinite(state).all():
                raise SampleError(f"row {row}", f"its hidden states are not finite in {state.dtype}")
        return [HiddenStates(token_ids=ids, states=state) for ids, state in zip(batch, states, strict=True)]


def token_ids(dataset: Dataset, row: int) -> Tensor:
    """int64 [T], the tokens of a row."""
    return torch.as_tensor(dataset[row]["input_ids"], dtype=torch.int64)
