"""Building blocks of the draft: RMSNorm, rotary table, attention projections, SwiGLU, and the draft layer (contract, section 2.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3_fast.model.config import LayerConfig
from eagle3_fast.model.elementwise import rms_norm, swiglu

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Turns q [N, Q, D], k and v [rows, K, D] of a layer into its attention output [N, Q, D]; who calls the layer decides who sees whom."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class RotaryTable(LlamaRotaryEmbedding):
    """cos and sin of positions, from transformers' own tables for every rope type; partial rotary factors cover the leading channels."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__(
            LlamaConfig(
                hidden_size=config.num_attention_heads * config.head_dim,  # transformers asks for a multiple; only head_dim counts
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters),
            )
        )

    @staticmethod
    def compute_default_rope_parameters(config: Any, **_: Any) -> tuple[Tensor, float]:
        rope = config.rope_parameters
        width = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width), 1.0

    def forward(self, position_ids_N: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [N, rotary channels] in float32."""
        anchor = torch.empty((), dtype=torch.float32, device=position_ids_N.device)
        cos, sin = super().forward(anchor, position_ids_N[None])
        return cos[0], sin[0]


def rotate(x_NQD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Apply a rotary table to the leading channels of every head, halves paired (neox layout)."""
    cos, sin = (part[:, None] for part in rotary)
    width = cos.shape[-1]
    turned, kept = x_NQD[..., :width], x_NQD[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = (turned * cos + torch.cat((-second, first), dim=-1) * sin).to(x_NQD.dtype)
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


class EmbeddingShare(NamedTuple):
    """What the token embeddings add to the first layer's projections, biases included: q [N, Q D], k and v [N, K D].

    The projections are linear in (embedding, hidden state), and step k of training-time test reads the tokens of step 0 shifted by
    k: the embeddings' share is computed once and gathered by every step.
    """

    q: Tensor
    k: Tensor
    v: Tensor

    def take(self, index: Tensor) -> EmbeddingShare:
        """The rows named by `index`."""
        return EmbeddingShare(self.q[index], self.k[index], self.v[index])


class Attention(nn.Module):
    """Projections of one layer; `input_size` is 2H in the first layer (token embedding beside hidden state), H in the others."""

    def __init__(self, config: LayerConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        bias = config.attention_bias
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=bias)
        self.k_proj = nn.Linear(input_size, keys, bias=bias)
        self.v_proj = nn.Linear(input_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        normed = config.model_type == "qwen3"
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()

    def embedding_share(self, embeds_NH: Tensor) -> EmbeddingShare:
        """The leading half of the first layer's input, projected."""
        size = embeds_NH.shape[-1]
        parts = (F.linear(embeds_NH, part.weight[:, :size], part.bias) for part in (self.q_proj, self.k_proj, self.v_proj))
        return EmbeddingShare(*parts)

    def queries(self, x_NH: Tensor, rotary: tuple[Tensor, Tensor], share: Tensor | None) -> Tensor:
        """[N, H] -> [N, Q, D]; `share` is the embeddings' in the first layer."""
        return rotate(self.q_norm(self._heads(self.q_proj, x_NH, share)), rotary)

    def keys_values(
        self, x_NH: Tensor, rotary: tuple[Tensor, Tensor], share_k: Tensor | None, share_v: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """[N, H] -> two of [N, K, D]"""
        keys = rotate(self.k_norm(self._heads(self.k_proj, x_NH, share_k)), rotary)
        return keys, self._heads(self.v_proj, x_NH, share_v)

    def _heads(self, projection: nn.Linear, x_NH: Tensor, share: Tensor | None) -> Tensor:
        if share is None:
            projected = projection(x_NH)
        else:
            projected = torch.addmm(share, x_NH, projection.weight[:, -x_NH.shape[-1] :].T)
        return projected.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """The gated feed-forward half of a layer."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DraftLayer(nn.Module):
    """A pre-norm decoder layer; the first one also reads the token embedding and norms the hidden state itself.

    `recompute`: keep only the input of the feed-forward half, whose activations are most of the layer's, and run it again in the
    backward pass. Same gradients.
    """

    def __init__(self, config: LayerConfig, index: int, norm_before_residual: bool) -> None:
        super().__init__()
        first = index == 0
        self.recompute = False
        self.norm_before_residual = norm_before_residual
        self.self_attn = Attention(config, config.hidden_size * (2 if first else 1))
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if first else None
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def embedding_share(self, embeds_NH: Tensor) -> EmbeddingShare:
        """First layer only: the token embeddings, normed and projected."""
        return self.self_attn.embedding_share(self.input_layernorm(embeds_NH))

    def forward(
        self,
        share: EmbeddingShare | None,
        hidden_NH: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        queries: Tensor | None = None,
    ) -> Tensor:
        """Keys and values of all N rows go to `attend`; `queries` (indices) names the rows that are computed further, all if None."""
        if self.hidden_norm is None:
            x, residual, (share_q, share_k, share_v) = self.input_layernorm(hidden_NH), hidden_NH, (None, None, None)
        else:
            assert share is not None, "the first layer reads token embeddings"
            x, (share_q, share_k, share_v) = self.hidden_norm(hidden_NH), share
            residual = x if self.norm_before_residual else hidden_NH
        keys, values = self.self_attn.keys_values(x, rotary, share_k, share_v)
        if queries is not None:
            x, residual, rotary = x[queries], residual[queries], (rotary[0][queries], rotary[1][queries])
            share_q = share_q if share_q is None else share_q[queries]
        attended = attend(self.self_attn.queries(x, rotary, share_q), keys, values)
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._feed_forward, hidden, use_reentrant=False, preserve_rng_state=False)
        return self._feed_forward(hidden)

    def _feed_forward(self, hidden_NH: Tensor) -> Tensor:
        return hidden_NH + self.mlp(self.post_attention_layernorm(hidden_NH))
