"""Do the stored last states lie before the verifier's final norm, as the run takes them? Asked of a few tokens, before step 1.

The final norm makes of a state x the state y = x / RMS(x) * gain. So y / gain has an RMS of 1, whatever the token: that is how normed
states are known, from the gain alone. Tolerance: the norm's epsilon and two roundings to bfloat16 change that RMS by less than 1 %
(epsilon: while RMS(x) is above 8 roots of it); float8, whose scale serves all layers of a token, changes it by less than 2 % at most
tokens (SmolLM2: 0.970 to 1.020, in bfloat16 0.998 to 1.002). States before the norm have an RMS over gain that differs from token to
token and has no reason to be 1 (SmolLM2: 13 to 334). So a row counts as normed when most of its tokens are within 2 % of 1: a model's
states would have to be of one size, and that size the gain's, for the check to err. Where a family's gain is 1 + w, that is divided by.
A channel whose gain is exactly 0 tells nothing, and with one the RMS is not known: then nothing is checked, and the log says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.extract.store import SampleError
from eagle3_fast.extract.weights import verifier_weights
from eagle3_fast.log import logger
from eagle3_fast.train.loader import PackedRows

CHECKED_ROWS = 8
CHECKED_TOKENS = 32
TOLERANCE = 0.02


def check_norm_rule(config: RunConfig, rows: PackedRows, applied: bool) -> None:
    """Raise InputError where last states lie on the other side of the final norm than the run takes them, or on both sides.

    applied: whether the run passes last states through the norm. Reads the first tokens of a few rows and one vector of the verifier;
    rows that cannot be read are left to the run. Where the run file itself says verifier_norm false, states before the norm are taken.
    """
    section = config.train.verifier
    gain = verifier_weights(section.verifier_name_or_path, names=("norm",), trust_remote_code=section.trust_remote_code).norm
    if not gain.all():
        logger.info("the verifier's final norm has a gain of 0: whether stored states are normed cannot be told")
        return
    after: list[str] = []
    before = ["what this run computes lies before the verifier's final norm"] if rows.computes else []
    for name, last in _first_states(rows).items():
        share = normed_share(last, gain)
        side = "after the verifier's final norm" if share > 0.5 else "before the verifier's final norm, or are another verifier's"
        where = f"{name}: its last states lie {side} (over its gain, {share:.0%} of them have RMS 1)"
        (after if share > 0.5 else before).append(where)
    if after and before:
        raise InputError(
            f"{after[0]}, while {before[0]}; states of one kind are needed: extract again, without generation.on_missing generate"
        )
    if after and applied:
        raise InputError(
            f"{after[0]}, and this run would norm them again; set engine.verifier_norm to false (--data-format-version 0 for samples "
            "that hold `target`)"
        )
    if before and not applied and config.engine.verifier_norm is None:
        why = "engine.compat is 0.3" if config.engine.data_format_version else "engine.data_format_version is 0"
        raise InputError(
            f"{before[0]}, and this run would not norm them, since {why}; set engine.verifier_norm to true, or to false for what "
            "speculators 0.3 made of such states"
        )


def normed_share(last: Tensor, gain: Tensor) -> float:
    """Share of the states [t, G] whose RMS over the gain [G] is 1."""
    rms = (last.float() / gain).square().mean(-1).sqrt()
    return float(((rms - 1).abs() <= TOLERANCE).float().mean())


def _first_states(rows: PackedRows) -> dict[str, Tensor]:
    """[t, G] of the first tokens of rows spread evenly over the dataset, by a name for messages."""
    found: dict[str, Tensor] = {}
    count = len(rows.rows)
    for row in range(0, count, max(count // CHECKED_ROWS, 1))[:CHECKED_ROWS] if rows.stored else ():
        assert rows.stored is not None
        try:
            last = rows.stored.last_states(row, CHECKED_TOKENS)
        except SampleError:
            continue
        if len(last) and last.shape[-1] == rows.draft_config.verifier_hidden_size and torch.isfinite(last).all():
            found[rows.stored.name(row)] = last
    return found
