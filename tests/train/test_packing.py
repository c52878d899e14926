"""Packing and the sampler beyond the golden files: edges, and what every rank must have in common."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagle3_fast.records import HiddenStates
from eagle3_fast.train.packing import PackingSampler, fill_bins, pack


def sample(length: int, start: int = 0) -> tuple[HiddenStates, torch.Tensor]:
    states = torch.arange(length, dtype=torch.float32)[:, None, None].expand(length, 3, 2) + start
    return HiddenStates(torch.arange(length) + start, states.contiguous()), torch.ones(length, dtype=torch.int64)


def test_rows_are_shifted_by_one() -> None:
    batch = pack([sample(4, 10)], 5, num_aux=2, hidden_size=2, dtype=torch.float32)
    assert batch.input_ids.tolist() == [11, 12, 13, 0, 0]
    assert batch.aux_hidden_states[:, 0].tolist() == [10, 11, 12, 0, 0]
    assert batch.last_hidden_states[:, 0].tolist() == [11, 12, 13, 0, 0]
    assert batch.position_ids.tolist() == [1, 2, 3, 0, 0]
    assert batch.document_ids.tolist() == [0, 0, 0, -1, -1]


def test_the_document_that_crosses_the_end_is_cut() -> None:
    batch = pack([sample(4), sample(6, 20)], 6, num_aux=2, hidden_size=2, dtype=torch.float32)
    assert batch.document_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.input_ids.tolist() == [1, 2, 3, 21, 22, 23]


def test_a_sample_of_one_token_gives_no_row() -> None:
    batch = pack([sample(1), sample(3)], 4, num_aux=2, hidden_size=2, dtype=torch.float32)
    assert batch.document_ids.tolist() == [1, 1, -1, -1]


@pytest.mark.parametrize("num_aux", [3, 5])
def test_no_sample_gives_a_batch_of_padding_of_the_right_width(num_aux: int) -> None:
    batch = pack([], 4, num_aux=num_aux, hidden_size=2, dtype=torch.bfloat16, skipped=("hs_0: gone",))
    assert batch.aux_hidden_states.shape == (4, 2 * num_aux)
    assert batch.aux_hidden_states.dtype == torch.bfloat16
    assert (batch.document_ids == -1).all()
    assert batch.skipped == ("hs_0: gone",)


@pytest.mark.parametrize("replicas", [2, 3])
def test_ranks_share_the_work(replicas: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 53).tolist()
    ranks = [PackingSampler(lengths, 100, replicas, rank).batches(0) for rank in range(replicas)]
    assert len({len(batches) for batches in ranks}) == 1
    used = [row for batches in ranks for batch in batches for row in batch]
    assert len(used) == len(set(used)) > 53 - replicas
    assert all(batch and sum(lengths[row] for row in batch) <= 100 for batches in ranks for batch in batches)


def test_long_samples_can_be_left_out() -> None:
    sampler = PackingSampler([5, 200, 7], 100, truncate_long=False)
    assert sorted(row for batch in sampler.batches(0) for row in batch) == [0, 2]


def test_epochs_differ_and_repeat() -> None:
    sampler = PackingSampler(list(range(1, 40)), 60)
    assert sampler.batches(0) != sampler.batches(1)
    assert sampler.batches(1) == PackingSampler(list(range(1, 40)), 60).batches(1)


def test_an_overfull_bin_is_refused() -> None:
    assert fill_bins(np.array([6, 5]), 10, 1) is None
    assert fill_bins(np.array([6, 5]), 10, 2) == [[0], [1]]
