"""The draft's config.json: what is read, what is written, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model.drafts import config_data, random_draft

from eagle3_fast.errors import InputError
from eagle3_fast.model.config import flat_rope_parameters, load_draft_config, parse_draft_config, save_draft_config
from eagle3_fast.model.draft import load_draft, save_draft
from eagle3_fast.model.layers import RotaryTable, rotate


@pytest.mark.parametrize(
    "layer",
    [
        {"rope_theta": 1e6},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 1e6}}},
    ],
)
def test_rotary_base_is_found_wherever_it_stands(layer: dict) -> None:
    assert flat_rope_parameters(layer)["rope_theta"] == 1e6


def test_old_scaling_keeps_its_type() -> None:
    rope = flat_rope_parameters({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert rope == {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}


def test_partial_mrope_is_rescaled_to_the_whole_head() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    flat = flat_rope_parameters({"rope_parameters": rope, "head_dim": 16})
    assert (flat["mrope_section"], flat["partial_rotary_factor"]) == ([4, 2, 2], 1.0)
    with pytest.raises(ValueError, match="does not fill"):
        flat_rope_parameters({"rope_parameters": rope, "head_dim": 24})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_tables_are_those_of_transformers(rope: dict) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = parse_draft_config(config_data({"rope_parameters": {"rope_theta": 10000.0, **rope}}), "test").transformer_layer_config
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=32,
            num_attention_heads=4,
            head_dim=8,
            max_position_embeddings=512,
            rope_parameters=config.rope_parameters,
        )
    )
    positions = torch.arange(1, 60)
    cos, sin = theirs(torch.zeros(()), positions[None])
    ours = RotaryTable(config)(positions)
    assert torch.equal(ours[0], cos[0])
    assert torch.equal(ours[1], sin[0])


def test_partial_rotary_turns_the_leading_channels() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = parse_draft_config(config_data({"rope_parameters": rope}), "test").transformer_layer_config
    x = torch.randn(3, 4, 8)
    turned = rotate(x, RotaryTable(config)(torch.arange(1, 4)))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert not torch.allclose(turned[..., :4], x[..., :4])


def test_unknown_keys_survive(tmp_path: Path) -> None:
    config = parse_draft_config(config_data({"pretraining_tp": 1}, has_no_defaults_at_init=False), "test")
    save_draft_config(config, tmp_path, "bfloat16")
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["has_no_defaults_at_init"] is False
    assert data["transformer_layer_config"]["pretraining_tp"] == 1
    assert (data["dtype"], data["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert "model_type" not in data
    assert load_draft_config(tmp_path).transformer_layer_config == config.transformer_layer_config


def test_aux_count_stands_where_vllm_looks(tmp_path: Path) -> None:
    save_draft_config(parse_draft_config(config_data(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 5]), "test"), tmp_path, "float32")
    assert json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]["num_aux_hidden_states"] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type"),
        ({"draft_vocab_size": 65}, "exceeds"),
        ({"fc_norm": True}, "exclude"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 1]}, "ascending"),
        ({"transformer_layer_config": {**config_data()["transformer_layer_config"], "model_type": "mistral"}}, "model_type"),
        ({"transformer_layer_config": {**config_data()["transformer_layer_config"], "num_key_value_heads": 3}}, "multiple"),
    ],
)
def test_what_cannot_be_a_draft_is_one_line(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_draft_config({**config_data(), **change}, "draft/config.json")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("draft/config.json: ")


@pytest.mark.parametrize("flags", [{}, {"draft_vocab_size": 64}, {"norm_before_fc": False, "fc_norm": True}])
def test_a_draft_survives_saving(tmp_path: Path, flags: dict) -> None:
    draft = random_draft(dtype=torch.float32, **flags)
    save_draft(draft, tmp_path, torch.float32)
    again = load_draft(tmp_path)
    for name, value in draft.exported_tensors(torch.float32).items():
        assert torch.equal(again.state_dict()[name], value), name
    assert ("d2t" in draft.exported_tensors(torch.float32)) == draft.config.reduced_vocab
    assert not any(name.startswith("verifier") for name in draft.exported_tensors(torch.float32))


def test_every_mismatch_of_a_file_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_draft(random_draft(dtype=torch.float32), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("fc.weight")
    tensors["norm.weight"] = tensors["norm.weight"][:5].clone()
    save_file({**tensors, "extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"extra is not part of this config; fc.weight is missing; norm.weight is \[5\]"):
        load_draft(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(InputError, match="not a whole safetensors file"):
        load_draft(tmp_path)
