"""Accuracies and acceptance length, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle3_fast.records import PackedBatch, TTTOutput
from eagle3_fast.train.metrics import MetricsWriter, Totals, acceptance_length

HITS = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1]])
"""Row = chain, column = step."""


def output(hits: torch.Tensor) -> TTTOutput:
    chains, steps = hits.shape
    joint = hits.cumprod(1).sum(0)
    return TTTOutput(
        loss=torch.tensor(3.0),
        step_losses=torch.ones(steps),
        term_losses=torch.ones(steps, 1),
        full_correct=joint,
        supervised=torch.full((steps,), chains),
        cond_total=torch.cat((torch.tensor([chains]), joint[:-1])),
        marginal_correct=hits.sum(0),
    )


def batch(size: int) -> PackedBatch:
    zeros = torch.zeros(size, dtype=torch.int64)
    return PackedBatch(zeros, zeros, zeros, zeros, zeros, zeros)


def test_a_fixed_hit_matrix() -> None:
    totals = Totals()
    totals.add(output(HITS), batch(4))
    summary = totals.summary()
    assert [summary[f"marginal_acc_{k}"] for k in range(3)] == pytest.approx([2 / 3, 2 / 3, 2 / 3])
    assert [summary[f"full_acc_{k}"] for k in range(3)] == pytest.approx([2 / 3, 1 / 3, 0])
    assert [summary[f"cond_acc_{k}"] for k in range(3)] == pytest.approx([2 / 3, 1 / 2, 0])
    assert summary["tau"] == pytest.approx(1 + 2 / 3 + 1 / 3)
    assert totals.tokens == 4


def test_batches_are_added_before_dividing() -> None:
    totals = Totals()
    totals.add(output(torch.tensor([[1]])), batch(1))
    totals.add(output(torch.tensor([[0], [0], [0]])), batch(1))
    assert totals.summary()["cond_acc_0"] == pytest.approx(1 / 4)


def test_a_rate_without_cases_is_left_out() -> None:
    totals = Totals()
    totals.add(output(torch.tensor([[0, 0]])), batch(1))
    assert "cond_acc_1" not in totals.summary()


def test_acceptance_length_counts_the_verifiers_own_token() -> None:
    assert acceptance_length([0.0, 1.0, 1.0]) == 1.0
    assert acceptance_length([1.0, 1.0, 1.0]) == 4.0


def test_rewinding_forgets_what_came_after(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(1, 5):
        writer.write(step, {"loss": 1.0})
    writer.close()
    with path.open("a") as file:
        file.write('{"global_step": 5, "lo')
    again = MetricsWriter(path)
    again.rewind(2)
    again.write(3, {"loss": 2.0})
    again.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["global_step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 1.0), (3, 2.0)]
