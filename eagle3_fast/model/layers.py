"""Building blocks of the draft: RMSNorm, rotary table, attention projections, SwiGLU, and the draft layer (contract, section 2.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3_fast.model.config import LayerConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Turns q [N, Q, D], k and v [rows, K, D] of a layer into its attention output [N, Q, D]; who calls the layer decides who sees whom."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in at least float32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.to(wide.dtype) * normed).to(x.dtype)


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

    def queries(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[N, input] -> [N, Q, D]"""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rotary)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[N, input] -> two of [N, K, D]"""
        keys = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), rotary)
        return keys, self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """A pre-norm decoder layer; the first one also reads the token embedding and norms the hidden state itself."""

    def __init__(self, config: LayerConfig, index: int, norm_before_residual: bool) -> None:
        super().__init__()
        first = index == 0
        self.norm_before_residual = norm_before_residual
        self.self_attn = Attention(config, config.hidden_size * (2 if first else 1))
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if first else None
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, embeds_NH: Tensor, hidden_NH: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, queries: Tensor | None = None
    ) -> Tensor:
        """Keys and values of all N rows go to `attend`; `queries` (indices) names the rows that are computed further, all if None."""
        if self.hidden_norm is None:
            x, residual = self.input_layernorm(hidden_NH), hidden_NH
        else:
            normed = self.hidden_norm(hidden_NH)
            x = torch.cat((self.input_layernorm(embeds_NH), normed), dim=-1)
            residual = normed if self.norm_before_residual else hidden_NH
        keys, values = self.self_attn.keys_values(x, rotary)
        if queries is not None:
            x, residual, rotary = x[queries], residual[queries], (rotary[0][queries], rotary[1][queries])
        attended = attend(self.self_attn.queries(x, rotary), keys, values)
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
