"""A case as a packed batch, and as inputs of each op: the rows that a real training step would give it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from presets import Case
from torch import Tensor, nn

from eagle3_fast.records import PackedBatch

AUX_LAYERS = [2, 16, 29]
"""Names of the three aux layers; their number is all that matters here."""


def packed_batch(case: Case, dtype: torch.dtype, device: str) -> PackedBatch:
    """Documents of `case.document` rows, the last part of each supervised, no padding."""
    draw = torch.Generator(device).manual_seed(0)
    hidden, row = case.model.hidden, torch.arange(case.rows, device=device)
    return PackedBatch(
        input_ids=torch.randint(case.model.verifier_vocab, (case.rows,), generator=draw, device=device),
        aux_hidden_states=torch.randn(case.rows, len(AUX_LAYERS) * hidden, generator=draw, dtype=dtype, device=device),
        last_hidden_states=torch.randn(case.rows, hidden, generator=draw, dtype=dtype, device=device),
        loss_mask=_mask(case, row).long(),
        position_ids=row % case.document + 1,
        document_ids=row // case.document,
    )


class RowPlan(NamedTuple):
    """`model.ttt.RowPlan` of a case, worked out here because a machine with a GPU may lack what the model needs. On the CPU."""

    active: list[Tensor]  # rows that step k computes
    scored: list[Tensor]  # rows of step k that are scored


def row_plan(case: Case) -> RowPlan:
    row, steps = torch.arange(case.rows), range(case.ttt_steps)
    mask = _mask(case, row)
    supervised = [torch.cat((mask[k:], mask.new_zeros(k))) for k in steps]
    scored = [rows | (mask & (row < case.rows - k)) if k < steps[-1] else rows for k, rows in enumerate(supervised)]
    active = [torch.stack(scored[k:]).any(0) for k in steps]
    return RowPlan(*([rows.nonzero().squeeze(1) for rows in part] for part in (active, scored)))


def _mask(case: Case, row: Tensor) -> Tensor:
    """bool: the row lies in the supervised part of its document."""
    return row % case.document >= case.document - round(case.document * case.supervised)


def key_ranges(case: Case, rows: Tensor) -> Tensor:
    """int32 [N, 2]: from the start of a row's document up to the row."""
    return torch.stack((rows // case.document * case.document, rows + 1), dim=1).to(torch.int32)


def scored_rows(case: Case) -> tuple[Tensor, Tensor]:
    """Verifier rows that are scored against, and for each draft row of all steps the place of its verifier row among them."""
    return torch.cat([rows + k for k, rows in enumerate(row_plan(case).scored)]).unique(return_inverse=True)


@lru_cache(maxsize=2)  # the smoke case and one more: in one process all providers of a case share their inputs
def linear_divergence_inputs(case: Case, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """A draft some way towards its verifier: same (frozen) head, hidden states off by noise; rows weigh alike, as Liger needs."""
    draw = torch.Generator(device).manual_seed(0)
    needed, target_row = scored_rows(case)
    size = case.model.hidden

    def normal(rows: int, std: float = 1.0) -> Tensor:
        return torch.randn(rows, size, generator=draw, dtype=dtype, device=device).mul_(std)

    t, head = normal(len(needed)), normal(case.vocab, 3 * size**-0.5)
    draft_head, verifier_head = (nn.Parameter(x, requires_grad=False) for x in (head, head.clone()))
    return {
        "h_MH": normal(len(target_row), 0.3).add_(t[target_row.to(device)]).requires_grad_(),
        "w_VH": draft_head,
        "t_RG": t,
        "u_VG": verifier_head,
        "target_row_M": target_row,
        "row_weight_M": torch.full(target_row.shape, 1 / len(target_row), device=device),
        "anchor_R": torch.cat([(rows @ head.T).argmax(-1) for rows in t.split(1024)]),
    }


@lru_cache(maxsize=2)
def ttt_attention_inputs(case: Case, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The call of the last TTT step, the heaviest one: queries of its active rows, own keys of every later step's active rows."""
    draw = torch.Generator(device).manual_seed(0)
    query_heads, key_heads = case.model.heads

    def normal(rows: int, heads: int) -> Tensor:
        values = torch.randn(rows, heads, case.model.head_dim, generator=draw, dtype=dtype, device=device)
        return values.requires_grad_()

    active = row_plan(case).active
    rows, later = active[-1], active[1:]
    return {
        "q_NQD": normal(len(rows), query_heads),
        "k_TKD": normal(case.rows, key_heads),
        "v_TKD": normal(case.rows, key_heads),
        "key_range_N2": key_ranges(case, rows).to(device),
        "own_k": [normal(len(own), key_heads) for own in later],
        "own_v": [normal(len(own), key_heads) for own in later],
        "own_rows": [torch.searchsorted(own, rows, out_int32=True).to(device) for own in later],
        "scale": case.model.head_dim**-0.5,
    }
