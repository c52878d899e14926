"""The decoder config that `train.draft.draft_config` names, in place of one made from the verifier's sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from eagle3_fast.errors import InputError
from eagle3_fast.extract.shape import VerifierShape, local_folder
from eagle3_fast.files import read_json
from eagle3_fast.log import logger
from eagle3_fast.model.config import LayerConfig


def read_layer_config(source: str, shape: VerifierShape) -> dict[str, Any]:
    """The `transformer_layer_config` of a draft from a folder, a JSON file or an id in the Hugging Face cache.

    Of a whole speculators config its decoder part is taken. Absent keys get transformers' defaults of that family; the vocabulary
    size becomes the verifier's. Raises InputError for another family than llama and qwen3, and for another hidden size.
    """
    path = Path(source) if Path(source).is_file() else local_folder(source) / "config.json"
    data = read_json(path)
    data = data.get("transformer_layer_config", data)
    family = data.get("model_type")
    if family not in ("llama", "qwen3"):
        raise InputError(f"{path}: model_type is {family!r}; a draft's layers are llama or qwen3")
    filled = type(AutoConfig.for_model(family)).from_dict(data).to_dict()
    layer = {name: filled[name] for name in LayerConfig.model_fields if name in filled}
    if layer["hidden_size"] != shape.hidden_size:
        raise InputError(
            f"{path}: hidden_size is {layer['hidden_size']}, that of {shape.path} is {shape.hidden_size}; make them equal"
        )
    if layer["vocab_size"] != shape.vocab_size:
        logger.info("%s: vocab_size %d becomes the verifier's, %d", path, layer["vocab_size"], shape.vocab_size)
    return {**layer, "vocab_size": shape.vocab_size, "tie_word_embeddings": False}
