"""A training step never waits for the GPU: no tensor is read back between its first kernel and its gradient norm."""

from __future__ import annotations

import pytest
import torch
from model.drafts import random_batch, random_draft

from eagle3_fast.model.ttt import Objective, plan_rows, run_ttt


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card, where reading back means waiting")
def test_forward_and_backward_read_nothing_back() -> None:
    draft, batch, objective = (
        random_draft(dtype=torch.float32).cuda(),
        random_batch((40, 30), 80, dtype=torch.float32),
        Objective(ttt_steps=3),
    )
    plan = plan_rows(batch, objective)
    batch = batch.to("cuda")
    run_ttt(draft, batch, objective, plan=plan).loss.backward()  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_ttt(draft, batch, objective, plan=plan).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
