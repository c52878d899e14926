"""`train.draft.draft_config`: a decoder config of the user's becomes the draft's layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_fast.errors import InputError
from eagle3_fast.extract.weights import verifier_shape
from eagle3_fast.model.config import LayerConfig
from eagle3_fast.train.layer_config import read_layer_config

DECODER = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 1000,
    "rope_theta": 5000.0,
    "max_position_embeddings": 64,
}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({name: value for name, value in {**DECODER, **changes}.items() if value is not None}))
    return path


def test_a_decoder_config_shapes_the_draft(tmp_path: Path, toy: Path) -> None:
    path = written(tmp_path)
    layer = LayerConfig.model_validate(read_layer_config(str(path), verifier_shape(toy)))
    assert (layer.model_type, layer.num_hidden_layers, layer.head_dim, layer.intermediate_size) == ("qwen3", 2, 16, 48)
    assert layer.vocab_size == 64, "the verifier's"
    assert layer.rope_parameters["rope_theta"] == 5000.0
    assert layer.window(0) is None, "no sliding window unless the file asks for one"
    assert layer.tie_word_embeddings is False
    assert read_layer_config(str(tmp_path), verifier_shape(toy)) == read_layer_config(str(path), verifier_shape(toy))


def test_absent_keys_are_those_of_the_family(tmp_path: Path, toy: Path) -> None:
    path = written(tmp_path, model_type="qwen3", head_dim=None, num_key_value_heads=None, num_attention_heads=32)
    layer = LayerConfig.model_validate(read_layer_config(str(path), verifier_shape(toy)))
    assert (layer.head_dim, layer.num_key_value_heads) == (128, 32)
    layer = LayerConfig.model_validate(
        read_layer_config(str(written(tmp_path, model_type="llama", head_dim=None, num_key_value_heads=None)), verifier_shape(toy))
    )
    assert (layer.head_dim, layer.num_key_value_heads) == (16, 2)


def test_of_a_whole_draft_config_the_decoder_is_taken(tmp_path: Path, toy: Path) -> None:
    path = written(tmp_path)
    alone = read_layer_config(str(path), verifier_shape(toy))
    path.write_text(json.dumps({"speculators_model_type": "eagle3", "transformer_layer_config": DECODER}))
    assert read_layer_config(str(path), verifier_shape(toy)) == alone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "model_type is None"),
        ({"model_type": "gemma3"}, "model_type is 'gemma3'; a draft's layers are llama or qwen3"),
        ({"hidden_size": 64}, "hidden_size is 64, that of .* is 32"),
    ],
)
def test_what_cannot_be_a_draft_is_refused(tmp_path: Path, toy: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_layer_config(str(written(tmp_path, **changes)), verifier_shape(toy))
