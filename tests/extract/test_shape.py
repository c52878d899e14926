"""What kind of model a verifier is, against transformers' own classes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Llama4TextConfig, LlamaConfig, Qwen3NextConfig

from eagle3_fast.errors import InputError
from eagle3_fast.extract.shape import verifier_shape
from tests.verifiers import (
    SIZES,
    toy_gemma3,
    toy_glm5,
    toy_granite,
    toy_llama,
    toy_llama_rope,
    toy_llama_tied,
    toy_multimodal,
    toy_qwen3,
)

TOYS = [toy_llama, toy_llama_tied, toy_llama_rope, toy_qwen3, toy_gemma3, toy_granite, toy_glm5, toy_multimodal]


def edit_config(path: Path, **changes: object) -> Path:
    config = json.loads((path / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if value != "absent"}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("toy", TOYS)
def test_sizes_come_from_the_text_part(toy, tmp_path):
    shape = verifier_shape(toy(tmp_path))
    assert (shape.vocab_size, shape.hidden_size, shape.num_hidden_layers) == (64, 32, 6)
    assert shape.dtype == torch.float32 and shape.architectures and shape.config["hidden_size"] == 32


def test_conventions_of_each_family(tmp_path):
    shapes = {toy.__name__: verifier_shape(toy(tmp_path / toy.__name__)) for toy in TOYS}
    assert {name for name, shape in shapes.items() if shape.norm_gain == "one_plus"} == {"toy_gemma3"}
    assert {name for name, shape in shapes.items() if shape.tie_word_embeddings} == {"toy_llama_tied", "toy_gemma3"}
    assert {name for name, shape in shapes.items() if shape.rope_interleaved} == {"toy_glm5"}
    assert shapes["toy_gemma3"].logit_softcap == 5.0 and shapes["toy_gemma3"].embedding_scale == pytest.approx(32**0.5)
    assert shapes["toy_granite"].logit_scale == 0.25 and shapes["toy_granite"].embedding_scale == 2.0
    assert shapes["toy_llama_rope"].rope_parameters["rope_type"] == "llama3"


def test_final_norm_is_measured_not_looked_up(tmp_path):
    """Qwen3-Next scales by 1 + w though its siblings do not; a LayerNorm is refused by name."""
    Qwen3NextConfig(**SIZES).save_pretrained(tmp_path / "next")
    assert verifier_shape(tmp_path / "next").norm_gain == "one_plus"
    CohereConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}).save_pretrained(tmp_path / "cohere")
    with pytest.raises(InputError, match="CohereLayerNorm, is no RMSNorm"):
        verifier_shape(tmp_path / "cohere")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1e6, "rope_parameters": "absent"},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_theta": 1e6},
    ],
    ids=["old place", "new place", "both"],
)
def test_rotary_base_in_either_place(changes, tmp_path):
    assert verifier_shape(edit_config(toy_llama(tmp_path), **changes)).rope_parameters["rope_theta"] == 1e6


def test_rotary_base_in_no_place_is_a_logged_default(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="eagle3_fast"):
        shape = verifier_shape(edit_config(toy_llama(tmp_path), rope_parameters="absent"))
    assert shape.rope_parameters["rope_theta"] == 10000.0
    assert "no rope_theta; its family's default 10000.0 is taken" in caplog.text


def test_of_two_rotary_sets_the_sliding_one_is_taken(tmp_path):
    sets = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    assert verifier_shape(toy_gemma3(tmp_path, rope_parameters=sets)).rope_parameters == sets["sliding_attention"]


def test_interleaved_rotary_pairs_are_recorded(tmp_path):
    Llama4TextConfig(**{**SIZES, "num_local_experts": 2}).save_pretrained(tmp_path)
    assert verifier_shape(tmp_path).rope_interleaved


def test_nested_configs(tmp_path):
    """Text config null, absent, or the only place with sizes."""
    assert verifier_shape(edit_config(toy_llama(tmp_path / "null"), text_config=None)).hidden_size == 32
    assert verifier_shape(toy_multimodal(tmp_path / "only")).hidden_size == 32
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "plain")
    assert verifier_shape(tmp_path / "plain").hidden_size == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "laama"}, "does not know model_type 'laama' \\(it knows llama, .*upgrade transformers"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "x.Y"}}, "set train.verifier.trust_remote_code"),
        ({"hidden_size": "wide"}, "config.json cannot be used"),
    ],
)
def test_unusable_configs_are_explained_in_one_line(changes, message, tmp_path):
    with pytest.raises(InputError, match=message) as error:
        verifier_shape(edit_config(toy_llama(tmp_path), **changes))
    assert "\n" not in str(error.value)


def test_folder_or_cached_id_only(tmp_path):
    for name in ("nobody/nothing", str(tmp_path / "gone")):
        with pytest.raises(InputError, match="neither a folder nor in the Hugging Face cache; point"):
            verifier_shape(name)


@pytest.mark.parametrize("toy", [toy_llama, toy_gemma3, toy_granite, toy_qwen3])
def test_logits_formula_rounds_where_the_verifier_rounds(toy, tmp_path):
    """In bfloat16 the formula gives the very bits of the verifier."""
    shape = verifier_shape(toy(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    states = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    gain = model.model.norm.weight.detach().float() + (shape.norm_gain == "one_plus")
    with torch.no_grad():
        expected = model.lm_head(model.model.norm(states)).float() * shape.logit_scale
        ours = shape.logits(states, gain, model.lm_head.weight)
    if shape.logit_softcap is not None:
        expected = shape.logit_softcap * torch.tanh(expected / shape.logit_softcap)
    assert torch.equal(ours, expected)
