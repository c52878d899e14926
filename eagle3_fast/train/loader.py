"""Packed batches in sampler order, from stored hidden states or from the verifier itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.extract.sources import HiddenStateSource, OnlineStates, StoredStates
from eagle3_fast.extract.store import SampleError, check_manifest
from eagle3_fast.extract.verifier import Verifier
from eagle3_fast.extract.weights import verifier_fingerprint
from eagle3_fast.log import logger
from eagle3_fast.model.config import DraftConfig
from eagle3_fast.precision import training_dtype
from eagle3_fast.prepare.dataset import open_prepared
from eagle3_fast.records import HiddenStates, PackedBatch
from eagle3_fast.train.packing import PackingSampler, pack
from eagle3_fast.train.ranks import Ranks

VALIDATION_SEED = 0


@dataclass(frozen=True)
class Split:
    """A contiguous part of the prepared rows: `first`..`first + len(lengths) - 1`."""

    first: int
    lengths: list[int]


class PackedRows:
    """Prepared rows and their hidden states, as packed batches of any rows asked for."""

    def __init__(self, config: RunConfig, draft_config: DraftConfig, online: bool) -> None:
        self.config, self.draft_config = config, draft_config
        self.rows = open_prepared(config.train.data.data_path)
        self.on_missing = config.train.generation.on_missing
        self.dtype = training_dtype(config.train.data.hidden_states_dtype)
        self.verifier: Verifier | None = None
        layer_ids = draft_config.eagle_aux_hidden_state_layer_ids or []
        stored = None if online else StoredStates(config.hidden_states_path, self.rows, layer_ids)
        if stored is not None:
            check_manifest(config.hidden_states_path, {"verifier_fingerprint": verifier_fingerprint(self._verifier_path())})
        self.sources: list[HiddenStateSource] = [stored] if stored else []
        if online or self.on_missing == "generate":
            self.sources.append(OnlineStates(self._load_verifier(layer_ids), self.rows))

    def _verifier_path(self) -> str:
        return self.config.train.verifier.verifier_name_or_path

    def _load_verifier(self, layer_ids: list[int]) -> Verifier:
        section = self.config.train.verifier
        return Verifier(
            section.verifier_name_or_path,
            layer_ids,
            self.dtype,
            self.config.extract.attn_implementation,
            section.trust_remote_code,
        )

    def splits(self) -> tuple[Split, Split]:
        """Training and validation rows; the validation part is empty at a ratio of 1."""
        lengths = list(self.rows["seq_len"])
        cut = int(len(lengths) * self.config.train.data.train_data_ratio)
        if cut == 0:
            raise InputError(
                f"{self.config.train.data.data_path}: {len(lengths)} rows leave none for training at this train_data_ratio"
            )
        return Split(0, lengths[:cut]), Split(cut, lengths[cut:])

    def batch(self, rows: list[int]) -> PackedBatch:
        """The given rows packed; a row that cannot be used is handled as `generation.on_missing` says."""
        samples, skipped = [], []
        for row in rows:
            try:
                states = self._load(row)
                if states.states.shape[-1] != self.draft_config.verifier_hidden_size:
                    expected = self.draft_config.verifier_hidden_size
                    raise SampleError(
                        f"row {row}", f"its hidden states are {states.states.shape[-1]} wide, the verifier's are {expected}"
                    )
            except SampleError as error:
                if self.on_missing == "raise":
                    raise
                skipped.append(str(error))
                continue
            samples.append((states, torch.tensor(self.rows[row]["loss_mask"])))
        size = self.config.train.data.total_seq_len
        return pack(samples, size, self.draft_config.num_aux, self.draft_config.verifier_hidden_size, self.dtype, tuple(skipped))

    def _load(self, row: int) -> HiddenStates:
        *others, last = self.sources
        for source in others:
            try:
                return source.load(row)
            except SampleError as error:
                logger.debug("row %d: %s", row, error)
        return last.load(row)


class BatchLoader:
    """Iterates what this rank packs of a split, step by step, from any step of an epoch on.

    groups: by epoch, the rows of every batch of every step. A group holds the batches of all ranks and micro-batches, batch b being
    micro-batch b // ranks of rank b % ranks: what is in a step does not depend on how many ranks share it. Where a group is short, some
    ranks get a batch of padding only.
    """

    def __init__(
        self, rows: PackedRows, split: Split, config: RunConfig, ranks: Ranks, groups: Callable[[int], list[list[list[int]]]]
    ) -> None:
        self.rows, self.split, self.ranks = rows, split, ranks
        self.groups = lru_cache(maxsize=1)(groups)
        workers = config.train.data.num_workers if len(rows.sources) == 1 and isinstance(rows.sources[0], StoredStates) else 0
        self.options: dict[str, Any] = {"num_workers": workers}
        if workers:
            self.options["prefetch_factor"] = config.train.data.prefetch_factor

    def count(self, epoch: int) -> int:
        """Steps of an epoch."""
        return len(self.groups(epoch))

    def steps(self, epoch: int, start: int = 0) -> Iterator[list[PackedBatch]]:
        """This rank's batches of each step, equally many on every rank."""
        mine = [self._share(group) for group in self.groups(epoch)[start:]]
        plan = [[self.split.first + row for row in batch] for step in mine for batch in step]
        # Workers draw nothing at random: a generator of their own keeps the run's random state what it would be without them.
        order = torch.Generator().manual_seed(0)
        batches = iter(DataLoader(_Plan(self.rows, plan), batch_size=None, collate_fn=_as_is, generator=order, **self.options))
        for step in mine:
            yield [next(batches) for _ in step]

    def _share(self, group: list[list[int]]) -> list[list[int]]:
        """The batches of this rank; empty ones where the group ends early."""
        slots = range(self.ranks.rank, -(-len(group) // self.ranks.size) * self.ranks.size, self.ranks.size)
        return [group[slot] if slot < len(group) else [] for slot in slots]


def training_loader(rows: PackedRows, split: Split, config: RunConfig, ranks: Ranks, slots: int) -> BatchLoader:
    """Steps of `slots` batches, shuffled anew in every epoch."""
    sampler = PackingSampler(split.lengths, config.train.data.total_seq_len, slots, seed=config.train.seed)
    return BatchLoader(rows, split, config, ranks, partial(sampler.groups, keep_tail=True))


def validation_loader(rows: PackedRows, split: Split, config: RunConfig, ranks: Ranks) -> BatchLoader:
    """The same batches in every epoch and on any number of ranks; every row once."""
    batches = PackingSampler(split.lengths, config.train.data.total_seq_len, seed=VALIDATION_SEED).batches(0)
    groups = [batches[first : first + ranks.size] for first in range(0, len(batches), ranks.size)]
    return BatchLoader(rows, split, config, ranks, lambda epoch: groups)


class _Plan(Dataset):
    """A fixed list of batches for DataLoader."""

    def __init__(self, rows: PackedRows, plan: list[list[int]]) -> None:
        self.rows, self.plan = rows, plan

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> PackedBatch:
        return self.rows.batch(self.plan[index])


def _as_is(batch: Any) -> Any:
    return batch
