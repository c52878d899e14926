"""Training-time test: the draft unrolled over its own hidden states, and the loss of every step (contract, section 3).

Row i at step k reads token i + k, attends to the rows of step 0 of its document up to i and to its own earlier steps, and is
scored against the verifier at row i + k. Three pieces: `plan_rows` says which rows each step needs, `Unroll` runs the draft on
them, `score` turns their hidden states into one loss. With teacher-forced tokens no step waits for another's logits, so all steps
are scored by one call; with the draft's own tokens (speculators 0.3) each step is scored before the next one starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eagle3_fast.model.draft import Draft
from eagle3_fast.model.layers import EmbeddingShare
from eagle3_fast.ops import LinearDivergence, linear_divergence, ttt_attention
from eagle3_fast.records import PackedBatch, TTTOutput

BATCH_DIVISOR_FLOOR = 1e-5
"""What speculators adds to the supervised rows of a batch before it divides by them."""


@dataclass(frozen=True)
class Objective:
    """What is trained: which tokens later steps read, what a row's loss is, and how rows are weighed."""

    ttt_steps: int = 3
    terms: dict[str, float] | None = None  # divergence weights by name; none: forward KL
    step_loss_decay: float = 1.0
    teacher_forced: bool = True  # false: later steps read the draft's own argmax (speculators 0.3)
    verifier_norm: bool = True  # false: verifier rows go to its head as they are stored (speculators 0.3)
    label_mask: bool = False  # weigh a row by the token it predicts instead of the token it reads

    @property
    def kinds(self) -> dict[str, float]:
        return self.terms or {"kl_div": 1.0}


@dataclass(frozen=True)
class RowPlan:
    """Which rows of a packed batch each step computes. K steps; all indices are rows of the batch, ascending.

    On the CPU whatever the device of the draft: its sizes steer the unroll, and a GPU asked for them would have to be waited for.
    """

    active: list[Tensor]  # rows of step k that this or a later step's loss still reaches; each is a subset of the one before
    scored: list[Tensor]  # rows of step k whose logits are needed, by the loss or by the running-accuracy metrics
    supervised: list[Tensor]  # bool, over `scored[k]`: the loss counts this row
    chain_start: Tensor  # bool [S]: the row's own input token is supervised, so a chain of drafts is counted from here
    document_ids: Tensor  # int64 [S]: those of the batch

    @property
    def counts(self) -> Tensor:
        """Supervised rows of each step, float32 [K]: what the loss of an optimizer step is divided by."""
        return torch.stack([rows.sum() for rows in self.supervised]).float()


def plan_rows(batch: PackedBatch, objective: Objective) -> RowPlan:
    """Row i at step k is supervised where the mask holds at row i + k.

    Under speculators' rule the mask is that of the input token and nothing stops at a document's end; under the label rule it is
    that of the predicted token, and rows whose label lies beyond their document count nothing.
    """
    size, steps = batch.input_ids.shape[0], objective.ttt_steps
    mask, documents = supervision(batch, objective).cpu(), batch.document_ids.cpu()
    supervised = [_ahead(mask, k) for k in range(steps)]
    if objective.label_mask:
        supervised = [rows & (_ahead(documents, k, fill=-2) == documents) for k, rows in enumerate(supervised)]
    inside = [torch.arange(size) < size - k for k in range(steps)]
    scored = [rows | (mask & inside[k]) if k < steps - 1 else rows for k, rows in enumerate(supervised)]
    active: list[Tensor] = []
    needed = torch.zeros_like(mask)
    for rows in reversed(scored):
        needed = needed | rows
        active.insert(0, needed.nonzero().squeeze(1))
    # The draft's own tokens need logits wherever a later step goes on.
    scored_rows = [rows.nonzero().squeeze(1) for rows in scored] if objective.teacher_forced else active
    supervised_rows = [rows[index] for rows, index in zip(supervised, scored_rows, strict=True)]
    return RowPlan(active, scored_rows, supervised_rows, mask, documents)


def supervision(batch: PackedBatch, objective: Objective) -> Tensor:
    """bool [S]: the row is supervised at step 0."""
    mask = batch.loss_mask.bool() & (batch.document_ids >= 0)
    if not objective.label_mask:
        return mask
    return _ahead(mask, 1) & (_ahead(batch.document_ids, 1, fill=-2) == batch.document_ids)


def run_ttt(
    draft: Draft, batch: PackedBatch, objective: Objective, divisor_K: Tensor | None = None, plan: RowPlan | None = None
) -> TTTOutput:
    """Unroll and score one packed batch.

    divisor_K: supervised rows of each step over the whole optimizer step; none: those of this batch, as speculators divides.
    plan: of this batch, made while it was on the CPU; none: made here.
    A batch with nothing to supervise gives loss 0 and zero gradients.
    """
    plan = plan or plan_rows(batch, objective)
    divisor_K = plan.counts + BATCH_DIVISOR_FLOOR if divisor_K is None else divisor_K.cpu()
    run = _teacher_forced if objective.teacher_forced else _on_own_tokens
    results = run(draft, batch, plan, objective, divisor_K)
    return _summarise(batch, plan, results, objective, divisor_K)


def _teacher_forced(
    draft: Draft, batch: PackedBatch, plan: RowPlan, objective: Objective, divisor_K: Tensor
) -> list[LinearDivergence]:
    """Step k reads the data's token i + k: unroll first, then score all steps at once."""
    unroll, steps = Unroll(draft, batch, plan), range(objective.ttt_steps)
    share = draft.embed(batch.input_ids)
    head_rows = [unroll.advance(k, share if k == 0 else share.take(unroll.active[k] + k)) for k in steps]
    return score(draft, batch, plan, head_rows, steps, objective, divisor_K)


def _on_own_tokens(
    draft: Draft, batch: PackedBatch, plan: RowPlan, objective: Objective, divisor_K: Tensor
) -> list[LinearDivergence]:
    """Step k + 1 reads what the draft's head picked at step k, row by row: each step is scored before the next one starts."""
    unroll, results = Unroll(draft, batch, plan), []
    token_ids = batch.input_ids
    for k in range(objective.ttt_steps):
        head_rows = unroll.advance(k, draft.embed(token_ids))
        results += score(draft, batch, plan, [head_rows], range(k, k + 1), objective, divisor_K)
        if k + 1 < objective.ttt_steps:
            picked = results[k].draft_top1_M[torch.searchsorted(unroll.active[k], unroll.active[k + 1])]
            token_ids = draft.verifier_id(picked)
    return results


def score(
    draft: Draft,
    batch: PackedBatch,
    plan: RowPlan,
    head_rows: list[Tensor],
    steps: range,
    objective: Objective,
    divisor_K: Tensor,
) -> list[LinearDivergence]:
    """Divergences of `steps` by one call of the op; each verifier row is normed and projected once and serves every step.

    head_rows: [len(plan.scored[k]), H] for each step. The loss of the call stands in the first result, zero in the others.
    """
    needed, target_row = torch.cat([plan.scored[k] + k for k in steps]).unique(return_inverse=True)
    device = batch.input_ids.device
    needed = needed.to(device, non_blocking=True)
    verifier_rows = batch.last_hidden_states[needed]
    if objective.verifier_norm:
        verifier_rows = draft.verifier_norm(verifier_rows)
    dtype = head_rows[0].dtype
    row_weights = torch.cat([_row_weights(plan, k, objective, divisor_K) for k in steps])
    whole = linear_divergence(
        torch.cat(head_rows),
        draft.lm_head.weight.to(dtype),
        verifier_rows.to(dtype),
        draft.verifier_lm_head.weight.to(dtype),
        target_row,
        row_weights.to(device, torch.promote_types(dtype, torch.float32), non_blocking=True),
        objective.kinds,
        draft.verifier_softcap,
        _next_tokens(draft, batch, needed),
    )
    sizes = [len(rows) for rows in head_rows]
    per_row = {name: value.split(sizes) for name, value in vars(whole).items() if name != "loss"}
    losses = [whole.loss, *(torch.zeros_like(whole.loss) for _ in steps[1:])]
    return [LinearDivergence(loss, **{name: parts[at] for name, parts in per_row.items()}) for at, loss in enumerate(losses)]


def _next_tokens(draft: Draft, batch: PackedBatch, rows: Tensor) -> Tensor:
    """Draft ids of the data's tokens after those that `rows` read, -1 where the draft has none: what the verifier probably says there."""
    return draft.draft_id(_ahead(batch.input_ids, 1)[rows])


def _row_weights(plan: RowPlan, k: int, objective: Objective, divisor_K: Tensor) -> Tensor:
    """decay^k / divisor_k where the loss counts the row, 0 where only a metric or a later step needs it."""
    return plan.supervised[k].float() * _step_scale(k, objective, divisor_K)


def _step_scale(k: int, objective: Objective, divisor_K: Tensor) -> Tensor:
    return objective.step_loss_decay**k / divisor_K[k].clamp_min(BATCH_DIVISOR_FLOOR)


class Unroll:
    """What the steps hand on: the active rows' hidden states, keys and values of step 0, and own keys and values of later steps."""

    def __init__(self, draft: Draft, batch: PackedBatch, plan: RowPlan) -> None:
        self.draft, self.batch, self.plan = draft, batch, plan
        self.active, self.scored = (
            [rows.to(batch.input_ids.device, non_blocking=True) for rows in steps] for steps in (plan.active, plan.scored)
        )
        layers = draft.config.transformer_layer_config
        self.host_ranges = [key_ranges(plan.document_ids, layers.window(i)) for i in range(layers.num_hidden_layers)]
        self.ranges = [ranges.to(batch.input_ids.device, non_blocking=True) for ranges in self.host_ranges]
        self.shared: list[tuple[Tensor, Tensor]] = []  # per layer: keys and values of step 0, all rows
        # Per layer: keys and values of each later step.
        self.own: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.ranges]
        self.hidden = draft.fuse(batch.aux_hidden_states)

    def advance(self, k: int, share: EmbeddingShare) -> Tensor:
        """Run step k. Returns the rows for the head, [len(plan.scored[k]), H].

        `share` is `Draft.embed` of the tokens read: of every row at step 0, which gives keys and values of every row (later rows
        attend to them) and so can trim its last layer alone; of the active rows later.
        """
        rows, batch = self.active[k], self.batch
        if k == 0:
            attend = [partial(self._attend_first, *ranges) for ranges in zip(self.ranges, self.host_ranges, strict=True)]
            attend[-1] = partial(self._attend_first, self.ranges[-1][rows], self.host_ranges[-1][self.plan.active[0]])
            normed, self.hidden = self.draft.step(share, self.hidden, batch.position_ids, attend, rows)
        else:
            kept = torch.searchsorted(self.active[k - 1], rows)
            own_rows = [torch.searchsorted(active, rows, out_int32=True) for active in self.active[1 : k + 1]]
            attend = [partial(self._attend_later, layer, k, own_rows) for layer in range(len(self.ranges))]
            normed, self.hidden = self.draft.step(share, self.hidden[kept], batch.position_ids[rows] + k, attend)
        return normed[torch.searchsorted(rows, self.scored[k])]

    def _attend_first(self, key_range_N2: Tensor, host_range_N2: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.shared.append((k, v))
        return ttt_attention(q, k, v, key_range_N2, [], [], [], q.shape[-1] ** -0.5, host_range_N2)

    def _attend_later(self, layer: int, step: int, own_rows: list[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own_k, own_v = self.own[layer]
        own_k.append(k)
        own_v.append(v)
        ranges, host_ranges = self.ranges[layer][self.active[step]], self.host_ranges[layer][self.plan.active[step]]
        return ttt_attention(q, *self.shared[layer], ranges, own_k, own_v, own_rows, q.shape[-1] ** -0.5, host_ranges)


def _summarise(
    batch: PackedBatch, plan: RowPlan, results: list[LinearDivergence], objective: Objective, divisor_K: Tensor
) -> TTTOutput:
    """Losses and counts of every step from the per-row results (contract, section 3.6)."""
    size, device = batch.input_ids.shape[0], batch.input_ids.device
    chain, divisor_K = plan.chain_start.to(device, non_blocking=True), divisor_K.to(device, non_blocking=True)
    full, cond, marginal, term_losses, tokens = [], [], [], [], []
    for k, result in enumerate(results):
        rows, supervised = (part[k].to(device, non_blocking=True) for part in (plan.scored, plan.supervised))
        right = result.draft_top1_M == result.verifier_top1_M
        cond.append(chain[: size - k].sum())
        spread = torch.zeros(size, dtype=torch.bool, device=rows.device)
        spread[rows] = right
        chain = chain & spread
        full.append((chain[rows] & supervised).sum())
        marginal.append((right & supervised).sum())
        term_losses.append(_step_scale(k, objective, divisor_K) * result.terms_ME.masked_fill(~supervised[:, None], 0.0).sum(0))
        tokens.append(torch.full((size,), -1, device=rows.device).index_copy(0, rows, result.draft_top1_M))
    terms_KE = torch.stack(term_losses)
    weights_E = torch.tensor(list(objective.kinds.values()), dtype=terms_KE.dtype).to(device, non_blocking=True)
    return TTTOutput(
        loss=torch.stack([result.loss for result in results]).sum(),
        step_losses=(terms_KE * weights_E).sum(-1),  # not a product of matrices: autocast would round it
        term_losses=terms_KE,
        full_correct=torch.stack(full),
        supervised=plan.counts.long().to(device, non_blocking=True),
        cond_total=torch.stack(cond),
        marginal_correct=torch.stack(marginal),
        draft_tokens=tuple(tokens),
    )


def key_ranges(document_ids_S: Tensor, window: int | None) -> Tensor:
    """int32 [S, 2]: row i sees step-0 keys lo <= j < hi, from its document's start or the window's, up to itself.

    A padding row sees itself only. Both columns are non-decreasing.
    """
    index = torch.arange(document_ids_S.shape[0], device=document_ids_S.device)
    starts = torch.ones_like(index, dtype=torch.bool)
    starts[1:] = (document_ids_S[1:] != document_ids_S[:-1]) | (document_ids_S[1:] < 0)
    lo = torch.where(starts, index, 0).cummax(0).values
    if window is not None:
        lo = torch.maximum(lo, index - window + 1)
    return torch.stack((lo, index + 1), dim=1).to(torch.int32)


def _ahead(values_S: Tensor, k: int, fill: int = 0) -> Tensor:
    """values[i + k], `fill` where that is beyond the end."""
    return torch.cat((values_S[k:], values_S.new_full((min(k, values_S.shape[0]),), fill)))
