"""Named inputs for each op: the sizes at which kernels go wrong, shared by tests and benches.

EAGLE3_FAST_TEST_DEVICE names the device that they are put on (drawn on the CPU, so the same numbers everywhere).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEVICE = os.environ.get("EAGLE3_FAST_TEST_DEVICE", "cpu")


@dataclass(frozen=True)
class LinearDivergenceCase:
    """`rows` draft rows against `targets` verifier rows over `vocab` entries; hidden sizes of both sides may differ."""

    name: str
    rows: int
    targets: int
    vocab: int
    hidden: int = 32
    verifier_hidden: int = 48
    scale: float = 1.0

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
        """Keyword arguments of `ops.linear_divergence`, without `kinds`."""
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=draw, dtype=torch.float64) * std).to(DEVICE, dtype)

        wide = torch.promote_types(dtype, torch.float32)
        return {
            "h_MH": normal(self.rows, self.hidden).requires_grad_(),
            "w_VH": normal(self.vocab, self.hidden, std=self.scale * self.hidden**-0.5).requires_grad_(),
            "t_RG": normal(self.targets, self.verifier_hidden),
            "u_VG": normal(self.vocab, self.verifier_hidden, std=self.scale * self.verifier_hidden**-0.5),
            "target_row_M": torch.randint(max(self.targets, 1), (self.rows,), generator=draw),
            "row_weight_M": torch.rand(self.rows, generator=draw, dtype=torch.float64).to(DEVICE, wide) / max(self.rows, 1),
        }


LINEAR_DIVERGENCE = (
    LinearDivergenceCase("ordinary", 37, 19, 101),
    LinearDivergenceCase("one row", 1, 1, 17),
    LinearDivergenceCase("no rows", 0, 3, 17),
    LinearDivergenceCase("one vocabulary entry", 5, 5, 1),
    LinearDivergenceCase("more rows than a block", 1030, 300, 33),
    LinearDivergenceCase("sharp", 16, 16, 257, scale=12.0),
    LinearDivergenceCase("large vocabulary", 3, 2, 151_666, hidden=16, verifier_hidden=16),
)


@dataclass(frozen=True)
class TTTAttentionCase:
    """`steps` own keys a row; documents of the given lengths; only every `stride`-th row asks.

    Step j stores own keys of `spare * (steps - j)` rows more than ask, in an order that has nothing to do with theirs.
    """

    name: str
    documents: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    value_dim: int | None = None
    steps: int = 2
    window: int | None = None
    stride: int = 1
    spare: int = 0

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
        """Keyword arguments of `ops.ttt_attention`."""
        draw = torch.Generator().manual_seed(seed)
        size, (query_heads, key_heads), value_dim = sum(self.documents), self.heads, self.value_dim or self.head_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()

        rows = torch.arange(0, size, self.stride)
        starts = torch.repeat_interleave(torch.tensor([0, *self.documents[:-1]]).cumsum(0), torch.tensor(self.documents))
        lo = starts if self.window is None else torch.maximum(starts, torch.arange(size) - self.window + 1)
        stored = [len(rows) + self.spare * (self.steps - step) for step in range(self.steps)]
        order = [torch.randperm(size, generator=draw) if self.spare else torch.arange(size) for size in stored]
        return {
            "q_NQD": normal(len(rows), query_heads, self.head_dim),
            "k_TKD": normal(size, key_heads, self.head_dim),
            "v_TKD": normal(size, key_heads, value_dim),
            "key_range_N2": torch.stack((lo, torch.arange(size) + 1), dim=1)[rows].to(DEVICE, torch.int32),
            "own_k": [normal(size, key_heads, self.head_dim) for size in stored],
            "own_v": [normal(size, key_heads, value_dim) for size in stored],
            "own_rows": [index[: len(rows)].to(DEVICE, (torch.int32, torch.int64)[step % 2]) for step, index in enumerate(order)],
            "scale": self.head_dim**-0.5,
        }


TTT_ATTENTION = (
    TTTAttentionCase("one row", (1,)),
    TTTAttentionCase("two rows", (2,), steps=1),
    TTTAttentionCase("first step", (17,), steps=0),
    TTTAttentionCase("documents", (3, 1, 40, 7), steps=3),
    TTTAttentionCase("window", (127,), window=9),
    TTTAttentionCase("fewer queries", (128, 30), stride=3),
    TTTAttentionCase("fewer queries at every step", (70, 20), stride=2, steps=3, spare=5),
    TTTAttentionCase("three query heads a key head", (37,), heads=(9, 3)),
    TTTAttentionCase("seven query heads a key head", (37,), heads=(28, 4), head_dim=8),
    TTTAttentionCase("one head a key", (129,), heads=(2, 2), head_dim=80, steps=1),
    TTTAttentionCase("narrow values", (33,), head_dim=24, value_dim=16, spare=1),
    TTTAttentionCase("more rows than a block", (255, 60), steps=1),
)
