"""Examples into packed batches, and which examples go together (contract, sections 3.1, 5.5 and 5.6)."""

from __future__ import annotations

import heapq

import numpy as np
import torch
from torch import Tensor

from eagle3_fast.log import logger
from eagle3_fast.records import HiddenStates, PackedBatch


def pack(
    samples: list[tuple[HiddenStates, Tensor]],
    total_seq_len: int,
    num_aux: int,
    hidden_size: int,
    dtype: torch.dtype,
    skipped: tuple[str, ...] = (),
) -> PackedBatch:
    """Shift each (hidden states, loss mask [T]) by one and lay the documents side by side on `total_seq_len` rows.

    A sample of T tokens gives T - 1 rows. The document that crosses the end is cut; what is left empty is padding. With no sample
    at all the batch is padding only: its loss is 0.
    """
    shifted = [_shift(states, mask) for states, mask in samples]
    lengths = [len(fields[0]) for fields in shifted]
    columns = (
        [torch.cat(parts)[:total_seq_len] for parts in zip(*shifted, strict=True)] if shifted else _no_rows(num_aux, hidden_size)
    )
    input_ids, aux, last, mask, positions = columns
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))[:total_seq_len]
    return PackedBatch(
        input_ids=_pad(input_ids, total_seq_len),
        aux_hidden_states=_pad(aux.to(dtype), total_seq_len),
        last_hidden_states=_pad(last.to(dtype), total_seq_len),
        loss_mask=_pad(mask, total_seq_len),
        position_ids=_pad(positions, total_seq_len),
        document_ids=_pad(documents, total_seq_len, fill=-1),
        skipped=skipped,
    )


def _shift(sample: HiddenStates, loss_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Row i: token i + 1, aux states of token i, last state and mask of token i + 1, position i + 1."""
    token_ids, states = sample.token_ids.long(), sample.states
    positions = torch.arange(1, max(len(token_ids), 1))
    return token_ids[1:], states[:-1, :-1].flatten(1), states[1:, -1], loss_mask.long()[1:], positions


def _no_rows(num_aux: int, hidden_size: int) -> list[Tensor]:
    whole = torch.zeros(0, dtype=torch.int64)
    return [whole, torch.zeros(0, num_aux * hidden_size), torch.zeros(0, hidden_size), whole, whole]


def _pad(values: Tensor, size: int, fill: int = 0) -> Tensor:
    padded = values.new_full((size, *values.shape[1:]), fill)
    padded[: len(values)] = values
    return padded


class PackingSampler:
    """Which examples each data-parallel rank packs into each batch of an epoch; every rank gets the same number of batches.

    Examples are shuffled by seed + epoch, then taken in the largest groups that fit `replicas` bins of `capacity` tokens when each
    goes, longest first, to the emptiest bin. A rank's bin rotates with the batch number (`rotate`, speculators 0.9; fixed in 0.3).
    The tail that no longer gives every rank an example is dropped.
    """

    def __init__(
        self,
        lengths: list[int],
        capacity: int,
        replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        truncate_long: bool = True,
        rotate: bool = True,
    ) -> None:
        whole = np.asarray(lengths, dtype=np.int64)
        self.valid = np.arange(len(whole)) if truncate_long else np.flatnonzero(whole <= capacity)
        long = int((whole > capacity).sum())
        if long and rank == 0:
            logger.warning(
                "%d examples are longer than %d tokens and are %s", long, capacity, "cut" if truncate_long else "left out"
            )
        self.lengths = np.minimum(whole, capacity)
        self.capacity, self.replicas, self.rank, self.seed, self.rotate = capacity, replicas, rank, seed, rotate

    def batches(self, epoch: int) -> list[list[int]]:
        """The examples of this rank's batches, in order."""
        return [group[self.rank] for group in self.groups(epoch)]

    def groups(self, epoch: int, keep_tail: bool = False) -> list[list[list[int]]]:
        """The examples of every rank's batch, group by group.

        keep_tail: what is too little for all ranks makes a last group of fewer batches instead of being dropped.
        """
        order = np.random.default_rng(self.seed + epoch).permutation(self.valid)
        lengths = self.lengths[order]
        groups: list[list[list[int]]] = []
        start = 0
        while (count := self._largest_group(lengths, start, self.replicas)) >= self.replicas:
            bins = fill_bins(lengths[start : start + count], self.capacity, self.replicas)
            assert bins is not None, "the search returned a group that does not fit"
            turn = len(groups) if self.rotate else 0
            batches = [bins[(rank - turn) % self.replicas] for rank in range(self.replicas)]
            groups.append([[int(order[start + index]) for index in batch] for batch in batches])
            start += count
        tail: list[list[int]] = []
        while keep_tail and (count := self._largest_group(lengths, start, 1)):
            tail.append([int(example) for example in order[start : start + count]])
            start += count
        return [*groups, tail] if tail else groups

    def _largest_group(self, lengths: np.ndarray, start: int, bins: int) -> int:
        """Most examples from `start` on that fit into `bins`, by binary search; at least 1, and 0 at the end."""
        if start >= len(lengths):
            return 0
        reach = lengths[start : start + bins * self.capacity]  # of one token each, no more would fit
        low, high = 1, 1 + int(np.searchsorted(np.cumsum(reach), self.capacity * bins, side="right"))
        while high - low > 1:
            middle = (low + high) // 2
            if fill_bins(lengths[start : start + middle], self.capacity, bins) is None:
                high = middle
            else:
                low = middle
        return low


def fill_bins(lengths: np.ndarray, capacity: int, bins: int) -> list[list[int]] | None:
    """Longest first, each into the emptiest bin (the lowest-numbered of equals); None when one overflows (Graham 1969)."""
    heap = [(0, slot) for slot in range(bins)]
    contents: list[list[int]] = [[] for _ in range(bins)]
    for index in np.argsort(lengths)[::-1]:
        load, slot = heap[0]
        load += int(lengths[index])
        if load > capacity:
            return None
        heapq.heapreplace(heap, (load, slot))
        contents[slot].append(int(index))
    return contents
