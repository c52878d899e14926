"""The draft's `config.json`, in and out, in the layout of speculators (releases 0.3 and 0.9) that vLLM serves.

Facts from the speculators contract, sections 1 and 9.1. Keys that this project does not use are kept and written back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3_fast.errors import InputError
from eagle3_fast.files import read_json, write_json

SPECULATORS_VERSION = "0.9.0"
"""The release whose layout is written; readers of the file use it to choose defaults."""


class _Kept(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class LayerConfig(_Kept):
    """`transformer_layer_config`: the draft's decoder layers, in Hugging Face's names."""

    model_type: Literal["llama", "qwen3"] = "llama"
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(1, ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: int = Field(2048, ge=1)
    initializer_range: float = 0.02
    rms_norm_eps: float = Field(1e-6, gt=0)
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    layer_types: list[Literal["sliding_attention", "full_attention"]] | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = False
    rope_parameters: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        """Hugging Face's defaults for absent keys, and the rotary parameters wherever a release keeps them."""
        data = dict(data)
        heads = data.get("num_attention_heads") or 0
        if data.get("num_key_value_heads") is None:
            data["num_key_value_heads"] = heads
        if data.get("head_dim") is None and heads:
            data["head_dim"] = data.get("hidden_size", 0) // heads
        data["rope_parameters"] = flat_rope_parameters(data)
        data.pop("rope_theta", None)
        data.pop("rope_scaling", None)
        return data

    @model_validator(mode="after")
    def _consistent(self) -> LayerConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads {self.num_key_value_heads}"
            )
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types names {len(self.layer_types)} layers, num_hidden_layers is {self.num_hidden_layers}")
        if self.layer_types and "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("layer_types has sliding_attention, so sliding_window must be set")
        return self

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer, or None for full attention."""
        if self.layer_types and self.layer_types[layer] == "sliding_attention":
            return self.sliding_window
        return None


def flat_rope_parameters(data: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters of a Hugging Face config dict as one flat dict with `rope_type` and `rope_theta`.

    Reads `rope_parameters` (new place), `rope_theta` + `rope_scaling` (old place); a set per layer type is flattened to its
    `sliding_attention` entry, as speculators does. Without any base, Hugging Face's own default 10000 holds.
    """
    rope = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
    nested = [value for value in rope.values() if isinstance(value, dict)]
    if nested and len(nested) == len(rope):
        rope = dict(rope.get("sliding_attention") or nested[0])
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    rope["rope_theta"] = float(rope.get("rope_theta") or data.get("rope_theta") or 10000.0)
    return _full_head_mrope(rope, data.get("head_dim"))


def _full_head_mrope(rope: dict[str, Any], head_dim: int | None) -> dict[str, Any]:
    """Rescale a partial multimodal rotary section to the whole head, as speculators does for its drafts (contract 2.4)."""
    factor = rope.get("partial_rotary_factor", 1.0)
    section = rope.get("mrope_section")
    if not section or factor >= 1:
        return rope
    scale = round(1 / factor)
    if abs(scale * factor - 1) > 1e-6 or 2 * sum(section) * scale != head_dim:
        raise ValueError(f"mrope_section {section} with partial_rotary_factor {factor} does not fill head_dim {head_dim}")
    return {**rope, "mrope_section": [part * scale for part in section], "partial_rotary_factor": 1.0}


class ProposalConfig(_Kept):
    proposal_type: Literal["greedy"] = "greedy"
    speculative_tokens: int = Field(5, ge=1)
    verifier_accept_k: int = Field(1, ge=1)
    accept_tolerance: float = Field(0.0, ge=0)


class VerifierConfig(_Kept):
    name_or_path: str | None
    architectures: list[str]


class SpeculatorsConfig(_Kept):
    algorithm: str = "eagle3"
    proposal_methods: list[ProposalConfig] = Field(min_length=1)
    default_proposal_method: str = "greedy"
    verifier: VerifierConfig

    @model_validator(mode="after")
    def _default_is_listed(self) -> SpeculatorsConfig:
        if self.default_proposal_method not in {method.proposal_type for method in self.proposal_methods}:
            raise ValueError(f"default_proposal_method {self.default_proposal_method!r} is not one of proposal_methods")
        return self


class DraftConfig(_Kept):
    """The whole `config.json` of a draft."""

    speculators_model_type: Literal["eagle3"]
    speculators_version: str = SPECULATORS_VERSION
    speculators_config: SpeculatorsConfig
    architectures: list[str] = ["Eagle3DraftModel"]
    transformer_layer_config: LayerConfig
    draft_vocab_size: int = Field(32000, ge=1)
    norm_before_residual: bool = False
    target_hidden_size: int | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    embed_requires_grad: bool = False
    tie_word_embeddings: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> DraftConfig:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        if self.draft_vocab_size > self.verifier_vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds the verifier's vocabulary {self.verifier_vocab_size}"
            )
        ids = self.eagle_aux_hidden_state_layer_ids
        if ids is not None and (ids != sorted(set(ids)) or not ids or ids[0] < 0):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids must be ascending and distinct (vLLM sorts them), not {ids}")
        return self

    @property
    def verifier_vocab_size(self) -> int:
        return self.transformer_layer_config.vocab_size

    @property
    def verifier_hidden_size(self) -> int:
        return self.target_hidden_size or self.transformer_layer_config.hidden_size

    @property
    def num_aux(self) -> int:
        """Number of aux hidden states; 3 where the config (release 0.3) does not say."""
        return len(self.eagle_aux_hidden_state_layer_ids or (0, 0, 0))

    @property
    def reduced_vocab(self) -> bool:
        return self.draft_vocab_size != self.verifier_vocab_size


def parse_draft_config(data: Any, where: str) -> DraftConfig:
    """A draft config from parsed JSON; every fault is one `InputError` line that starts with `where`."""
    if not isinstance(data, dict) or "speculators_model_type" not in data:
        raise InputError(f"{where}: not a speculators draft (no speculators_model_type)")
    try:
        return DraftConfig.model_validate(data)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, item['loc'])) or 'config'}: {item['msg']}" for item in error.errors())
        raise InputError(f"{where}: " + "; ".join(faults)) from None


def load_draft_config(folder: str | Path) -> DraftConfig:
    """Read `folder/config.json`."""
    path = Path(folder) / "config.json"
    return parse_draft_config(read_json(path), str(path))


def save_draft_config(config: DraftConfig, folder: str | Path, dtype: str) -> None:
    """Write `folder/config.json` so that speculators and vLLM both read it.

    Both spellings of the dtype and of the rotary base are written; `norm_before_residual` and the aux ids are always explicit,
    because vLLM's default differs from the library's; a llama draft with other than three aux states carries
    `num_aux_hidden_states` inside the layer config, the only place where vLLM's llama loader looks.
    """
    data = config.model_dump(mode="json")
    layer = data["transformer_layer_config"]
    layer["rope_theta"] = layer["rope_parameters"]["rope_theta"]
    if layer["model_type"] == "llama" and config.num_aux != 3:
        layer["num_aux_hidden_states"] = config.num_aux
    data["dtype"] = data["torch_dtype"] = dtype
    write_json(Path(folder) / "config.json", data)
