"""Who computes what `extract` stores: the verifier in this process, or a vLLM server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from eagle3_fast.endpoint import EndpointError, in_flight
from eagle3_fast.extract.self_check import Testimony, decided_argmax
from eagle3_fast.extract.sources import OnlineStates
from eagle3_fast.extract.store import SampleError
from eagle3_fast.extract.vllm_states import VllmStates
from eagle3_fast.extract.weights import VerifierWeights
from eagle3_fast.precision import arithmetic_dtype
from eagle3_fast.records import HiddenStates

LOGIT_TOLERANCE = 0.1
"""Relative (root mean square) distance of logits from the verifier's: bfloat16 is below 0.02, a wrong scale beyond 0.5."""
LOGPROB_TOLERANCE = 0.25
"""The same for the log-probabilities of the two most likely tokens, which are smaller than logits and as uncertain."""

Write = Callable[[int, HiddenStates], None]


class Backend(Protocol):
    """`dtype` is what the verifier computes in."""

    dtype: torch.dtype

    def testify(self, prefixes: Sequence[Tensor], weights: VerifierWeights) -> Testimony:
        """States of each prefix, int64 [T], and what the verifier itself says there."""

    def store(self, rows: Sequence[int], lengths: Sequence[int], write: Write) -> Iterator[tuple[int, SampleError | None]]:
        """Give `write` the states of every row, in any order. Yields each row, with what made it unusable, if anything did."""


class InProcess:
    """The verifier in this process, `batch_tokens` tokens a forward pass."""

    def __init__(self, source: OnlineStates, batch_tokens: int) -> None:
        self.source, self.verifier, self.batch_tokens = source, source.verifier, batch_tokens
        self.dtype = self.verifier.dtype

    def testify(self, prefixes: Sequence[Tensor], weights: VerifierWeights) -> Testimony:
        """The verifier is run whole, one prefix at a time."""
        samples = [HiddenStates(*pair) for pair in zip(prefixes, self.verifier.hidden_states(prefixes), strict=True)]
        expected: list[Tensor] = []
        squared_difference = squared_size = 0.0
        for sample in samples:  # one row of logits over the vocabulary at a time
            theirs, ours = self.verifier.logits(sample.token_ids), weights.logits(sample.states[:, -1])
            squared_difference += float((ours - theirs).square().sum())
            squared_size += float(theirs.square().sum())
            expected.append(decided_argmax(theirs, self.verifier.state_dtype))
        return Testimony(samples, expected, (squared_difference / squared_size) ** 0.5, LOGIT_TOLERANCE)

    def store(self, rows: Sequence[int], lengths: Sequence[int], write: Write) -> Iterator[tuple[int, SampleError | None]]:
        for batch in batches(rows, lengths, self.batch_tokens):
            for row, sample in zip(batch, self.source.load_many(batch), strict=True):
                write(row, sample)
                yield row, None


class Served:
    """A vLLM server, many requests in flight. A row that it cannot give is left out."""

    def __init__(self, source: VllmStates) -> None:
        self.source = source
        self.dtype = arithmetic_dtype(source.dtype, "cpu")

    def testify(self, prefixes: Sequence[Tensor], weights: VerifierWeights) -> Testimony:
        """The server tells the two most likely successors of each token with its log-probabilities; of the last token it does not."""
        samples: list[HiddenStates] = []
        expected: list[Tensor] = []
        squared_difference = squared_size = 0.0
        for number, ids in enumerate(prefixes):
            states, completion = self.source.ask(f"prefix {number} of the self-check", ids, prompt_logprobs=2)
            told = completion.most_likely()
            if told is None:
                raise EndpointError(f"{self.source.endpoint.url}: gives no prompt_logprobs, by which its hidden states are checked")
            top, theirs = told
            logits = weights.logits(states[: len(top), -1])
            ours = logits.log_softmax(-1).gather(1, top)
            squared_difference += float((ours - theirs).square().sum())
            squared_size += float(theirs.square().sum())
            rounding = torch.finfo(self.source.dtype).eps * logits.abs().amax(-1)
            expected.append(torch.where(theirs[:, 0] - theirs[:, 1] > rounding, top[:, 0], -1))
            samples.append(HiddenStates(ids, states))
        distance = (squared_difference / squared_size) ** 0.5 if squared_size else 0.0  # prefixes of one token
        return Testimony(samples, expected, distance, LOGPROB_TOLERANCE)

    def store(self, rows: Sequence[int], lengths: Sequence[int], write: Write) -> Iterator[tuple[int, SampleError | None]]:
        longest_first = iter(sorted(rows, key=lambda row: -lengths[row]))
        asked = in_flight(lambda row: write(row, self.source.load(row)), longest_first, self.source.concurrency, _of_one_row)
        return ((row, error if isinstance(error := future.exception(), SampleError) else None) for row, future in asked)


def _of_one_row(error: BaseException) -> bool:
    return isinstance(error, SampleError)


def batches(rows: Iterable[int], lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Rows of like length together, the longest first: at most `batch_tokens` tokens with padding, or one longer row alone."""
    batch: list[int] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
