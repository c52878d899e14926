"""A training step never waits for the GPU: no tensor is read back between its first kernel and its gradient norm.

Without a card the meta device stands in for it: it has no values, so reading one raises. Nor may a call mix it with the CPU, which a
card partly forgives and waits for. What a kernel does inside is not seen there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from model.drafts import random_batch, random_draft
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle3_fast.model.ttt import Objective, plan_rows, run_ttt
from eagle3_fast.ops import _chunks
from eagle3_fast.ops._chunks import KINDS, Results, sweep
from eagle3_fast.records import PackedBatch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card, where reading back means waiting")
@pytest.mark.parametrize("deterministic", [False, True])
def test_forward_and_backward_read_nothing_back(deterministic: bool) -> None:
    draft, batch, objective = (
        random_draft(dtype=torch.float32).cuda(),
        random_batch((40, 30), 80, dtype=torch.float32),
        Objective(ttt_steps=3),
    )
    plan = plan_rows(batch, objective)
    batch = batch.to("cuda")
    torch.use_deterministic_algorithms(deterministic)
    run_ttt(draft, batch, objective, plan=plan).loss.backward()  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_ttt(draft, batch, objective, plan=plan).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)


class OneDevice(TorchDispatchMode):
    """Refuses calls whose tensors are on several devices, but for copies, numbers, and the op that takes `target_row` on the CPU."""

    CROSS = ("aten::copy_", "aten::_to_copy", "eagle3_fast::linear_divergence")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        devices = {tensor.device.type for tensor in tensors}
        assert len(devices) < 2 or func.name().split(".")[0] in self.CROSS, f"{func} on {devices}"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device_without_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The meta device, told apart from a card only where autocast and a slab's size ask for a device by name."""
    for op in ("linear_divergence", "ttt_attention"):
        monkeypatch.setattr(import_module(f"eagle3_fast.ops.{op}"), "full_precision", lambda _: nullcontext())
    monkeypatch.setitem(_chunks.HEAD_SLAB, "meta", 8)
    with OneDevice():
        yield "meta"


def sent(batch: PackedBatch, device: str) -> PackedBatch:
    return replace(batch, **{name: value.to(device) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)})


@pytest.mark.parametrize("teacher_forced", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        {},
        {"model_type": "qwen3"},
        {"num_hidden_layers": 2, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ],
    ids=["llama", "qwen3", "two layers, one with a window"],
)
def test_unroll_and_score_need_no_value(device_without_values: str, layer: dict, teacher_forced: bool) -> None:
    draft = random_draft(layer, train_head=not teacher_forced, dtype=torch.float32)
    batch, objective = random_batch((40, 30), 80, dtype=torch.float32), Objective(ttt_steps=3, teacher_forced=teacher_forced)
    plan = plan_rows(batch, objective)
    draft, batch = draft.to(device_without_values), sent(batch, device_without_values)
    run_ttt(draft, batch, objective, plan=plan).loss.backward()
    assert all(value.grad is not None for value in draft.parameters() if value.requires_grad)


@pytest.mark.parametrize("storage", ["centred", "float32", "bfloat16"])
def test_the_sweep_needs_no_value(device_without_values: str, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the row pass, which returns tensors of the right shape here."""
    rows, targets, hidden, vocabulary, device = 20, 9, 16, 24, device_without_values

    def row_pass(kinds: dict, *_: object) -> _chunks.RowPass:
        def run(z: torch.Tensor, t: torch.Tensor, chunk: _chunks.Chunk, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
            of_row, top1 = z.new_empty(len(z), dtype=torch.float32), z.new_empty(len(z), dtype=torch.int64)
            at_target = t.new_empty(len(t), dtype=torch.int64)
            return z.new_empty(len(z), len(kinds), dtype=torch.float32), top1, at_target[chunk.place], of_row, of_row, of_row

        return run

    monkeypatch.setattr(_chunks, "_fused_rows", row_pass)
    monkeypatch.setattr(_chunks, "arithmetic_dtype", lambda dtype, _: dtype)
    draft_rows, head = (torch.empty(n, hidden, dtype=torch.bfloat16, device=device) for n in (rows, vocabulary))
    verifier_rows = torch.empty(targets, hidden, dtype=torch.bfloat16, device=device)
    wide, top1 = (torch.empty(rows, dtype=dtype, device=device) for dtype in (torch.float32, torch.int64))
    terms, gradient = torch.empty(rows, 2, device=device), torch.empty(vocabulary, hidden, device=device)
    results = Results(wide.sum(), terms, top1, top1, wide, wide, wide, torch.empty_like(draft_rows), gradient)
    target_row = torch.arange(rows) % targets
    anchor = torch.zeros(targets, dtype=torch.int64, device=device)
    kinds = dict.fromkeys(KINDS[:2], 0.5)
    sweep(results, draft_rows, head, verifier_rows, head, target_row, wide, anchor, kinds, 0.0, storage)
