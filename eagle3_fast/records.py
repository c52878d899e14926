"""The records that flow through a run. Read this file first.

A run is a list of verbs; each verb reads files, writes files, and passes these records:

    prepare:  Conversation -> TokenizedExample       (Arrow folder)
    extract:  TokenizedExample -> HiddenStates       (one hs_{row}.safetensors per example)
    train:    HiddenStates -> PackedBatch -> TTTOutput

Shape suffixes, used for tensor arguments of ops, reference and model code:

    S  rows of a packed batch                 T  keys of TTT step 0 (= S in training)
    N  query rows given to attention          M  draft rows given to the loss (all TTT steps stacked)
    R  verifier rows given to the loss        H  draft hidden size        G  verifier hidden size
    V  draft vocabulary                       D  head_dim                 Q / K  query / key-value heads
    F  aux features (number of aux hidden states x verifier hidden size)  E  weighted terms of a compound loss
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Message:
    """One turn of a chat. `reasoning` is the thinking that some verifiers emit before their reply."""

    role: str  # "system", "user", "assistant" or "tool"
    content: str
    reasoning: str | None = None


@dataclass(frozen=True)
class Conversation:
    """A chat as its source gave it, in one form whatever the source's form was."""

    messages: tuple[Message, ...]
    source: str  # "file:row", named in messages about this conversation


@dataclass(frozen=True)
class TokenizedExample:
    """One training row: token ids and which of them are supervised (1) or not (0). Equal lengths."""

    input_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True)
class HiddenStates:
    """What the verifier computed for one example of T tokens.

    `states` is [T, n_aux + 1, G] in the verifier's dtype: aux hidden states in ascending layer id, then the last hidden state,
    taken before the verifier's final norm; after it in old `.pt` samples of format 0.
    """

    token_ids: Tensor
    states: Tensor


@dataclass(frozen=True)
class PackedBatch:
    """Several documents on one row axis of fixed length S.

    Row i of a document holds token i + 1 as its input, the aux hidden states of token i, and the last hidden state of token
    i + 1, which predicts token i + 2 (contract of speculators, section 3.1).
    """

    input_ids: Tensor  # int64 [S], 0 in padding
    aux_hidden_states: Tensor  # [S, F]
    last_hidden_states: Tensor  # [S, G]
    loss_mask: Tensor  # int64 [S], 1 = this row's token is supervised
    position_ids: Tensor  # int64 [S], 1, 2, ... in each document, 0 in padding
    document_ids: Tensor  # int64 [S], 0, 1, ... in order, -1 in padding
    skipped: tuple[str, ...] = field(default=())  # samples that could not be used, each with its reason

    def to(self, device: str) -> PackedBatch:
        """The same batch on `device`; a GPU fetches it from pinned memory while it computes."""
        tensors = {name: value for name, value in vars(self).items() if hasattr(value, "to")}
        if device != "cpu":
            tensors = {name: value.pin_memory() for name, value in tensors.items()}
        move = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        return PackedBatch(**move, skipped=self.skipped)


@dataclass(frozen=True)
class TTTOutput:
    """Loss and counts of one packed batch. Everything but `loss` is without gradient.

    `K` is the number of TTT steps. Sums and counts are kept apart so that batches and ranks can be added before dividing.
    """

    loss: Tensor  # scalar, differentiable
    step_losses: Tensor  # [K], decayed, each already divided by its divisor; they add up to `loss`
    term_losses: Tensor  # [K, E], decayed, divided, not multiplied by the term's weight
    full_correct: Tensor  # [K] rows whose steps 0..k are all right, among supervised rows
    supervised: Tensor  # [K] supervised rows of step k
    cond_total: Tensor  # [K] rows whose steps 0..k-1 are all right (speculators' denominator)
    marginal_correct: Tensor  # [K] rows right at step k, whatever the steps before
    draft_tokens: tuple[Tensor, ...] = ()  # K x int64 [S], draft-vocabulary ids; -1 where the row was not computed
