"""Every element of every parameter lies in exactly one piece, and whole tensors come back from the pieces."""

from __future__ import annotations

import pytest
import torch

from eagle3_fast.train.partitions import Partition, each_cut, row_cut

SHAPES = [torch.Size(shape) for shape in ((5, 3), (1,), (7,), (4, 4))]
NAMES = ["a", "b", "c", "d"]


def cut(kind: str, rank: int, ranks: int) -> Partition:
    if kind == "each":
        return each_cut(NAMES, SHAPES, rank, ranks)
    total = sum(shape.numel() for shape in SHAPES)
    return row_cut(NAMES, SHAPES, -(-total // ranks), rank, ranks)


@pytest.mark.parametrize("kind", ["each", "row"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 50])
def test_pieces_hold_everything_once(kind: str, ranks: int) -> None:
    whole = {name: torch.randn(shape) for name, shape in zip(NAMES, SHAPES, strict=True)}
    found = {name: torch.full_like(value, torch.nan).flatten() for name, value in whole.items()}
    for rank in range(ranks):
        partition = cut(kind, rank, ranks)
        piece = torch.full((partition.size,), torch.nan)
        partition.scatter(whole, piece)
        for name, share in zip(NAMES, partition.shares[rank], strict=True):
            assert torch.isnan(found[name][share.start : share.stop]).all(), "held twice"
            found[name][share.start : share.stop] = piece[share.offset : share.offset + share.size]
    assert all(torch.equal(found[name].view_as(value), value) for name, value in whole.items())


def test_owners_share_the_cost() -> None:
    owner = cut("each", 0, 2).owners([9.0, 5.0, 4.0, 1.0])
    assert owner == [0, 1, 1, 0]
