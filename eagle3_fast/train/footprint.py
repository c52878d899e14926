"""Bytes that a training run holds on one GPU, as formulas of the draft's sizes; no tensor is made.

What rests between batches follows from the parameters and the ZeRO stage (`resting`). What a packed batch adds follows from the
code that runs: autograd keeps, per row and training-time-test step, the tensors that `_Rows` names after the lines of
`model.layers`, `model.elementwise` and `ops.ttt_attention` that need them again, and memory is fullest at one of the moments of
`moments`. Every row of the batch is taken for supervised, which no batch exceeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from eagle3_fast.config import DeepSpeedSection, RunConfig
from eagle3_fast.model.config import DraftConfig
from eagle3_fast.model.draft import Draft
from eagle3_fast.ops._chunks import CHUNK_ELEMENTS, CHUNK_ROWS, REFERENCE_ROWS
from eagle3_fast.ops._heads import PackedHead, packs
from eagle3_fast.train.optim import build_optimizers
from eagle3_fast.train.start import objective, trains_head

Stage = Literal[0, 1, 2, 3]

WIDE = 4
"""Bytes of float32, in which masters, moments and norms are."""
LARGEST_BUCKET = 500_000_000
"""Elements, DeepSpeed's own choice for the buffers from which it sends gradients, whatever the model's size."""
FIRST_PROJECTIONS = tuple(f"layers.0.self_attn.{part}_proj." for part in "qkv")
PLAIN_ROW_TENSORS = 6
"""[rows, vocabulary] tensors that the plain PyTorch row pass of `linear_divergence` holds beside the logits."""


@dataclass(frozen=True)
class Setting:
    """Where and how a draft is trained. item: bytes of the compute dtype."""

    device: Literal["cpu", "cuda"]
    item: Literal[2, 4]
    gpus: int
    stage: Stage
    recompute: bool
    accumulation: int

    @property
    def autocast(self) -> bool:
        """Float32 parameters under autocast; the other stages hold them in the compute dtype."""
        return self.stage == 0 and self.item < WIDE


@dataclass(frozen=True)
class Weights:
    """Elements of the draft's trained parameters and how many of them Muon and AdamW take; bytes of its frozen parts, by name."""

    trained: int
    frozen: dict[str, int]
    muon: int
    adamw: int
    largest: tuple[int, int]  # of the matrices that are trained
    first_projections: int  # q, k, v of the first layer, which are read in halves

    @property
    def frozen_bytes(self) -> int:
        return sum(self.frozen.values())


class Resting(NamedTuple):
    """Bytes held between packed batches. gathered: what ZeRO-3 adds while a batch is computed. host: of each rank, in host memory."""

    frozen: int
    parameters: int
    gathered: int
    gradients: int
    masters: int
    optimizer: int
    host: int


class Moment(NamedTuple):
    """Bytes of a packed batch's work at one moment of a step, beyond what rests and the gradients that rest."""

    name: str
    kept: int  # for the backward pass
    passing: int  # made and dropped again
    workspace: int  # chunks of the loss

    @property
    def total(self) -> int:
        return self.kept + self.passing + self.workspace


def weigh(draft: Draft, config: RunConfig, item: int) -> Weights:
    """Count a draft, which may lie on the meta device. Frozen parts are in the compute dtype, the verifier's norm in float32."""
    trained = {name: value for name, value in draft.named_parameters() if value.requires_grad}
    frozen = {
        name: value.numel() * (WIDE if name == "verifier_norm.weight" else item)
        for name, value in draft.named_parameters()
        if not value.requires_grad
    }
    frozen |= {name: value.numel() * value.element_size() for name, value in draft.named_buffers()}
    by_optimizer = {
        type(optimizer).__name__: sum(value.numel() for group in optimizer.param_groups for value in group["params"])
        for optimizer in build_optimizers(draft.named_parameters(), config.train.optimizer)
    }
    rows, columns = max((value.shape for value in trained.values() if value.ndim == 2), key=lambda shape: shape.numel())
    return Weights(
        trained=sum(value.numel() for value in trained.values()),
        frozen=frozen,
        muon=by_optimizer.get("Muon", 0),
        adamw=by_optimizer.get("AdamW", 0),
        largest=(rows, columns),
        first_projections=sum(
            value.numel() for name, value in trained.items() if name.startswith(FIRST_PROJECTIONS) and name.endswith("proj.weight")
        ),
    )


def reduce_bucket(trained: int) -> int:
    """Elements of a buffer from which gradients are sent: it need not hold more than there are."""
    return min(trained, LARGEST_BUCKET)


def resting(weights: Weights, setting: Setting, section: DeepSpeedSection) -> Resting:
    """What rests on each GPU: ZeRO splits masters and optimizer states from stage 1, gradients from 2, weights from 3."""
    stage, trained = setting.stage, weights.trained
    states = WIDE * (weights.muon + 2 * weights.adamw)
    if stage == 0:  # the parameters are the masters
        return Resting(weights.frozen_bytes, WIDE * trained, 0, WIDE * trained, 0, states, 0)
    share = _share(trained, setting.gpus)
    masters, states = WIDE * share, _share(states, setting.gpus)
    # Sums over micro-batches are float32; stage 1 sends them, the others send gradients in the compute dtype.
    sums = WIDE * (trained if stage == 1 else share)
    buckets = (
        (2 if section.overlap_communication and stage < 3 else 1) * reduce_bucket(trained) * (WIDE if stage == 1 else setting.item)
    )
    whole = setting.item * trained
    frozen, parameters, gathered = weights.frozen_bytes, whole, 0
    if stage == 3:
        frozen, parameters = _share(weights.frozen_bytes, setting.gpus), setting.item * share
        gathered = weights.frozen_bytes + whole
    if section.offload_optimizer:
        own = WIDE * share  # a rank's sums go with the masters
        return Resting(frozen, parameters, gathered, buckets + (sums if stage == 1 else 0), 0, 0, own + masters + states)
    return Resting(frozen, parameters, gathered, buckets + sums, masters, states, 0)


def _share(amount: int, ranks: int) -> int:
    return -(-amount // ranks)


def update_bytes(weights: Weights, setting: Setting) -> int:
    """What an optimizer step makes and drops: Muon orthogonalises one matrix at a time; the fused AdamW makes nothing."""
    if not weights.muon:
        return 0
    rows, columns = weights.largest
    item = 2 if setting.device == "cuda" else setting.item  # of Newton-Schulz, `train.muon`
    one = rows * columns * (WIDE + 2 * item) + 2 * min(rows, columns) ** 2 * item
    if setting.stage == 0:
        return one
    return one + 4 * WIDE * _share(weights.muon, setting.gpus)  # pieces sent and received, whole matrices, and the way back


class _Rows:
    """Bytes per row of a packed batch. `item` bytes an element unless float32 is named; a `keep_` lives until the backward pass."""

    def __init__(self, draft: DraftConfig, setting: Setting) -> None:
        layer = draft.transformer_layer_config
        self.setting, self.item, self.draft, self.layer = setting, setting.item, draft, layer
        self.hidden, self.inner, self.aux = layer.hidden_size, layer.intermediate_size, draft.num_aux * draft.verifier_hidden_size
        self.queries, self.keys = (heads * layer.head_dim for heads in (layer.num_attention_heads, layer.num_key_value_heads))

    @property
    def keep_input(self) -> int:
        """`Draft.fuse` and `Draft.embed`: the normed aux states, which are the batch's, token embeddings and these normed."""
        normed = self.draft.norm_before_fc or self.draft.fc_norm
        return self.item * ((self.aux if normed else 0) + 2 * self.hidden)

    @property
    def keep_attention(self) -> int:
        """One layer up to its attention: the norm's input and result, q, k, v, the output, lse, and what Qwen3 norms to q and k."""
        qk_norms = self.queries + self.keys if self.layer.model_type == "qwen3" else 0
        elements = 2 * self.hidden + qk_norms + 2 * self.queries + 2 * self.keys
        return self.item * elements + WIDE * self.layer.num_attention_heads

    @property
    def feed_forward(self) -> int:
        """The other half of a layer: its norm's input and result, gate, up, and silu(gate) * up."""
        return self.item * (2 * self.hidden + 3 * self.inner)

    @property
    def keep_feed_forward(self) -> int:
        return self.item * self.hidden if self.setting.recompute else self.feed_forward

    @property
    def feed_forward_backward(self) -> int:
        """At its fullest: the gradients of product, silu(gate) and up beside what is kept, less the product, which is dropped by then."""
        gradients = 2 * self.item * (self.inner + self.hidden)
        return gradients + (self.feed_forward - self.item * self.hidden if self.setting.recompute else 0)

    @property
    def rotary(self) -> int:
        """cos and sin, float32."""
        return 2 * WIDE * self.layer.head_dim

    @property
    def keep_step(self) -> int:
        """All layers of one step, and the norm before the head."""
        layers = self.layer.num_hidden_layers * (self.keep_attention + self.keep_feed_forward)
        return layers + self.rotary + self.item * self.hidden

    @property
    def keep_first_step(self) -> int:
        """Beyond `keep_step`: the last layer's input and rotary table again, trimmed to the active rows."""
        return self.item * self.hidden + self.rotary

    @property
    def embedding_share(self) -> int:
        """Token embeddings projected for all steps; their gradient is as large."""
        return self.item * (self.queries + 2 * self.keys)

    def attention_backward(self, steps: int) -> int:
        """Gradients of q, of the keys and values of all steps, and of the output; on CPUs in float32, with own keys spread over heads."""
        gradients = self.queries + 2 * self.keys * steps
        if self.setting.device == "cuda":
            return self.item * (gradients + self.queries)
        return WIDE * (gradients + 4 * self.queries) + self.item * self.queries


def batch_bytes(draft: DraftConfig, config: RunConfig, setting: Setting) -> int:
    """The packed batches at hand: states and five int64 a row. A GPU holds one at a time, host memory a whole window."""
    row = setting.item * (draft.num_aux + 1) * draft.verifier_hidden_size + 4 * 8
    return config.train.data.total_seq_len * row * (setting.accumulation if setting.device == "cpu" else 1)


def moments(draft: DraftConfig, weights: Weights, config: RunConfig, setting: Setting) -> list[Moment]:
    """The moments of a packed batch at which memory can be fullest."""
    rows, size, steps = _Rows(draft, setting), config.train.data.total_seq_len, config.train.loss.ttt_steps
    head = _head_gradients(draft, config)
    before = rows.keep_input + rows.keep_first_step  # per row, of the whole batch
    casts = _autocast_copies(draft, weights, steps) if setting.autocast else 0
    kept = casts + size * (before + steps * rows.keep_step)
    head_rows = size * steps * rows.item * rows.hidden
    # The sweep of the loss: rows for the head by step and joined, their gradient, verifier rows, and what `Unroll` still holds.
    held = size * (rows.embedding_share + rows.item * (rows.hidden + draft.verifier_hidden_size))
    sweep = Moment("loss", kept, 3 * head_rows + held + head, workspace_bytes(draft, config, setting))
    # Backwards through the last step: only its own gradients are on their way.
    final_norm = size * rows.item * rows.hidden
    last = Moment("backward pass, last step", kept - final_norm, head_rows + head + size * rows.feed_forward_backward, 0)
    attention = Moment(
        "backward pass, attention of the last step",
        kept - final_norm - size * rows.keep_feed_forward,
        head_rows + head + size * (rows.attention_backward(steps) + 2 * rows.item * rows.hidden),
        0,
    )
    if steps == 1:
        return [sweep, last, attention]
    # One step further: gradients of every weight but fc's, of the embeddings' share, and of keys and values of all earlier steps.
    on_the_way = size * (rows.embedding_share + rows.item * 2 * rows.keys * (steps - 1))
    on_the_way += gradients_on_the_way(weights, setting, rows.aux * rows.hidden)
    older, on_the_way = kept - final_norm - size * rows.keep_step, on_the_way + head_rows + head
    one_less = size * rows.item * rows.inner  # only the product's gradient is there yet
    backward = size * rows.feed_forward_backward
    before_last = Moment("backward pass, last step but one", older, on_the_way + backward, 0)
    adding = Moment(
        "backward pass, adding to a weight's gradient",
        older,
        on_the_way + backward - one_less + 2 * rows.item * rows.hidden * rows.inner,  # what is added, and the sum
        0,
    )
    return [sweep, last, attention, before_last, adding]


def gradients_on_the_way(weights: Weights, setting: Setting, used_once: int) -> int:
    """A weight serves every step, so autograd holds its gradient whole until the first step has added to it.

    Where no gradient rests yet, it is the one that will. used_once: elements of weights that do not serve every step.
    """
    if setting.stage == 0 and setting.accumulation == 1:
        return 0
    halves = weights.first_projections  # autocast casts each half anew and adds their gradients up in float32
    return setting.item * (weights.trained - used_once) + (halves * (WIDE - setting.item) if setting.autocast else 0)


def _autocast_copies(draft: DraftConfig, weights: Weights, steps: int) -> int:
    """bfloat16 copies of float32 weights, kept for the backward pass: one each, but of the first projections' halves one a use."""
    return 2 * (weights.trained - weights.first_projections) + weights.first_projections * (steps + 1)


def _head_gradients(draft: DraftConfig, config: RunConfig) -> int:
    """Gradients of a trained head, float32, formed by each call of the loss: one a step where a step reads the draft's own tokens."""
    if not trains_head(config):
        return 0
    calls = 1 if objective(config).teacher_forced else config.train.loss.ttt_steps
    return calls * WIDE * draft.draft_vocab_size * draft.transformer_layer_config.hidden_size


def workspace_bytes(draft: DraftConfig, config: RunConfig, setting: Setting) -> int:
    """One chunk of `linear_divergence` (`ops._chunks`): logits of draft and verifier rows, the rows themselves, and their gradient."""
    vocabulary, hidden, steps = draft.draft_vocab_size, draft.transformer_layer_config.hidden_size, config.train.loss.ttt_steps
    plain, item = config.ops.impl == "reference", _logit_item(config, setting)
    forced = objective(config).teacher_forced
    fewest, most = CHUNK_ROWS[setting.device]
    head_packed = _packs_heads(config, setting) and not trains_head(config)
    elements = CHUNK_ELEMENTS["packed" if head_packed else setting.device]
    chunk = REFERENCE_ROWS if plain else max(fewest, min(most, elements // vocabulary))
    chunk = min(chunk, config.train.data.total_seq_len * (steps if forced else 1))
    targets = min(chunk, -(-chunk // steps) + 1) if forced else chunk
    logits = item * (chunk + targets) * vocabulary + (PLAIN_ROW_TENSORS * item * chunk * vocabulary if plain else 0)
    taken = item * (chunk * hidden + targets * draft.verifier_hidden_size)
    centred = config.ops.logits == "centred" and item == 2  # products of rows and head entries, in float32
    formed = chunk * hidden * (3 * WIDE + item if centred else item)
    heads = 0 if item == setting.item else item * vocabulary * (hidden + draft.verifier_hidden_size)
    return logits + taken + formed + heads


def packed_head_bytes(draft: DraftConfig, config: RunConfig, setting: Setting) -> int:
    """Copies of frozen heads that a CPU keeps (`ops._heads`): the verifier's for its logits, the draft's for its own and for gradients."""
    if not _packs_heads(config, setting):
        return 0
    hidden = draft.transformer_layer_config.hidden_size
    columns = draft.verifier_hidden_size + PackedHead.SPARE
    if not trains_head(config):
        columns += 2 * hidden + PackedHead.SPARE
    return setting.item * draft.draft_vocab_size * columns


def _packs_heads(config: RunConfig, setting: Setting) -> bool:
    here = setting.device == "cpu" and setting.stage < 3
    return here and _logit_item(config, setting) == 2 and packs(torch.bfloat16)


def _logit_item(config: RunConfig, setting: Setting) -> int:
    return WIDE if config.ops.impl == "reference" or config.ops.logits == "float32" else setting.item
