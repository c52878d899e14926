"""The draft at work: it follows the verifier's text and proposes what comes next (contract, sections 3.1 and 9.1).

Row i reads token i + 1 together with the verifier's aux hidden states of token i, as in training. A *confirmed* row was
computed from tokens and states of the verifier, as at TTT step 0, and its keys and values stay. From the last confirmed row
a *chain* goes on with the draft's own tokens and hidden states, as at TTT steps 1, 2, ...: it sees the confirmed rows that
its first row saw, and its own keys. When the verifier has judged the chain, the accepted tokens become confirmed rows with
the verifier's states, and the chain's own keys are forgotten.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3_fast.errors import InputError
from eagle3_fast.evaluate.choice import Choice, Proposal
from eagle3_fast.model.draft import Draft
from eagle3_fast.model.layers import Attend
from eagle3_fast.ops import ttt_attention


class DraftCache:
    """Keys and values of one text, per layer: of confirmed rows (room for `capacity`), and of the chain in work."""

    def __init__(self, draft: Draft, capacity: int) -> None:
        layer, weight = draft.config.transformer_layer_config, draft.fc.weight
        self.windows = [layer.window(index) for index in range(layer.num_hidden_layers)]
        shape = (2, capacity, layer.num_key_value_heads, layer.head_dim)
        self.confirmed = [torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in self.windows]
        self.own: list[tuple[list[Tensor], list[Tensor]]] = []
        self.rows = 0

    def confirming(self, count: int) -> list[Attend]:
        """Attention of the next `count` rows, one function a layer; their keys and values are kept, the chain is forgotten."""
        first, self.rows = self.rows, self.rows + count
        self.own = [([], []) for _ in self.windows]
        return [partial(self._confirm, layer, first) for layer in range(len(self.windows))]

    def chaining(self) -> list[Attend]:
        """Attention of the chain's next step, which continues the last confirmed row."""
        return [partial(self._chain, layer) for layer in range(len(self.windows))]

    def _confirm(self, layer: int, first: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.confirmed[layer][:, : self.rows]
        keys[first:], values[first:] = k, v
        return ttt_attention(q, keys, values, self._key_range(layer, len(q)), [], [], [], q.shape[-1] ** -0.5)

    def _chain(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.confirmed[layer][:, : self.rows]
        own_k, own_v = self.own[layer]
        own_k.append(k)
        own_v.append(v)
        own_rows = [torch.zeros(1, dtype=torch.int32, device=q.device)] * len(own_k)  # the chain has one row
        return ttt_attention(q, keys, values, self._key_range(layer, 1), own_k, own_v, own_rows, q.shape[-1] ** -0.5)

    def _key_range(self, layer: int, count: int) -> Tensor:
        """int32 [count, 2]: each of the last `count` confirmed rows sees itself and the rows before it in its window."""
        end = torch.arange(self.rows - count + 1, self.rows + 1, dtype=torch.int32, device=self.confirmed[layer].device)
        window = self.windows[layer] or self.rows
        return torch.stack(((end - window).clamp_min(0), end), dim=1)


class Drafter:
    """Drafts for one text of at most `capacity` tokens."""

    def __init__(self, draft: Draft, choose: Choice, capacity: int) -> None:
        self.draft, self.choose = draft, choose
        self.cache = DraftCache(draft, capacity)
        self.verifier_ids = verifier_ids(draft)
        self.normed = self.hidden = draft.fc.weight.new_empty(0)

    def confirm(self, token_ids_N: Tensor, aux_NF: Tensor) -> None:
        """Take in the verifier's text: aux hidden states of N tokens in order, each with the token that follows it (int64)."""
        first, count = self.cache.rows, len(token_ids_N)
        positions = torch.arange(first + 1, first + count + 1, device=token_ids_N.device)
        last = positions.new_tensor([count - 1])
        hidden = self.draft.fuse(aux_NF.to(self.draft.fc.weight.dtype))
        self.normed, self.hidden = self.draft.step(
            self.draft.embed(token_ids_N), hidden, positions, self.cache.confirming(count), last
        )

    def propose(self, count: int) -> Proposal:
        """Up to `count` tokens to follow the confirmed text. Call once after each `confirm`."""
        ids: list[Tensor] = []
        probabilities: list[Tensor] = []
        normed, hidden = self.normed, self.hidden
        for step in range(count):
            if step > 0:
                position = ids[-1].new_full((1,), self.cache.rows + step)
                normed, hidden = self.draft.step(self.draft.embed(ids[-1][None]), hidden, position, self.cache.chaining())
            picked, distribution = self.choose.draw(F.linear(normed, self.draft.lm_head.weight)[0].float())
            ids.append(self.verifier_ids[picked])
            if distribution is not None:
                probabilities.append(self._spread(distribution))
        return Proposal(torch.stack(ids) if ids else self.verifier_ids[:0], probabilities)

    def _spread(self, distribution: Tensor) -> Tensor:
        """A distribution over the draft vocabulary as one over the verifier's, 0 at tokens that the draft cannot propose."""
        whole = distribution.new_zeros(self.draft.config.verifier_vocab_size)
        return whole.index_copy_(0, self.verifier_ids, distribution)


def verifier_ids(draft: Draft) -> Tensor:
    """int64 [V]: the verifier's id of every draft id."""
    return draft.verifier_id(torch.arange(draft.config.draft_vocab_size, device=draft.fc.weight.device))


def check_vocabulary(draft: Draft, where: str) -> None:
    """Raise InputError unless d2t and t2d of a draft with a reduced vocabulary say the same."""
    if draft.config.reduced_vocab and not torch.equal(verifier_ids(draft), draft.get_buffer("t2d").nonzero().squeeze(1)):
        raise InputError(f"{where}: d2t and t2d do not describe the same draft vocabulary; export the draft again")
