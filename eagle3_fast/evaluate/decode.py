"""Lossless decoding of one prompt, with drafts or without, by one and the same loop.

A pass gives the verifier the last token of the text and the drafts that follow it; it answers with logits after each of
them. The accepted drafts and one token of the verifier's own go to the text, the verifier's cache forgets the rest, and the
drafter takes in what is new. Without drafts this is plain decoding.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from eagle3_fast.evaluate.acceptance import Pass
from eagle3_fast.evaluate.choice import Choice, Proposal
from eagle3_fast.evaluate.drafter import Drafter
from eagle3_fast.extract.verifier import Verifier
from eagle3_fast.model.draft import Draft


@dataclass
class Decoded:
    """The text after a prompt. The pass over the prompt gives its first token and counts neither as a pass nor in `seconds`."""

    tokens: list[int]  # an end token, if one came, is the last
    passes: list[Pass] = field(default_factory=list)
    seconds: float = 0.0  # from the first token to the last, both models' work on the prompt left out

    @property
    def passed_tokens(self) -> int:
        """Tokens that `seconds` were spent on."""
        return len(self.tokens) - 1


class Proposer(Protocol):
    """What the loop asks of a drafter."""

    def confirm(self, token_ids_N: Tensor, aux_NF: Tensor) -> None:
        """Take in aux hidden states of the next N tokens of the text, each with the token that follows it."""

    def propose(self, count: int) -> Proposal:
        """`count` tokens to follow the text."""


class Silent:
    """Never proposes anything: plain decoding."""

    def __init__(self, device: str) -> None:
        self.nothing = Proposal(torch.empty(0, dtype=torch.int64, device=device), [])

    def confirm(self, token_ids_N: Tensor, aux_NF: Tensor) -> None:
        pass

    def propose(self, count: int) -> Proposal:
        return self.nothing


def plain_decode(
    verifier: Verifier, prompt: Sequence[int], max_new_tokens: int, choose: Choice, stop_ids: Collection[int] = ()
) -> Decoded:
    """The verifier's own text after `prompt` (at least one token), up to `max_new_tokens` tokens or an id of `stop_ids`."""
    return decode(verifier, Silent(verifier.device), prompt, max_new_tokens, choose, stop_ids)


def speculative_decode(
    verifier: Verifier,
    draft: Draft,
    prompt: Sequence[int],
    draft_tokens: int,
    max_new_tokens: int,
    choose: Choice,
    stop_ids: Collection[int] = (),
) -> Decoded:
    """The same text (greedy), or text of the same distribution (sampling), with `draft_tokens` drafts offered to each pass.

    `draft` must be on the verifier's device.
    """
    drafter = Drafter(draft, choose, len(prompt) + max_new_tokens)
    return decode(verifier, drafter, prompt, max_new_tokens, choose, stop_ids, draft_tokens)


@torch.inference_mode()
def decode(
    verifier: Verifier,
    proposer: Proposer,
    prompt: Sequence[int],
    max_new_tokens: int,
    choose: Choice,
    stop_ids: Collection[int] = (),
    draft_tokens: int = 0,
) -> Decoded:
    """Decode after `prompt` with whatever `proposer` proposes; no pass offers more drafts than the text can still take."""
    cache = verifier.new_cache()
    prompt_ids = torch.tensor(prompt, dtype=torch.int64, device=verifier.device)
    logits, states = verifier.forward_cached(prompt_ids[None], cache)
    last = choose.draw(logits[-1])[0][None]
    proposer.confirm(torch.cat((prompt_ids[1:], last)), _aux(states))
    text = Decoded(last.tolist())
    started, room = _now(verifier.device), _room(text, max_new_tokens, stop_ids)
    while room:
        proposal = proposer.propose(min(draft_tokens, room - 1))
        logits, states = verifier.forward_cached(torch.cat((last, proposal.ids))[None], cache)
        accepted, following = choose.verify(logits, proposal)
        last = following[None]
        new = torch.cat((proposal.ids[:accepted], last))
        verifier.crop(cache, len(prompt) + len(text.tokens) + accepted)
        _append(text, new.tolist(), len(proposal.ids), stop_ids)
        room = _room(text, max_new_tokens, stop_ids)
        if room > 1:
            proposer.confirm(new, _aux(states[: accepted + 1]))
    text.seconds = _now(verifier.device) - started
    return text


def _room(text: Decoded, max_new_tokens: int, stop_ids: Collection[int]) -> int:
    """How many tokens the text can still take."""
    return 0 if text.tokens[-1] in stop_ids else max_new_tokens - len(text.tokens)


def _append(text: Decoded, new: list[int], offered: int, stop_ids: Collection[int]) -> None:
    """Add the accepted drafts and the verifier's token, up to the first end token; drafts beyond one were never on offer."""
    end = next((index + 1 for index, token in enumerate(new) if token in stop_ids), len(new))
    accepted = min(end, len(new) - 1)
    text.passes.append(Pass(offered if end == len(new) else end, accepted, end))
    text.tokens += new[:end]


def _aux(states: Tensor) -> Tensor:
    """[n, n_aux + 1, G] without the last hidden state, as [n, F]."""
    return states[:, :-1].flatten(1)


def _now(device: str) -> float:
    """Seconds; work queued on a GPU is done by then."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()
