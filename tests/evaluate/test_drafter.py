"""The draft at work gives what training computes: its steps against the unroll of training-time test."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3_fast.errors import InputError
from eagle3_fast.evaluate.choice import Greedy
from eagle3_fast.evaluate.drafter import Drafter, check_vocabulary
from eagle3_fast.model.draft import Draft
from eagle3_fast.model.layers import rotate
from eagle3_fast.model.ttt import Objective, Unroll, plan_rows
from eagle3_fast.records import HiddenStates
from eagle3_fast.train.packing import pack
from tests.evaluate.players import DRAFTS
from tests.export.drafts import MAP, draft_config, toy_draft

STEPS = 4
CHUNKS = (1, 5, 1, 2, 4, 3)
"""Rows confirmed together; the first is a prompt of one token."""


class Teacher(Greedy):
    """Makes the chain read given tokens instead of its own."""

    def __init__(self, draft: Draft, tokens: Tensor) -> None:
        self.ids = draft.verifier_id(torch.arange(draft.config.draft_vocab_size)).tolist()
        self.tokens = iter(tokens.tolist())

    def draw(self, logits_V: Tensor) -> tuple[Tensor, None]:
        return torch.tensor(self.ids.index(next(self.tokens))), None


def recorded_steps(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    steps: list[tuple[Tensor, Tensor]] = []
    step = draft.step

    def record(*inputs: Any) -> tuple[Tensor, Tensor]:
        steps.append(step(*inputs))
        return steps[-1]

    monkeypatch.setattr(draft, "step", record)
    return steps


@pytest.mark.parametrize("name", DRAFTS)
@torch.no_grad()
def test_steps_are_those_of_training(name, monkeypatch):
    draft = toy_draft(DRAFTS[name]())
    length = sum(CHUNKS) + STEPS + 1
    generator = torch.Generator().manual_seed(1)
    tokens = torch.tensor(MAP)[torch.randint(len(MAP), (length,), generator=generator)]
    states = torch.randn(length, 4, 32, generator=generator)
    batch = pack([(HiddenStates(tokens, states), torch.ones(length))], length - 1, 3, 32, torch.float32)

    objective = Objective(ttt_steps=STEPS)
    unroll = Unroll(draft, batch, plan_rows(batch, objective))
    trained = []
    for k in range(STEPS):
        normed = unroll.advance(k, draft.embed(batch.input_ids[unroll.active[k] + k] if k else batch.input_ids))
        trained.append((normed, unroll.hidden))

    steps, drafter = recorded_steps(draft, monkeypatch), Drafter(draft, Greedy(), sum(CHUNKS))
    for count, rows in zip(CHUNKS, accumulate(CHUNKS), strict=True):
        drafter.choose = Teacher(draft, tokens[rows + 1 :])
        steps.clear()
        drafter.confirm(tokens[rows - count + 1 : rows + 1], states[rows - count : rows, :-1].flatten(1))
        proposal = drafter.propose(STEPS)
        assert proposal.ids.tolist() == tokens[rows + 1 : rows + 1 + STEPS].tolist()
        assert len(steps) == STEPS
        for k, (normed, hidden) in enumerate(steps):
            torch.testing.assert_close(normed[0], trained[k][0][rows - 1], rtol=0, atol=1e-5)
            torch.testing.assert_close(hidden[0], trained[k][1][rows - 1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("normed_goes_on", [True, False])
@torch.no_grad()
def test_the_head_sees_normed_states_and_the_next_step_what_the_config_says(normed_goes_on):
    """Two steps of a draft of one confirmed row, by hand: one key and then two, so attention is easily written out."""
    draft = toy_draft(draft_config(norm_output=normed_goes_on))
    token, aux = torch.tensor([MAP[3]]), torch.randn(1, 96, generator=torch.Generator().manual_seed(2))
    drafter = Drafter(draft, Greedy(), 1)
    drafter.confirm(token, aux)
    proposal = drafter.propose(2)

    layer, attention = draft.layers[0], draft.layers[0].self_attn

    def by_hand(token: Tensor, hidden: Tensor, position: int, earlier: list) -> Tensor:
        carried = layer.hidden_norm(hidden)
        x = torch.cat((layer.input_layernorm(draft.embed_tokens.weight[token]), carried), -1)
        q, k, v = (
            F.linear(x, part.weight).unflatten(-1, (-1, 8)) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        rotary = draft.rotary(torch.tensor([position]))
        earlier.append((rotate(k, rotary), v))
        keys, values = (torch.cat(part).repeat_interleave(2, 1) for part in zip(*earlier, strict=True))
        weights = (torch.einsum("hd,khd->hk", rotate(q, rotary)[0], keys) * 8**-0.5).softmax(-1)
        out = carried + attention.o_proj(torch.einsum("hk,khd->hd", weights, values).reshape(1, -1))
        return out + layer.mlp(layer.post_attention_layernorm(out))

    keys: list = []
    hidden = draft.fuse(aux)
    for step, expected in enumerate(proposal.ids.tolist()):
        out = by_hand(token, hidden, 1 + step, keys)
        picked = F.linear(draft.norm(out), draft.lm_head.weight).argmax()
        assert MAP[picked] == expected
        token, hidden = torch.tensor([MAP[picked]]), draft.norm(out) if normed_goes_on else out
    assert torch.equal(drafter.hidden, drafter.normed) == normed_goes_on


def test_drafts_are_ids_of_the_verifier_and_their_distributions_cover_its_vocabulary():
    draft = toy_draft()
    verifier_ids = Drafter(draft, Greedy(), 1).verifier_ids
    assert verifier_ids.tolist() == list(MAP)
    spread = Drafter(draft, Greedy(), 1)._spread(torch.arange(24.0))
    assert spread.shape == (64,)
    assert spread[list(MAP)].tolist() == list(range(24))
    assert spread.sum() == sum(range(24))
    whole = toy_draft(DRAFTS["full vocabulary"]())
    assert Drafter(whole, Greedy(), 1).verifier_ids.tolist() == list(range(64))


def test_a_lost_vocabulary_mapping_is_refused():
    draft = toy_draft()
    check_vocabulary(draft, "here")
    draft.d2t.zero_()
    with pytest.raises(InputError, match="here: d2t and t2d"):
        check_vocabulary(draft, "here")


def test_query_width_follows_head_dim():
    assert toy_draft(DRAFTS["wide heads"]()).layers[0].self_attn.q_proj.weight.shape == (64, 80)
