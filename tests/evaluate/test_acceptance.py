"""Rates and lengths worked out by hand."""

from __future__ import annotations

import pytest

from eagle3_fast.evaluate.acceptance import Pass, acceptance
from eagle3_fast.train.metrics import acceptance_length


def whole(accepted: int) -> Pass:
    return Pass(3, accepted, accepted + 1)


def test_nothing_accepted_is_one_and_everything_accepted_is_four():
    assert acceptance([whole(0)] * 5, 3).tau == 1.0
    assert acceptance([whole(3)] * 5, 3).tau == 4.0


def test_rates_of_a_small_hit_matrix():
    """Hits [1, 1, 0], [1, 0, 1], [0, 1, 1]: what follows the first miss of a pass does not count."""
    result = acceptance([whole(2), whole(1), whole(0)], 3)
    assert result.alpha == [2 / 3, 1 / 3, 0.0]
    assert result.conditional == [2 / 3, 1 / 2, 0.0]
    assert result.tau == 2.0 == pytest.approx(1 + sum(rate or 0.0 for rate in result.alpha))
    assert result.tau == pytest.approx(acceptance_length([rate or 0.0 for rate in result.conditional]))


def test_positions_that_were_not_offered_are_no_misses():
    result = acceptance([Pass(3, 3, 4), Pass(1, 1, 2), Pass(0, 0, 1)], 3)
    assert result.alpha == result.conditional == [1.0, 1.0, 1.0]
    assert (result.passes, result.tokens, result.tau) == (3, 7, 7 / 3)


def test_rates_without_any_case_are_none():
    result = acceptance([Pass(1, 0, 1)], 3)
    assert result.alpha == [0.0, None, None]
    assert result.conditional == [0.0, None, None]
    assert acceptance([], 2).tau is None
