"""Who plays in the decoding tests: drafts of many kinds, a drafter with a known hit pattern, a verifier that is a table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eagle3_fast.evaluate.choice import Greedy, Proposal
from eagle3_fast.evaluate.drafter import Drafter
from eagle3_fast.model.config import DraftConfig
from eagle3_fast.model.draft import Draft
from tests.export.drafts import draft_config, map_vocabulary
from tests.verifiers import VOCAB

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "num_hidden_layers": 2}

DRAFTS: dict[str, Callable[[], DraftConfig]] = {
    "default": lambda: draft_config(),
    "raw output": lambda: draft_config(norm_output=False),
    "release 0.3": lambda: draft_config(norm_before_residual=False, norm_before_fc=False, norm_output=False),
    "fc_norm": lambda: draft_config(norm_before_fc=False, fc_norm=True),
    "two layers": lambda: draft_config({"num_hidden_layers": 2}),
    "window": lambda: draft_config({"layer_types": ["sliding_attention"], "sliding_window": 5}),
    "two windows": lambda: draft_config(SLIDING | {"layer_types": ["sliding_attention"] * 2}, norm_output=False),
    "qwen3, mixed layers": lambda: draft_config(SLIDING | {"model_type": "qwen3"}),
    "full vocabulary": lambda: draft_config(draft_vocab_size=VOCAB),
    "wide heads": lambda: draft_config({"hidden_size": 40, "head_dim": 16}, target_hidden_size=32),
    "biases": lambda: draft_config({"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
}


class Rigged(Drafter):
    """Runs the draft, then proposes tokens of `text` (the verifier's), wrong ones where `wrong(index in text)` says so."""

    def __init__(self, draft: Draft, prompt: list[int], text: list[int], wrong: Callable[[int], bool]) -> None:
        super().__init__(draft, Greedy(), len(prompt) + len(text))
        self.start, self.text, self.wrong = len(prompt) - 1, text, wrong

    def propose(self, count: int) -> Proposal:
        super().propose(count)
        next_token = self.cache.rows - self.start
        ids = [(self.text[i] + self.wrong(i)) % VOCAB for i in range(next_token, next_token + count)]
        return Proposal(torch.tensor(ids, dtype=torch.int64), [])


class TableVerifier:
    """A verifier whose next token depends on the last two by a table of logits [V, V, V]; its cache is a list of tokens."""

    device = "cpu"

    def __init__(self, vocab_size: int, hidden_size: int, num_aux: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(vocab_size, vocab_size, vocab_size, generator=generator)
        self.states = torch.randn(vocab_size, num_aux + 1, hidden_size, generator=generator)
        self.widths: list[int] = []

    def new_cache(self) -> list[int]:
        return []

    def forward_cached(self, input_ids: Tensor, cache: list[int]) -> tuple[Tensor, Tensor]:
        before = len(cache)
        cache += input_ids[0].tolist()
        self.widths.append(len(cache) - before)
        tokens = torch.tensor(cache[:1] + cache)
        return self.logits[tokens[:-1], tokens[1:]][before:], self.states[input_ids[0]]

    @staticmethod
    def crop(cache: list[int], length: int) -> None:
        assert len(cache) >= length
        del cache[length:]


def table_draft(vocab_size: int, draft_vocab_size: int) -> Draft:
    """A random draft for `TableVerifier(vocab_size, 32, 3)`; a reduced vocabulary is the last ids of the verifier's."""
    draft = Draft(draft_config({"vocab_size": vocab_size}, draft_vocab_size=draft_vocab_size))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    if draft.config.reduced_vocab:
        map_vocabulary(draft, torch.arange(vocab_size - draft_vocab_size, vocab_size))
    return draft
