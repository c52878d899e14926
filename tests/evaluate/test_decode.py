"""Texts decoded with drafts are the verifier's own, and passes are counted right."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from eagle3_fast.evaluate.acceptance import Pass, acceptance
from eagle3_fast.evaluate.choice import Greedy, choice
from eagle3_fast.evaluate.decode import decode, plain_decode, speculative_decode
from eagle3_fast.extract.verifier import Verifier
from tests.evaluate.players import DRAFTS, Rigged, TableVerifier, table_draft
from tests.export.drafts import toy_draft
from tests.verifiers import toy_gemma3, toy_llama, toy_qwen3

PROMPT = [5, 17, 33, 20]
AUX = [1, 2, 4]
CHI_SQUARE_15 = 37.7
"""0.999 quantile of chi-square with 15 degrees of freedom."""


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return Verifier(toy_llama(tmp_path_factory.mktemp("verifier")), AUX, torch.float32)


@pytest.fixture(scope="module")
def draft():
    return toy_draft()


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_text_is_the_verifiers_own(name, verifier):
    draft = toy_draft(DRAFTS[name]())
    for prompt in (PROMPT, [9]):
        plain = plain_decode(verifier, prompt, 30, Greedy())
        speculative = speculative_decode(verifier, draft, prompt, 3, 30, Greedy())
        assert speculative.tokens == plain.tokens
        assert sum(p.emitted for p in speculative.passes) == speculative.passed_tokens == 29


def test_plain_decoding_is_that_of_transformers(verifier):
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    generated = verifier.model.generate(torch.tensor([PROMPT]), **settings)
    assert plain_decode(verifier, PROMPT, 20, Greedy()).tokens == generated[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("toy", [toy_llama, toy_qwen3, toy_gemma3])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_partly_right_drafts_leave_the_text_as_it_is(toy, every, tmp_path, draft):
    """Drafts that are wrong at each `every`-th token make every pass drop some; the text outgrows Gemma's window of 8."""
    verifier = Verifier(toy(tmp_path), AUX, torch.float32)
    plain = plain_decode(verifier, PROMPT, 30, Greedy())
    rigged = Rigged(draft, PROMPT, plain.tokens, lambda index: index % every == 0)
    speculative = decode(verifier, rigged, PROMPT, 30, Greedy(), draft_tokens=3)
    assert speculative.tokens == plain.tokens
    assert {p.accepted for p in speculative.passes} > {min(every - 1, 3)}


def test_a_perfect_draft_gives_all_and_a_wrong_one_nothing(verifier, draft):
    plain = plain_decode(verifier, PROMPT, 21, Greedy())
    perfect = decode(verifier, Rigged(draft, PROMPT, plain.tokens, lambda _: False), PROMPT, 21, Greedy(), draft_tokens=3)
    assert perfect.tokens == plain.tokens
    assert perfect.passes == [Pass(3, 3, 4)] * 5
    assert acceptance(perfect.passes, 3).tau == 4.0
    wrong = decode(verifier, Rigged(draft, PROMPT, plain.tokens, lambda _: True), PROMPT, 21, Greedy(), draft_tokens=3)
    assert wrong.tokens == plain.tokens
    assert acceptance(wrong.passes, 3).tau == 1.0
    assert acceptance(wrong.passes, 3).alpha == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("limit", range(1, 11))
def test_the_length_limit_is_met_inside_a_chain(limit, verifier, draft):
    tokens = plain_decode(verifier, PROMPT, 10, Greedy()).tokens
    rigged = Rigged(draft, PROMPT, tokens, lambda _: False)
    text = decode(verifier, rigged, PROMPT, limit, Greedy(), draft_tokens=3)
    assert text.tokens == tokens[:limit]
    whole, rest = divmod(limit - 1, 4)
    assert text.passes == [Pass(3, 3, 4)] * whole + [Pass(rest - 1, rest - 1, rest)] * (rest > 0)


def test_an_end_token_ends_the_text_wherever_it_comes(verifier, draft):
    """Each token that is new to the text is made the end token in turn: first token, any draft, the verifier's own."""
    tokens = plain_decode(verifier, PROMPT, 20, Greedy()).tokens
    places = [index for index, token in enumerate(tokens) if token not in tokens[:index]]
    assert {(place - 1) % 4 for place in places if place} == {0, 1, 2, 3}
    for place in places:
        rigged = Rigged(draft, PROMPT, tokens, lambda _: False)
        text = decode(verifier, rigged, PROMPT, 20, Greedy(), frozenset({tokens[place]}), draft_tokens=3)
        assert text.tokens == tokens[: place + 1]
        assert plain_decode(verifier, PROMPT, 20, Greedy(), {tokens[place]}).tokens == text.tokens
        whole, rest = divmod(place, 4)
        assert text.passes == [Pass(3, 3, 4)] * whole + [Pass(rest, rest, rest)] * (rest > 0)


def test_an_end_token_after_a_rejected_draft_counts_the_rejection(verifier, draft):
    tokens = plain_decode(verifier, PROMPT, 20, Greedy()).tokens
    place = next(index for index in range(4, 12) if tokens[index] not in tokens[:index])
    rigged = Rigged(draft, PROMPT, tokens, lambda index: index == place)
    text = decode(verifier, rigged, PROMPT, 20, Greedy(), {tokens[place]}, draft_tokens=3)
    assert text.tokens == tokens[: place + 1]
    assert text.passes[-1] == Pass(3, (place - 1) % 4, (place - 1) % 4 + 1)


def test_each_pass_reads_its_last_token_and_the_drafts_and_nothing_again():
    """Widths of the verifier's passes: the prompt once, then at most 1 + k tokens."""
    verifier = TableVerifier(24, 32, 3)
    text = speculative_decode(verifier, table_draft(24, 24), PROMPT[:1] * 7, 2, 12, Greedy())
    assert verifier.widths == [7] + [1 + p.offered for p in text.passes]


def test_the_drafter_is_given_the_verifiers_states_of_the_text(monkeypatch):
    """Whatever a pass rejects, the rows it confirms are the text's tokens, each with the states of the token before it."""
    verifier, draft = TableVerifier(24, 32, 3), table_draft(24, 24)
    tokens = plain_decode(verifier, [5, 3], 20, Greedy()).tokens
    rigged = Rigged(draft, [5, 3], tokens, lambda index: index % 3 == 0)
    confirmed: list[tuple[torch.Tensor, torch.Tensor]] = []
    confirm = rigged.confirm
    monkeypatch.setattr(rigged, "confirm", lambda ids, aux: (confirmed.append((ids, aux)), confirm(ids, aux)))
    assert decode(verifier, rigged, [5, 3], 20, Greedy(), draft_tokens=3).tokens == tokens
    ids, aux = (torch.cat(parts) for parts in zip(*confirmed, strict=True))
    text = torch.tensor([5, 3, *tokens])
    assert len(ids) > 15
    assert torch.equal(ids, text[1 : len(ids) + 1])
    assert torch.equal(aux, verifier.states[text[: len(ids)], :-1].flatten(1))


@pytest.mark.parametrize("draft_vocab", [None, 3, 4], ids=["plain", "reduced vocabulary", "full vocabulary"])
def test_sampled_text_has_the_verifiers_distribution(draft_vocab):
    """Joint distribution of the second and third token, against all paths through the verifier's table."""
    size, runs, temperature, prompt = 4, 600, 0.8, [3, 1]
    verifier = TableVerifier(size, 32, 3)
    p = (verifier.logits / temperature).softmax(-1)
    expected = torch.zeros(size, size)
    for first, second, third in product(range(size), repeat=3):
        expected[second, third] += p[3, 1, first] * p[1, first, second] * p[first, second, third]
    draft = None if draft_vocab is None else table_draft(size, draft_vocab)
    choose, counts, accepted = choice(temperature, seed=7), torch.zeros(size, size), set()
    for _ in range(runs):
        text = speculative_decode(verifier, draft, prompt, 2, 4, choose) if draft else plain_decode(verifier, prompt, 4, choose)
        counts[text.tokens[1], text.tokens[2]] += 1
        accepted |= {p.accepted for p in text.passes}
    chi_square = float(((counts - runs * expected) ** 2 / (runs * expected)).sum())
    assert chi_square < CHI_SQUARE_15
    assert accepted == ({0, 1, 2} if draft else {0})
