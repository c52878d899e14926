"""`check` names every fault that an engine would pass over in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_fast.errors import InputError
from eagle3_fast.export.check import check
from eagle3_fast.model.draft import load_draft, save_draft
from tests.export.drafts import MAP, draft_config, toy_draft
from tests.export.test_vllm_rules import CASES, edit_config, edit_tensors
from tests.verifiers import VOCAB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_draft(toy_draft(), tmp_path, torch.bfloat16)
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_accepts_every_kind_of_draft(name: str, tmp_path: Path) -> None:
    save_draft(toy_draft(CASES[name]), tmp_path, torch.bfloat16)
    report = check(tmp_path)
    assert report.dtype == "bfloat16"
    assert report.aux_layer_ids == tuple(CASES[name].eagle_aux_hidden_state_layer_ids or ())
    assert report.draft_vocab_size == CASES[name].draft_vocab_size
    assert report.verifier_vocab_size == VOCAB


TENSOR_FAULTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "no head": (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
    "no embedding": (lambda t: t.pop("embed_tokens.weight"), "embed_tokens.weight is missing"),
    "no mapping": (lambda t: (t.pop("d2t"), t.pop("t2d")), "d2t is missing; t2d is missing"),
    "no input norm": (lambda t: t.pop("input_norm.weight"), "input_norm.weight is missing"),
    "extra": (lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.ones(32)}), "q_proj.bias is not part of this config"),
    "shape": (lambda t: t.update({"lm_head.weight": torch.ones(VOCAB, 32).bfloat16()}), r"lm_head.weight is \[64, 32\]"),
    "dtype": (
        lambda t: t.update({"norm.weight": t["norm.weight"].float()}),
        "norm.weight is float32, config.json asks for bfloat16",
    ),
    "integer width": (lambda t: t.update({"d2t": t["d2t"].int()}), "d2t is int32, config.json asks for int64"),
    "integer mask": (lambda t: t.update({"t2d": t["t2d"].long()}), "t2d is int64, config.json asks for bool"),
    "nan": (lambda t: t["fc.weight"][0].fill_(torch.nan), "fc.weight has values that are not finite"),
    "never filled": (lambda t: t["lm_head.weight"].zero_(), "lm_head.weight is all zeros"),
    "not ascending": (lambda t: t["d2t"].copy_(torch.tensor(MAP).flip(0) - torch.arange(24)), "not ascending and distinct"),
    "repeated": (lambda t: t["d2t"].sub_(torch.arange(24)), "not ascending and distinct"),
    "outside": (lambda t: t["d2t"][-1:].fill_(VOCAB), "the verifier has 0..63"),
    "other mask": (lambda t: t["t2d"][3:5].fill_(True), "t2d marks 26 ids that are not the 24"),
    "moved mask": (lambda t: t["t2d"].copy_(t["t2d"].roll(1)), "t2d marks 24 ids that are not the 24"),
}


@pytest.mark.parametrize("name", TENSOR_FAULTS)
def test_names_a_fault_of_the_tensors(name: str, folder: Path) -> None:
    edit, message = TENSOR_FAULTS[name]
    edit_tensors(folder, edit)
    with pytest.raises(InputError, match=message) as caught:
        check(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def in_layer(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["transformer_layer_config"].update(values)


CONFIG_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "residual flag": (lambda c: c.pop("norm_before_residual"), "norm_before_residual is missing"),
    "layer ids": (lambda c: c.pop("eagle_aux_hidden_state_layer_ids"), "eagle_aux_hidden_state_layer_ids is missing"),
    "detection": (lambda c: c.update(model_type="llama"), "hides it from vLLM"),
    "verifier": (lambda c: c["speculators_config"]["verifier"].update(name_or_path=None), "name_or_path is empty"),
    "tokens": (
        lambda c: c["speculators_config"]["proposal_methods"][0].pop("speculative_tokens"),
        "speculative_tokens is missing",
    ),
    "tied": (in_layer(tie_word_embeddings=True), "tie_word_embeddings is true"),
    "quantised": (lambda c: c.update(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    "one dtype": (lambda c: c.pop("torch_dtype"), "torch_dtype"),
    "other dtype": (
        lambda c: c.update(dtype="float32", torch_dtype="float32"),
        "fc.weight is bfloat16, config.json asks for float32",
    ),
    "head dim": (lambda c: c["transformer_layer_config"].pop("head_dim"), "head_dim is missing"),
    "positions": (lambda c: c["transformer_layer_config"].pop("max_position_embeddings"), "max_position_embeddings is missing"),
    "rotary base": (in_layer(rope_theta=5e5), "rope_theta 500000.0 contradicts"),
    "flag without tensor": (lambda c: c.update(norm_before_fc=False), "input_norm.weight is not part"),
    "aux count": (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]), "num_aux_hidden_states must be 4"),
    "stale aux count": (in_layer(num_aux_hidden_states=4), "num_aux_hidden_states must be 3"),
    "bias": (in_layer(attention_bias=True), "q_proj.bias is missing"),
}


@pytest.mark.parametrize("name", CONFIG_FAULTS)
def test_names_a_fault_of_the_config(name: str, folder: Path) -> None:
    edit, message = CONFIG_FAULTS[name]
    edit_config(folder, edit)
    with pytest.raises(InputError, match=message):
        check(folder)


def test_lists_all_faults_at_once(folder: Path) -> None:
    edit_config(folder, lambda config: config.pop("norm_before_residual"))
    edit_tensors(folder, lambda tensors: (tensors.pop("norm.weight"), tensors["fc.weight"].fill_(torch.inf)))
    with pytest.raises(InputError, match=r"norm_before_residual.*norm.weight is missing.*fc.weight has values"):
        check(folder)


def test_refuses_weight_files_beside_the_one(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"model-00001-of-00002\.safetensors"):
        check(folder)


def test_refuses_what_is_no_draft(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        check(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="not a speculators draft"):
        check(tmp_path)


def test_overflowing_logits_are_found(tmp_path: Path) -> None:
    draft = toy_draft()
    with torch.no_grad():
        draft.lm_head.weight.sign_().mul_(3e38)
    save_draft(draft, tmp_path, torch.bfloat16)
    with pytest.raises(InputError, match="logits of draft step 0 are not finite"):
        check(tmp_path)


def test_reload_keeps_every_tensor(tmp_path: Path) -> None:
    """Tied verifier or not, the draft has its own head of its own vocabulary, and untied."""
    draft = toy_draft(draft_config(tie_word_embeddings=False))
    save_draft(draft, tmp_path, torch.float32)
    again = load_draft(tmp_path)
    assert again.lm_head.weight.shape == (24, 32)
    assert again.config.tie_word_embeddings is False
    for name, tensor in draft.exported_tensors(torch.float32).items():
        assert torch.equal(tensor, again.exported_tensors(torch.float32)[name]), name
