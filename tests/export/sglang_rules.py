"""How SGLang reads an exported EAGLE-3 draft, written again in plain code from what its releases 0.5.12 to 0.5.23 do.

Imports nothing of the package and reads only config.json and model.safetensors of the folder; embedding, layer count and type of
the verifier are what the engine knows on its own. Stricter than SGLang in one point: a missing tensor, which SGLang leaves random
without a word, and an unknown one, which it passes over, are errors here.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.export import vllm_rules

SHIFTED_ONLY_FROM_ONE = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"}
"""Verifiers to whose layer ids releases from 0.5.13 add 1 only where the first is 1; to all others, and before, always."""


def captured_layers(config: dict[str, Any], count: int, verifier_type: str, release: tuple[int, ...] = (0, 5, 23)) -> list[int]:
    """Layers (of `count`) whose input the engine captures for this draft config, ascending: it walks through the layers."""
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        wanted = [2, count // 2, count - 3]
    elif verifier_type in SHIFTED_ONLY_FROM_ONE and release >= (0, 5, 13) and ids[0] != 1:
        wanted = list(ids)
    else:
        wanted = [number + 1 for number in ids]
    return [layer for layer in range(count) if layer in wanted]


class ServedDraft(vllm_rules.ServedDraft):
    """One draft as the engine holds it. `target_embed` is the verifier's embedding [V, G]."""

    def __init__(self, folder: Path, target_embed: Tensor, layers: int = 6, verifier_type: str = "llama") -> None:
        self.layer = self.config = config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["model_type"] == "llama"
        assert config["tie_word_embeddings"] is False, "the engine would use the embedding as head"
        self.folder, self.cache = folder, []
        self.target_vocab, self.draft_vocab = config["vocab_size"], config["draft_vocab_size"]
        self.hidden, self.target_hidden = config["hidden_size"], config.get("target_hidden_size", config["hidden_size"])
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.qwen3 = config["head_dim"], False
        eagle = config.get("eagle_config") or {}
        self.num_aux = config.get("num_aux_hidden_states") or len(eagle.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0))
        self.norm_before_fc = eagle.get("norm_before_fc", config.get("norm_before_fc", False))
        self.fc_norm, self.norm_output = config.get("fc_norm", False), config.get("norm_output", False)
        self.captured = captured_layers(config, layers, verifier_type)
        assert len(self.captured) == self.num_aux, f"captures {self.captured}, fc expects {self.num_aux} states"
        stored = load_file(folder / "model.safetensors")
        self.weights = {name.removeprefix("model.").replace("midlayer.", "layers.0."): value for name, value in stored.items()}
        self._refuse_other_names()
        own = "target_hidden_size" in config and self.target_hidden != self.hidden
        self.embedding = self.weight("embed_tokens.weight") if own else target_embed.double()
        assert self.embedding.shape == (self.target_vocab, self.hidden)

    def _refuse_other_names(self) -> None:
        hidden, inner, q, kv = (
            self.hidden,
            self.config["intermediate_size"],
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
        )
        names: dict[str, tuple[int, ...]] = {"norm.weight": (hidden,), "lm_head.weight": (self.draft_vocab, hidden)}
        names["fc.weight"] = (hidden, self.num_aux * self.target_hidden)
        if self.target_hidden != hidden:
            names["embed_tokens.weight"] = (self.target_vocab, hidden)
        if self.norm_before_fc:
            names["input_norm.weight"] = (self.num_aux * self.target_hidden,)
        if self.fc_norm:
            names |= {f"fc_norm.{j}.weight": (self.target_hidden,) for j in range(self.num_aux)}
        if self.draft_vocab != self.target_vocab:
            names |= {"d2t": (self.draft_vocab,), "t2d": (self.target_vocab,)}
        for i in range(self.config["num_hidden_layers"]):
            width, at = hidden * (2 if i == 0 else 1), f"layers.{i}."
            names |= {f"{at}self_attn.q_proj.weight": (q, width), f"{at}self_attn.o_proj.weight": (hidden, q)}
            names |= {f"{at}self_attn.{part}_proj.weight": (kv, width) for part in "kv"}
            names |= {f"{at}mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
            names |= {f"{at}mlp.down_proj.weight": (hidden, inner)}
            norms = ("hidden_norm", "post_attention_layernorm", *(["input_layernorm"] if i == 0 else []))
            names |= {f"{at}{norm}.weight": (hidden,) for norm in norms}
        found = {name: tuple(tensor.shape) for name, tensor in self.weights.items()}
        if found != names:
            raise ValueError(f"tensors differ from those the config asks for: {sorted(found.items() ^ names.items())}")

    def combine(self, aux: Tensor) -> Tensor:
        """Aux states [T, num_aux * G] -> [T, H]; states as wide as the embedding are taken for hidden states."""
        return aux.double() if aux.shape[-1] == self.hidden else super().combine(aux)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Halves paired; the plain and the "llama3" table."""
        rope = self.config.get("rope_parameters") or {
            "rope_theta": self.config["rope_theta"],
            **(self.config["rope_scaling"] or {}),
        }
        half = self.head_dim // 2
        frequency = rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        if rope.get("rope_type", "default") == "llama3":
            turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            kept = ((turns - low) / (high - low)).clamp(0, 1)
            frequency = kept * frequency + (1 - kept) * frequency / rope["factor"]
        else:
            assert rope.get("rope_type", "default") == "default"
        angle = positions[:, None].double() * frequency
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As the vLLM rules' `forward`. The residual is the hidden state before its norm, in every layer."""
        empty = torch.empty(0, self.kv_heads, self.head_dim, dtype=torch.float64)
        self.cache = self.cache or [(torch.empty(0, dtype=torch.int64), empty, empty)] * self.config["num_hidden_layers"]
        for i in range(self.config["num_hidden_layers"]):
            at = f"layers.{i}."
            x = self.norm(hidden, at + "hidden_norm")
            if i == 0:
                x = torch.cat((self.norm(self.embedding[tokens], at + "input_layernorm"), x), -1)
            hidden = hidden + self.attention(x, positions, i)
            x = self.norm(hidden, at + "post_attention_layernorm")
            gate = self.linear(x, at + "mlp.gate_proj")
            hidden = hidden + self.linear(gate * gate.sigmoid() * self.linear(x, at + "mlp.up_proj"), at + "mlp.down_proj")
        normed = self.norm(hidden, "norm")
        return self.scatter(normed @ self.weight("lm_head.weight").T), normed if self.norm_output else hidden
