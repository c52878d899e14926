"""Embedding, norm and head of a checkpoint, in every place and layout they may have."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3_fast.errors import InputError
from eagle3_fast.extract.weights import verifier_fingerprint, verifier_weights
from tests.extract.test_shape import edit_config
from tests.verifiers import stored_weights, toy_gemma3, toy_llama, toy_llama_tied, toy_multimodal

ROWS = torch.tensor([3, 60, 0, 17])


def rewrite(path: Path, change) -> Path:
    """Replace a folder's tensors by `change(tensors)`."""
    tensors = change(stored_weights(path))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def check_whole(path: Path, prefix: str = "model.", head: str = "lm_head.weight") -> None:
    stored, weights = stored_weights(path), verifier_weights(path)
    assert torch.equal(weights.embed, stored[f"{prefix}embed_tokens.weight"])
    assert torch.equal(weights.norm, stored[f"{prefix}norm.weight"])
    assert torch.equal(weights.head, stored[head])
    assert torch.equal(verifier_weights(path, ROWS, ["head"]).head, stored[head][ROWS])


def test_single_file_and_shards(tmp_path):
    check_whole(toy_llama(tmp_path / "single"))
    sharded = toy_llama(tmp_path / "shards", shards=True)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    check_whole(sharded)


def test_tied_head_is_the_embedding(tmp_path):
    weights = verifier_weights(toy_llama_tied(tmp_path))
    assert "lm_head.weight" not in stored_weights(tmp_path)
    assert torch.equal(weights.head, weights.embed) and weights.embed.shape == (64, 32)
    assert torch.equal(verifier_weights(tmp_path, ROWS, ["head"]).head, weights.embed[ROWS])


def test_parts_not_asked_for_are_not_read(tmp_path):
    path = rewrite(toy_llama(tmp_path), lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"})
    weights = verifier_weights(path, names=["embed", "norm"])
    assert weights.embed.shape == (64, 32) and weights.head.shape[0] == 0


def test_one_is_added_to_a_gain_of_that_kind(tmp_path):
    weights = verifier_weights(toy_gemma3(tmp_path))
    assert torch.equal(weights.norm, stored_weights(tmp_path)["model.norm.weight"] + 1)
    assert 0.1 <= weights.norm.min() < weights.norm.max() <= 3


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("", "lm_head.weight"),
        ("model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("model.language_model.model.", "model.language_model.lm_head.weight"),
        ("language_model.", "language_model.lm_head.weight"),
    ],
)
def test_spellings(prefix, head, tmp_path):
    """Also with parts of the same names beside them: a vision tower, a prediction module, layer norms."""
    decoys = [
        "mtp.embed_tokens.weight",
        "mtp.norm.weight",
        "vision_tower.norm.weight",
        "visual.embed_tokens.weight",
        "mtp.lm_head.weight",
    ]

    def rename(tensors):
        other = {name: torch.zeros(32) if "norm" in name else torch.zeros(64, 32) for name in decoys}
        renamed = {
            head if k == "lm_head.weight" else k.replace("model.", prefix, 1): v
            for k, v in tensors.items()
            if "layers" not in k or "layers.0" in k
        }
        return renamed | other

    check_whole(rewrite(toy_llama(tmp_path), rename), prefix, head)


def test_aliases(tmp_path):
    names = {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "lm_head.weight": "output.weight",
        "model.norm.weight": "norm.weight",
    }
    before = verifier_weights(toy_llama(tmp_path))
    after = verifier_weights(rewrite(tmp_path, lambda t: {names.get(k, k): v for k, v in t.items()}))
    for part in ("embed", "norm", "head"):
        assert torch.equal(getattr(before, part), getattr(after, part))


def test_inside_a_multimodal_wrapper(tmp_path):
    stored = stored_weights(toy_multimodal(tmp_path))
    weights = verifier_weights(tmp_path)
    (embed,) = [v for k, v in stored.items() if k.endswith("embed_tokens.weight")]
    assert torch.equal(weights.embed, embed) and weights.head.shape == (64, 32)


def test_nothing_found_lists_near_matches(tmp_path):
    path = rewrite(toy_llama(tmp_path), lambda t: {k.replace("embed_tokens", "embedded_tokens"): v for k, v in t.items()})
    with pytest.raises(InputError, match="no tensor named embed_tokens.weight.*nearest: model.embedded_tokens.weight"):
        verifier_weights(path)


def test_untied_without_head_stops_unless_told(tmp_path):
    path = rewrite(toy_llama(tmp_path), lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"})
    with pytest.raises(InputError, match="tie_word_embeddings is false, yet no head is stored"):
        verifier_weights(path)
    weights = verifier_weights(path, tie_missing_head=True)
    assert torch.equal(weights.head, weights.embed)


def test_tied_with_another_stored_head_warns_once_with_the_difference(tmp_path, caplog):
    other = toy_llama_tied(tmp_path)
    embed = stored_weights(other)["model.embed_tokens.weight"]
    rewrite(other, lambda t: {**t, "lm_head.weight": embed + 0.25})
    with caplog.at_level(logging.WARNING, logger="eagle3_fast"):
        weights = verifier_weights(other)
    assert torch.equal(weights.head, embed)
    assert len(caplog.records) == 1 and "by up to 0.25" in caplog.text


def test_missing_shards_are_listed_before_anything_is_read(tmp_path):
    path = toy_llama(tmp_path, shards=True)
    shards = sorted(path.glob("*.safetensors"))
    for shard in shards[:2]:
        shard.unlink()
    shards[2].write_bytes(b"damaged")
    with pytest.raises(InputError, match=f"{shards[0].name}, {shards[1].name}"):
        verifier_weights(path)


def test_damaged_and_absent_weights(tmp_path):
    path = toy_llama(tmp_path)
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(InputError, match="not a whole safetensors file"):
        verifier_weights(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(InputError, match="holds no \\*.safetensors weights"):
        verifier_weights(path)


def test_sizes_that_contradict_the_config_stop(tmp_path):
    with pytest.raises(InputError, match="has 64 rows, config.json says vocab_size 65"):
        verifier_weights(edit_config(toy_llama(tmp_path / "v"), vocab_size=65))
    with pytest.raises(InputError, match="embed_tokens.weight gives shape \\(64, 32\\), config.json says hidden_size 40"):
        verifier_weights(edit_config(toy_llama(tmp_path / "h"), hidden_size=40))
    with pytest.raises(InputError, match="rows 0..64 of lm_head.weight asked for, it has 64"):
        verifier_weights(toy_llama(tmp_path / "r"), torch.tensor([0, 64]))
    biased = rewrite(toy_llama(tmp_path / "b"), lambda t: {**t, "lm_head.bias": torch.zeros(64)})
    with pytest.raises(InputError, match="the head has a bias"):
        verifier_weights(biased)


# --- quantised heads ---------------------------------------------------------------------------------------------------


def quantised(path: Path, tensors: dict[str, torch.Tensor], vocab: int = 64, hidden: int = 32) -> Path:
    """A toy whose head is stored as `tensors`."""
    toy_llama(path, vocab_size=vocab, hidden_size=hidden)
    return rewrite(path, lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"} | tensors)


def fp8_case(kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A [200, 160] head and what it means. Neither size is a multiple of 128."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(200, 160, generator=generator).to(torch.float8_e4m3fn)
    scale = {
        "tensor": torch.tensor([0.5]),
        "channel": torch.rand(200, 1, generator=generator) + 0.1,
        "block": torch.rand(2, 2, generator=generator) + 0.1,
    }[kind]
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :160] if kind == "block" else scale
    name = "weight_scale_inv" if kind == "block" else "weight_scale"
    return {"lm_head.weight": values, f"lm_head.{name}": scale}, (values.float() * full).bfloat16()


@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
def test_fp8_rows(kind, tmp_path):
    tensors, expected = fp8_case(kind)
    path = quantised(tmp_path, tensors, 200, 160)
    rows = torch.tensor([199, 0, 128, 127])
    assert torch.equal(verifier_weights(path).head, expected)
    assert torch.equal(verifier_weights(path, rows).head, expected[rows])


def fp4_case(style: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A [64, 32] NVFP4 head whose nibbles are 0, 1, 2, ... and what it means, written out value by value."""
    codes = torch.arange(64 * 32).reshape(64, 32) * 7 % 16
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = torch.tensor([[table[int(c) % 8] * (-1 if c >= 8 else 1) for c in row] for row in codes])
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    block = (torch.arange(128).reshape(64, 2) % 11 + 1).float().to(torch.float8_e4m3fn)
    whole = torch.tensor([8.0])
    scale = block.float().repeat_interleave(16, 1)
    if style == "compressed":
        names = {"lm_head.weight_packed": packed, "lm_head.weight_scale": block, "lm_head.weight_global_scale": whole}
        return names, (values * scale / 8.0).bfloat16()
    names = {"lm_head.weight": packed, "lm_head.weight_scale": block, "lm_head.weight_scale_2": whole}
    return names, (values * scale * 8.0).bfloat16()


@pytest.mark.parametrize("style", ["compressed", "modelopt"])
def test_nvfp4_rows_unpack_as_the_whole_does(style, tmp_path):
    tensors, expected = fp4_case(style)
    path = quantised(tmp_path, tensors)
    assert torch.equal(verifier_weights(path).head, expected)
    assert torch.equal(verifier_weights(path, ROWS).head, expected[ROWS])


@pytest.mark.parametrize(
    "tensors",
    [
        {"lm_head.weight": torch.zeros(64, 32, dtype=torch.int8)},
        {"lm_head.weight": torch.zeros(64, 32, dtype=torch.float8_e4m3fn)},
        {"lm_head.weight": torch.zeros(64, 32, dtype=torch.float8_e4m3fn), "lm_head.weight_scale": torch.ones(7)},
        {"lm_head.weight": torch.zeros(64, 16, dtype=torch.uint8), "lm_head.weight_scale": torch.ones(64, 2)},
    ],
    ids=["int8", "no scale", "odd scale", "scale of another dtype"],
)
def test_other_layouts_are_refused_with_name_dtype_and_shape(tensors, tmp_path):
    weight = tensors["lm_head.weight"]
    with pytest.raises(InputError) as error:
        verifier_weights(quantised(tmp_path, tensors))
    for part in ("lm_head.weight", str(weight.dtype), str(tuple(weight.shape))):
        assert part in str(error.value)


# --- fingerprint -------------------------------------------------------------------------------------------------------


def test_fingerprint_tells_weights_apart_and_not_places(tmp_path):
    first = verifier_fingerprint(toy_llama(tmp_path / "a"))
    assert verifier_fingerprint(toy_llama(tmp_path / "b")) == first
    assert verifier_fingerprint(toy_llama(tmp_path / "c", seed=1)) != first
    changed = rewrite(tmp_path / "b", lambda t: {k: v + (k == "lm_head.weight") for k, v in t.items()})
    assert verifier_fingerprint(changed) != first
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert verifier_fingerprint(edit_config(tmp_path / "a", rms_norm_eps=config["rms_norm_eps"] * 2)) != first
