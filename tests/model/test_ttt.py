"""The unroll and its loss against a slow reading of the contract, and what must not matter: other documents, padding, trimming."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model.drafts import random_batch, random_draft
from torch import Tensor
from torch.nn import functional as F

from eagle3_fast.model.draft import Draft
from eagle3_fast.model.ttt import Objective, key_ranges, plan_rows, run_ttt
from eagle3_fast.records import PackedBatch

TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


def slow_loss(draft: Draft, batch: PackedBatch, objective: Objective) -> Tensor:
    """Forward-KL loss by the contract's words: every row, dense masks, keys appended step by step, no trimming, one step at a time."""
    size, layers = len(batch.input_ids), draft.config.transformer_layer_config
    index = torch.arange(size)
    caches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in draft.layers]
    token_ids, hidden, loss = batch.input_ids, draft.fuse(batch.aux_hidden_states), torch.zeros(())
    targets = batch.last_hidden_states
    if objective.verifier_norm:
        targets = draft.verifier_norm(targets)
    target_logits = targets @ draft.verifier_lm_head.weight.T
    for k in range(objective.ttt_steps):

        def attend(layer: int, q: Tensor, keys: Tensor, values: Tensor, k: int = k) -> Tensor:
            caches[layer].append((keys, values))
            same = (batch.document_ids[:, None] == batch.document_ids) & (batch.document_ids >= 0)
            base = same & (index <= index[:, None])
            window = layers.window(layer)
            if window:
                base = base & (index > index[:, None] - window)
            mask = torch.cat((base | torch.eye(size, dtype=torch.bool), *(torch.eye(size, dtype=torch.bool) for _ in range(k))), 1)
            group = q.shape[1] // keys.shape[1]
            every_k, every_v = (torch.cat(x).repeat_interleave(group, 1) for x in zip(*caches[layer], strict=True))
            scores = torch.einsum("nhd,thd->hnt", q, every_k) * q.shape[-1] ** -0.5
            return torch.einsum("hnt,thd->nhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), every_v)

        see = [lambda q, keys, values, layer=layer: attend(layer, q, keys, values) for layer in range(len(draft.layers))]
        head_rows, hidden = draft.step(draft.embed(token_ids), hidden, batch.position_ids + k, see)
        logits = head_rows @ draft.lm_head.weight.T
        weight = batch.loss_mask[k:].to(logits.dtype)
        rows = F.kl_div(logits[: size - k].log_softmax(-1), target_logits[k:].softmax(-1), reduction="none").sum(-1)
        loss = loss + objective.step_loss_decay**k * (rows * weight).sum() / (weight.sum() + 1e-5)
        if objective.teacher_forced:
            token_ids = torch.cat((batch.input_ids[k + 1 :], torch.zeros(k + 1, dtype=torch.int64)))
        else:
            token_ids = draft.verifier_id(logits.argmax(-1))
    return loss


def gradients(draft: Draft, loss: Tensor) -> dict[str, Tensor]:
    draft.zero_grad()
    loss.backward()
    return {name: value.grad.clone() for name, value in draft.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize(
    ("layer", "flags"),
    [
        ({}, {}),
        ({}, {"norm_output": False, "norm_before_residual": False, "norm_before_fc": False}),
        ({"model_type": "qwen3"}, {"norm_before_fc": False, "fc_norm": True}),
        (TWO_LAYERS, {}),
        ({"hidden_size": 32, "head_dim": 16, "num_attention_heads": 3, "num_key_value_heads": 1}, {"draft_vocab_size": 64}),
    ],
)
def test_loss_and_gradients_are_those_of_the_slow_reading(layer: dict, flags: dict, forced: bool) -> None:
    draft, batch = random_draft(layer, train_head=not forced, **flags), random_batch((11, 1, 9), 24)
    objective = Objective(ttt_steps=4, step_loss_decay=0.8, teacher_forced=forced, verifier_norm=forced)
    slow = slow_loss(draft, batch, objective)
    expected = gradients(draft, slow)
    loss = run_ttt(draft, batch, objective).loss
    actual = gradients(draft, loss)
    assert torch.allclose(loss, slow, rtol=1e-6)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] - value).norm() <= 1e-6 * value.norm(), name


def test_naive_trimming_would_be_wrong() -> None:
    """Rows of a step that only a later step's loss reaches must be computed: dropping them changes the loss."""
    batch, objective = random_batch((12,), 12), Objective(ttt_steps=3)
    plan = plan_rows(batch, objective)
    supervised = [rows[keep] for rows, keep in zip(plan.scored, plan.supervised, strict=True)]
    assert set(plan.active[0].tolist()) > set(supervised[0].tolist())
    for earlier, later in zip(plan.active, plan.active[1:], strict=False):
        assert set(later.tolist()) <= set(earlier.tolist())


def test_another_document_does_not_matter() -> None:
    draft, objective = random_draft(), Objective(ttt_steps=3)
    batch = random_batch((4, 6), 10)
    other = random_batch((4, 6), 10, seed=1)
    changed = replace(
        batch,
        input_ids=torch.cat((other.input_ids[:4], batch.input_ids[4:])),
        aux_hidden_states=torch.cat((other.aux_hidden_states[:4], batch.aux_hidden_states[4:])),
        last_hidden_states=torch.cat((other.last_hidden_states[:4], batch.last_hidden_states[4:])),
    )
    second_only = torch.cat((torch.zeros(4, dtype=torch.int64), batch.loss_mask[4:]))
    results = [run_ttt(draft, replace(x, loss_mask=second_only), objective).loss for x in (batch, changed)]
    before, after = (gradients(draft, loss) for loss in results)
    assert torch.allclose(*results, rtol=1e-12)
    assert all(torch.allclose(before[name], after[name], rtol=1e-9, atol=1e-12) for name in before)
    leaking = replace(batch, document_ids=torch.zeros(10, dtype=torch.int64), loss_mask=second_only)
    assert not torch.allclose(run_ttt(draft, leaking, objective).loss, results[0]), "positions alone must not separate documents"


def test_padding_does_not_matter() -> None:
    draft, objective = random_draft(), Objective(ttt_steps=3)
    losses = [run_ttt(draft, random_batch((8,), size), objective).loss for size in (8, 16, 32)]
    assert torch.allclose(losses[0], losses[1], rtol=1e-12)
    assert torch.allclose(losses[0], losses[2], rtol=1e-12)


def test_rows_without_a_target_get_no_gradient() -> None:
    """T = 5 tokens give 4 rows; step k reaches none of the last k, and no row stands for the token that was never predicted."""
    draft, objective = random_draft(), Objective(ttt_steps=3)
    batch = replace(random_batch((4,), 4), loss_mask=torch.ones(4, dtype=torch.int64))
    plan = plan_rows(batch, objective)
    assert [rows.tolist() for rows in plan.scored] == [[0, 1, 2, 3], [0, 1, 2], [0, 1]]
    assert run_ttt(draft, batch, objective).loss.isfinite()


def test_nothing_to_supervise_gives_zero_loss_and_zero_gradients() -> None:
    draft = random_draft(train_head=True)
    batch = replace(random_batch((8,), 12), loss_mask=torch.zeros(12, dtype=torch.int64))
    for forced in (True, False):
        output = run_ttt(draft, batch, Objective(teacher_forced=forced))
        found = gradients(draft, output.loss)
        assert output.loss == 0
        assert all((value == 0).all() for value in found.values())


def test_teacher_forced_tokens_do_not_depend_on_the_draft() -> None:
    """Changing what the head picks changes neither the states nor, through them, later steps."""
    draft, batch, objective = random_draft(), random_batch((9,), 9), Objective(ttt_steps=2, terms={"tv": 1.0})
    first = run_ttt(draft, batch, objective)
    draft.d2t.zero_()
    assert torch.equal(run_ttt(draft, batch, objective).loss, first.loss)
    own = Objective(ttt_steps=2, terms={"tv": 1.0}, teacher_forced=False)
    changed = run_ttt(draft, batch, own).loss
    draft.d2t.copy_(random_draft().d2t)
    assert not torch.equal(run_ttt(draft, batch, own).loss, changed)


def test_permuted_mapping_and_head_give_the_same_loss() -> None:
    draft, batch, objective = random_draft(), random_batch((9,), 9), Objective()
    before = run_ttt(draft, batch, objective).loss
    order = torch.arange(23, -1, -1)
    for head in (draft.lm_head, draft.verifier_lm_head):
        head.weight.data = head.weight.data[order]
    draft.d2t.copy_((torch.arange(24) + draft.d2t)[order] - torch.arange(24))
    assert torch.allclose(run_ttt(draft, batch, objective).loss, before, rtol=1e-12)


def test_label_rule_weighs_the_predicted_token_and_stops_at_the_document() -> None:
    batch = replace(random_batch((5, 4), 9), loss_mask=torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 1]))
    plan = plan_rows(batch, Objective(ttt_steps=2, label_mask=True))
    supervised = [rows[keep].tolist() for rows, keep in zip(plan.scored, plan.supervised, strict=True)]
    assert supervised == [[1, 2, 3, 5, 7], [0, 1, 2, 6]]
    upstream = plan_rows(batch, Objective(ttt_steps=2))
    supervised = [rows[keep].tolist() for rows, keep in zip(upstream.scored, upstream.supervised, strict=True)]
    assert supervised == [[2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 7]]


def test_a_window_of_batches_equals_one_batch() -> None:
    """With the divisor of the whole optimizer step, loss does not depend on how documents are spread over batches."""
    draft, objective = random_draft(), Objective(ttt_steps=3)
    whole = random_batch((9, 12), 21)
    parts = []
    for rows in (slice(0, 9), slice(9, 21)):
        fields = {name: value[rows] for name, value in vars(whole).items() if isinstance(value, Tensor)}
        parts.append(PackedBatch(**fields))
    divisor = sum(plan_rows(part, objective).counts for part in parts)
    together = run_ttt(draft, whole, objective, divisor)
    apart = [run_ttt(draft, part, objective, divisor) for part in parts]
    assert torch.allclose(together.loss, sum(part.loss for part in apart), rtol=1e-6)
    assert torch.equal(together.full_correct, sum(part.full_correct for part in apart))


def test_reported_losses_are_not_rounded_by_autocast() -> None:
    draft, batch = random_draft(dtype=torch.float32), random_batch((9,), 9, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = run_ttt(draft, batch, Objective(terms={"kl_div": 0.3, "tv": 1.0}))
    assert output.step_losses.dtype == torch.float32
    assert torch.allclose(output.step_losses.sum(), output.loss, rtol=1e-6)


def test_key_ranges() -> None:
    documents = torch.tensor([0, 0, 0, 1, 1, -1, -1])
    assert key_ranges(documents, None).tolist() == [[0, 1], [0, 2], [0, 3], [3, 4], [3, 5], [5, 6], [6, 7]]
    assert key_ranges(documents, 2).tolist() == [[0, 1], [0, 2], [1, 3], [3, 4], [3, 5], [5, 6], [6, 7]]


@pytest.mark.parametrize("config", [{}, TWO_LAYERS])
def test_recompute_keeps_less_and_changes_no_gradient(config: dict) -> None:
    draft, batch, objective = random_draft(config), random_batch((9, 7), 16), Objective(ttt_steps=3)
    expected = gradients(draft, run_ttt(draft, batch, objective).loss)
    draft.recompute(True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        loss = run_ttt(draft, batch, objective).loss
    again = gradients(draft, loss)
    assert all(torch.equal(again[name], value) for name, value in expected.items())
    whole: list[int] = []
    draft.recompute(False)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: whole.append(x.numel()) or x, lambda x: x):
        run_ttt(draft, batch, objective)
    assert sum(kept) < sum(whole)
