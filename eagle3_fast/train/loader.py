"""Packed batches in sampler order, from stored hidden states, from the verifier itself, or from a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.extract.pt_folder import PtRows, PtStates, open_rows
from eagle3_fast.extract.sources import HiddenStateSource, OnlineStates, StoredStates
from eagle3_fast.extract.store import SampleError, check_manifest
from eagle3_fast.extract.verifier import Verifier
from eagle3_fast.extract.vllm_states import VllmStates
from eagle3_fast.extract.weights import verifier_fingerprint
from eagle3_fast.log import logger
from eagle3_fast.model.config import DraftConfig
from eagle3_fast.precision import training_dtype
from eagle3_fast.records import HiddenStates, PackedBatch
from eagle3_fast.train.noise import Noise, noise_of
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
        self.rows = open_rows(config)
        self.on_missing = config.train.generation.on_missing
        self.dtype = training_dtype(config.train.data.hidden_states_dtype)
        self.verifier: Verifier | None = None
        layer_ids = draft_config.eagle_aux_hidden_state_layer_ids or []
        self.stored = None if online else self._stored_states(layer_ids)
        self.sources: list[HiddenStateSource] = [self.stored] if self.stored else []
        self.computes = online or self.on_missing == "generate"
        if self.computes:
            served = bool(config.train.generation.vllm_endpoint)
            self.sources.append(
                VllmStates(config, self.rows, layer_ids) if served else OnlineStates(self._load_verifier(layer_ids), self.rows)
            )

    @property
    def served(self) -> bool:
        """Whether hidden states come from a server, where no others are."""
        return isinstance(self.sources[-1], VllmStates)

    def _stored_states(self, layer_ids: list[int]) -> StoredStates | PtStates:
        if isinstance(self.rows, PtRows):
            for row, length in enumerate(self.rows.lengths):
                if not length and self.on_missing == "raise":
                    self.rows.open(row)  # raises, now rather than in the middle of an epoch, where it could not be read
            return PtStates(self.rows, self.config.engine.data_format_version, layer_ids)
        folder = self.config.hidden_states_path
        stored = StoredStates(folder, self.rows, layer_ids)
        check_manifest(folder, {"verifier_fingerprint": verifier_fingerprint(self._verifier_path())})
        return stored

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
        lengths = self.rows.lengths if isinstance(self.rows, PtRows) else list(self.rows["seq_len"])
        cut = int(len(lengths) * self.config.train.data.train_data_ratio)
        if cut == 0:
            raise InputError(
                f"{self.config.train.data.data_path}: {len(lengths)} rows leave none for training at this train_data_ratio"
            )
        return Split(0, lengths[:cut]), Split(cut, lengths[cut:])

    def batch(
        self,
        rows: list[int],
        asked: dict[int, Future[HiddenStates]] | None = None,
        noise: Callable[[Tensor, int], Tensor] | None = None,
    ) -> PackedBatch:
        """The given rows packed; a row that cannot be used is handled as `generation.on_missing` says.

        asked: where states are on the way. noise: what a row's states become in training.
        """
        samples, skipped = [], []
        for row in rows:
            try:
                sample = self.load(row) if asked is None else asked[row].result()
                self._check_fit(row, sample)
                mask = torch.tensor(self.rows[row]["loss_mask"])
            except SampleError as error:
                if self.on_missing == "raise":
                    raise
                skipped.append(str(error))
                continue
            if noise is not None:
                sample = replace(sample, states=noise(sample.states, row).to(self.dtype))
            samples.append((sample, mask))
        size = self.config.train.data.total_seq_len
        return pack(samples, size, self.draft_config.num_aux, self.draft_config.verifier_hidden_size, self.dtype, tuple(skipped))

    def _check_fit(self, row: int, sample: HiddenStates) -> None:
        """Raise SampleError for states or tokens that are not the verifier's."""
        width, expected = sample.states.shape[-1], self.draft_config.verifier_hidden_size
        if width != expected:
            raise SampleError(f"row {row}", f"its hidden states are {width} wide, the verifier's are {expected}")
        ids, vocab = sample.token_ids, self.draft_config.verifier_vocab_size
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise SampleError(f"row {row}", f"holds token ids {int(ids.min())}..{int(ids.max())}, the verifier has 0..{vocab - 1}")

    def load(self, row: int) -> HiddenStates:
        """A row's states from the first source that has them. Raises SampleError."""
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
        self,
        rows: PackedRows,
        split: Split,
        config: RunConfig,
        ranks: Ranks,
        groups: Callable[[int], list[list[list[int]]]],
        noise: Noise | None = None,
    ) -> None:
        self.rows, self.split, self.config, self.ranks, self.noise = rows, split, config, ranks, noise
        self.groups = lru_cache(maxsize=1)(groups)
        workers = 0 if rows.computes else config.train.data.num_workers
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
        options: dict[str, Any] = {"batch_size": None, "collate_fn": _as_is, "generator": order, **self.options}
        noise = None if self.noise is None else partial(self.noise.added, epoch)
        read = partial(self.rows.batch, noise=noise) if noise else self.rows.batch
        batches = self._asked_ahead(plan, read) if self.rows.served else iter(DataLoader(_Plan(read, plan), **options))
        for step in mine:
            yield [next(batches) for _ in step]

    def _asked_ahead(self, plan: list[list[int]], read: Callable[..., PackedBatch]) -> Iterator[PackedBatch]:
        """The batches of `plan`. Rows of the next `prefetch_factor` of them are asked for, `extract.concurrency` at a time, meanwhile."""
        pool = ThreadPoolExecutor(self.config.extract.concurrency)
        asked: deque[dict[int, Future[HiddenStates]]] = deque()
        try:
            for number, rows in enumerate(plan):
                for coming in plan[number + len(asked) : number + 1 + self.config.train.data.prefetch_factor]:
                    asked.append({row: pool.submit(self.rows.load, row) for row in coming})
                yield read(rows, asked.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _share(self, group: list[list[int]]) -> list[list[int]]:
        """The batches of this rank; empty ones where the group ends early."""
        slots = range(self.ranks.rank, -(-len(group) // self.ranks.size) * self.ranks.size, self.ranks.size)
        return [group[slot] if slot < len(group) else [] for slot in slots]


def training_loader(rows: PackedRows, split: Split, config: RunConfig, ranks: Ranks, slots: int) -> BatchLoader:
    """Steps of `slots` batches, shuffled anew in every epoch."""
    sampler = PackingSampler(split.lengths, config.train.data.total_seq_len, slots, seed=config.train.seed)
    return BatchLoader(rows, split, config, ranks, partial(sampler.groups, keep_tail=True), noise_of(config))


def validation_loader(rows: PackedRows, split: Split, config: RunConfig, ranks: Ranks) -> BatchLoader:
    """The same batches in every epoch and on any number of ranks; every row once."""
    batches = PackingSampler(split.lengths, config.train.data.total_seq_len, seed=VALIDATION_SEED).batches(0)
    groups = [batches[first : first + ranks.size] for first in range(0, len(batches), ranks.size)]
    return BatchLoader(rows, split, config, ranks, lambda epoch: groups)


class _Plan(Dataset):
    """A fixed list of batches for DataLoader."""

    def __init__(self, read: Callable[[list[int]], PackedBatch], plan: list[list[int]]) -> None:
        self.read, self.plan = read, plan

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> PackedBatch:
        return self.read(self.plan[index])


def _as_is(batch: Any) -> Any:
    return batch
