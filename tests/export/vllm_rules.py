"""How vLLM 0.32 reads an exported draft, written again in plain code from the contract alone (section 9.1).

Imports nothing of the package and reads only config.json and model.safetensors of the folder. Stricter than vLLM in one point:
a missing tensor, which vLLM leaves at its initial value without a word, is an error here, as an extra one is.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

Cache = list[tuple[Tensor, Tensor, Tensor]]  # per layer: positions [T], keys and values [T, kv heads, head_dim]


@dataclass
class ServedDraft:
    """One draft as the engine holds it. `target_vocab` is the verifier's vocabulary, which the engine knows on its own."""

    folder: Path
    target_vocab: int
    cache: Cache = field(default_factory=list)

    def __post_init__(self) -> None:
        raw = json.loads((self.folder / "config.json").read_text())
        assert "speculators_config" in raw, "not detected as a speculators draft"
        assert "model_type" not in raw, "taken for a model of that type"
        self.verifier = raw["speculators_config"]["verifier"]["name_or_path"]
        self.speculative_tokens = raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        self.layer = raw["transformer_layer_config"]
        self.target_hidden = raw.get("target_hidden_size") or self.layer["hidden_size"]
        self.draft_vocab = raw["draft_vocab_size"]
        self.residual_is_normed = raw.get("norm_before_residual", True)
        self.norm_before_fc, self.fc_norm = raw.get("norm_before_fc", False), raw.get("fc_norm", False)
        self.norm_output = raw.get("norm_output", False)
        self.aux_ids = raw.get("eagle_aux_hidden_state_layer_ids")
        if not self.aux_ids:
            warnings.warn("no aux layer ids: the engine guesses 2, n//2, n-3", stacklevel=3)
        self.qwen3 = {"llama": False, "qwen3": True}[self.layer.get("model_type", "llama")]
        counted = self.layer.get("num_aux_hidden_states")
        self.num_aux = counted or (len(self.aux_ids) if self.qwen3 and self.aux_ids else 3)
        self.heads, self.kv_heads = self.layer["num_attention_heads"], self.layer["num_key_value_heads"]
        self.head_dim = self.layer.get("head_dim") or self.layer["hidden_size"] // self.heads
        self.weights = load_file(self.folder / "model.safetensors")
        self._refuse_other_names()

    def _refuse_other_names(self) -> None:
        hidden, target = self.layer["hidden_size"], self.target_hidden
        names = {"embed_tokens.weight": (self.target_vocab, hidden), "norm.weight": (hidden,)}
        names |= {"lm_head.weight": (self.draft_vocab, hidden), "fc.weight": (hidden, self.num_aux * target)}
        if self.norm_before_fc:
            names["input_norm.weight"] = (self.num_aux * target,)
        if self.fc_norm:
            names |= {f"fc_norm.{j}.weight": (target,) for j in range(self.num_aux)}
        if self.draft_vocab != self.target_vocab:
            names |= {"d2t": (self.draft_vocab,), "t2d": (self.target_vocab,)}
        q, kv, inner = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.layer["intermediate_size"]
        for i in range(self.layer["num_hidden_layers"]):
            width, at = hidden * (2 if i == 0 else 1), f"layers.{i}."
            linear = {"self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width)}
            linear |= {"self_attn.o_proj": (hidden, q)}
            mlp = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
            names |= {f"{at}{name}.weight": shape for name, shape in (linear | mlp).items()}
            if self.layer.get("attention_bias"):
                names |= {f"{at}{name}.bias": shape[:1] for name, shape in linear.items()}
            if self.layer.get("mlp_bias"):
                names |= {f"{at}{name}.bias": shape[:1] for name, shape in mlp.items()}
            norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if i == 0 else [])]
            names |= {f"{at}{name}.weight": (hidden,) for name in norms}
            if self.qwen3:
                names |= {f"{at}self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        found = {name: tuple(tensor.shape) for name, tensor in self.weights.items()}
        if found != names:
            raise ValueError(f"tensors differ from those the config asks for: {sorted(found.items() ^ names.items())}")

    def weight(self, name: str) -> Tensor:
        return self.weights[name].to(torch.float64)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.layer["rms_norm_eps"]) * self.weight(f"{name}.weight")

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if f"{name}.bias" in self.weights else y

    def combine(self, aux: Tensor) -> Tensor:
        """Aux states [T, num_aux * verifier hidden] of target positions -> hidden state [T, H]."""
        aux = aux.double()
        if self.norm_before_fc:
            aux = self.norm(aux, "input_norm")
        if self.fc_norm:
            aux = torch.cat([self.norm(part, f"fc_norm.{j}") for j, part in enumerate(aux.chunk(self.num_aux, -1))], -1)
        return self.linear(aux, "fc")

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        rope = self.layer.get("rope_parameters") or {}
        assert rope.get("rope_type", "default") == "default", "plain rotary only"
        theta = rope.get("rope_theta") or self.layer["rope_theta"]
        half = self.head_dim // 2
        angle = positions[:, None].double() * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def attention(self, x: Tensor, positions: Tensor, i: int) -> Tensor:
        at = f"layers.{i}.self_attn."
        q = self.linear(x, at + "q_proj").view(-1, self.heads, self.head_dim)
        k, v = (self.linear(x, at + part).view(-1, self.kv_heads, self.head_dim) for part in ("k_proj", "v_proj"))
        if self.qwen3:
            q, k = self.norm(q, at + "q_norm"), self.norm(k, at + "k_norm")
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        old_positions, old_k, old_v = self.cache[i]
        self.cache[i] = (torch.cat((old_positions, positions)), torch.cat((old_k, k)), torch.cat((old_v, v)))
        key_positions, k, v = self.cache[i]
        ago = positions[:, None] - key_positions[None]
        seen = ago >= 0
        if (self.layer.get("layer_types") or ["full_attention"] * (i + 1))[i] == "sliding_attention":
            seen &= ago < self.layer["sliding_window"]
        group = self.heads // self.kv_heads
        out = torch.empty_like(q)
        for h in range(self.heads):
            scores = q[:, h] @ k[:, h // group].T / math.sqrt(self.head_dim)
            out[:, h] = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[:, h // group]
        return self.linear(out.flatten(1), at + "o_proj")

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [T] and hidden states [T, H] at `positions`, after whatever the cache holds.

        Returns logits over the verifier's vocabulary [T, V] and hidden states for the next step [T, H].
        """
        empty = torch.empty(0, self.kv_heads, self.head_dim, dtype=torch.float64)
        self.cache = self.cache or [(torch.empty(0, dtype=torch.int64), empty, empty)] * self.layer["num_hidden_layers"]
        embeds = self.weight("embed_tokens.weight")[tokens]
        for i in range(self.layer["num_hidden_layers"]):
            at = f"layers.{i}."
            if i == 0:
                normed = self.norm(hidden, at + "hidden_norm")
                residual = normed if self.residual_is_normed else hidden
                x = torch.cat((self.norm(embeds, at + "input_layernorm"), normed), -1)
            else:
                residual, x = hidden, self.norm(hidden, at + "input_layernorm")
            hidden = residual + self.attention(x, positions, i)
            x = self.norm(hidden, at + "post_attention_layernorm")
            gate = self.linear(x, at + "mlp.gate_proj")
            hidden = hidden + self.linear(gate * gate.sigmoid() * self.linear(x, at + "mlp.up_proj"), at + "mlp.down_proj")
        normed = self.norm(hidden, "norm")
        return self.scatter(normed @ self.weight("lm_head.weight").T), normed if self.norm_output else hidden

    def scatter(self, logits: Tensor) -> Tensor:
        """Draft-vocabulary logits at the verifier's ids, -inf elsewhere."""
        if self.draft_vocab == self.target_vocab:
            return logits
        full = logits.new_full((logits.shape[0], self.target_vocab), -math.inf)
        full[:, torch.arange(self.draft_vocab) + self.weights["d2t"]] = logits
        return full

    def draft(self, tokens: Tensor, aux: Tensor, count: int) -> list[int]:
        """`count` greedy drafts after `tokens` [T + 1]; the aux states [T, F] are those of all but the last.

        Position t of the draft holds token t + 1 beside the verifier's state of token t.
        """
        self.cache = []
        positions = torch.arange(len(aux))
        logits, hidden = self.forward(tokens[1:], self.combine(aux), positions)
        drafted = []
        for ahead in range(1, count + 1):
            drafted.append(int(logits[-1].argmax()))
            if ahead < count:
                logits, hidden = self.forward(torch.tensor(drafted[-1:]), hidden[-1:], positions[-1:] + ahead)
        return drafted
