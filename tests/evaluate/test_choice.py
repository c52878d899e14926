"""Rejection sampling on its own, where the verifier's and the draft's distributions are given."""

from __future__ import annotations

import pytest
import torch

from eagle3_fast.evaluate.choice import Greedy, Proposal, Sampling, choice

CHI_SQUARE_24 = 51.2
"""0.999 quantile of chi-square with 24 degrees of freedom."""


def proposal(*ids: int) -> Proposal:
    return Proposal(torch.tensor(ids, dtype=torch.int64), [])


def test_greedy_accepts_up_to_the_first_other_token():
    logits = torch.eye(6)[[2, 4, 1, 5]]
    greedy = choice(0.0)
    assert isinstance(greedy, Greedy)
    assert greedy.verify(logits, proposal(2, 4, 1)) == (3, 5)
    assert greedy.verify(logits, proposal(2, 0, 1)) == (1, 4)
    assert greedy.verify(logits, proposal(0, 4, 1)) == (0, 2)
    assert greedy.verify(logits[:1], proposal()) == (0, 2)


@pytest.mark.parametrize("drafts", [1, 2], ids=["second token is the verifier's own", "second token is drafted"])
def test_sampled_tokens_have_the_verifiers_distribution(drafts):
    """q gives nothing to some tokens and much to those that p thinks unlikely; two tokens together follow p."""
    runs, size, temperature = 3000, 5, 0.7
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, size, generator=generator)
    q = torch.tensor([[0.6, 0.0, 0.1, 0.3, 0.0], [0.0, 0.25, 0.25, 0.25, 0.25]])[:drafts]
    sampling = choice(temperature, seed=11)
    assert isinstance(sampling, Sampling)
    counts = torch.zeros(size, size)
    for _ in range(runs):
        ids = torch.multinomial(q, 1, generator=generator)[:, 0]
        accepted, following = sampling.verify(logits[: drafts + 1], Proposal(ids, list(q)))
        text = [*ids[:accepted].tolist(), int(following)]
        if len(text) == 1:  # the second token comes from the next pass
            text.append(int(sampling.verify(logits[1:2], proposal())[1]))
        counts[text[0], text[1]] += 1
    p = (logits / temperature).softmax(-1)
    expected = runs * p[0][:, None] * p[1]
    assert float(((counts - expected) ** 2 / expected).sum()) < CHI_SQUARE_24


def test_a_draft_with_the_verifiers_distribution_is_always_accepted():
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(-1)
    sampling = choice(1.0, seed=0)
    for _ in range(200):
        ids = torch.multinomial(p[:2], 1)[:, 0]
        assert sampling.verify(logits, Proposal(ids, list(p[:2])))[0] == 2


def test_the_same_seed_gives_the_same_tokens():
    logits = torch.zeros(50)
    draws = [[int(choose.draw(logits)[0]) for _ in range(20)] for choose in (choice(1.0, 5), choice(1.0, 5), choice(1.0, 6))]
    assert draws[0] == draws[1] != draws[2]
