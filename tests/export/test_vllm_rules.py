"""The exported files under vLLM's own reading rules give what the trainer's draft gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_fast.export.check import causal_attention
from eagle3_fast.model.config import DraftConfig
from eagle3_fast.model.draft import Draft, save_draft
from tests.export.drafts import MAP, draft_config, toy_draft
from tests.export.vllm_rules import ServedDraft
from tests.verifiers import VOCAB

ROWS = 12
PLAIN: dict[str, Any] = {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False}
CASES: dict[str, DraftConfig] = {
    "default": draft_config(),
    "plain": draft_config(**PLAIN),
    "fc_norm": draft_config(norm_before_fc=False, fc_norm=True),
    "qwen3": draft_config({"model_type": "qwen3"}),
    "two_layers": draft_config({"num_hidden_layers": 2}),
    "no_groups": draft_config({"num_key_value_heads": 4}),
    "attention_bias": draft_config({"attention_bias": True, "mlp_bias": True}),
    "wide_heads": draft_config({"hidden_size": 40, "head_dim": 16}, target_hidden_size=32),
    "narrow_draft": draft_config({"hidden_size": 16}, target_hidden_size=32),
    "full_vocabulary": draft_config(draft_vocab_size=VOCAB),
    "four_aux": draft_config(eagle_aux_hidden_state_layer_ids=[0, 1, 4, 6]),
    "four_aux_qwen3": draft_config({"model_type": "qwen3"}, eagle_aux_hidden_state_layer_ids=[0, 1, 4, 6]),
    "window": draft_config({"layer_types": ["sliding_attention"], "sliding_window": 4, "use_sliding_window": True}),
}


def windowed(draft: Draft) -> Any:
    """The draft's own attention over one document: causal, within the first layer's window."""
    window = draft.config.transformer_layer_config.window(0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ago = torch.arange(len(q))[:, None] - torch.arange(len(k))[None]
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum("nqd,tqd->qnt", q, k.repeat_interleave(groups, 1)) / q.shape[-1] ** 0.5
        scores = scores.masked_fill((ago < 0) | (ago >= (window or len(k))), -torch.inf)
        return torch.einsum("qnt,tqd->nqd", scores.softmax(-1), v.repeat_interleave(groups, 1))

    return attend


@torch.no_grad()
def own_logits(draft: Draft, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Draft logits at the ids of the verifier's vocabulary, -inf elsewhere, and the next hidden state."""
    draft = draft.double()
    normed, hidden = draft.step(
        draft.embed(tokens), hidden, torch.arange(1, len(tokens) + 1), [windowed(draft)] * len(draft.layers)
    )
    logits = normed @ draft.lm_head.weight.T
    full = logits.new_full((len(tokens), draft.config.verifier_vocab_size), -torch.inf)
    full[:, draft.verifier_id(torch.arange(draft.config.draft_vocab_size))] = logits
    return full, hidden


def inputs(draft: Draft) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (ROWS,), generator=generator)
    return tokens, torch.randn(ROWS, draft.fc.in_features, generator=generator).double()


def assert_computes_as(served: Any, draft: Draft) -> None:
    """An engine's fused states, logits and handed-on states are the trainer's own."""
    tokens, aux = inputs(draft)
    with torch.no_grad():
        hidden = draft.double().fuse(aux)
    torch.testing.assert_close(served.combine(aux), hidden, rtol=1e-5, atol=1e-5)
    logits, after = served.forward(tokens, hidden, torch.arange(ROWS))
    expected, own_after = own_logits(draft, tokens, hidden)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after, own_after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_engine_computes_what_the_trainer_computes(name: str, tmp_path: Path) -> None:
    draft = toy_draft(CASES[name])
    save_draft(draft, tmp_path, torch.float32)
    assert_computes_as(ServedDraft(tmp_path, VOCAB), draft)


@pytest.mark.parametrize("norm_output", [False, True])
def test_next_step_gets_the_normed_state_only_where_the_flag_says_so(norm_output: bool, tmp_path: Path) -> None:
    draft = toy_draft(draft_config(norm_output=norm_output))
    save_draft(draft, tmp_path, torch.float32)
    served = ServedDraft(tmp_path, VOCAB)
    tokens, aux = inputs(draft)
    logits, after = served.forward(tokens, served.combine(aux), torch.arange(ROWS))
    head = draft.double().lm_head.weight.detach()
    torch.testing.assert_close(after @ head.T if norm_output else served.norm(after, "norm") @ head.T, logits[:, list(MAP)])
    assert norm_output or not torch.allclose(after @ head.T, logits[:, list(MAP)], atol=1e-2)


def test_cached_step_equals_one_pass(tmp_path: Path) -> None:
    """The engine drafts token by token behind its cache; a chain must be what one pass over all rows is."""
    draft = toy_draft(CASES["window"])
    save_draft(draft, tmp_path, torch.float32)
    whole, split = ServedDraft(tmp_path, VOCAB), ServedDraft(tmp_path, VOCAB)
    tokens, aux = inputs(draft)
    hidden, positions = whole.combine(aux), torch.arange(ROWS)
    expected, _ = whole.forward(tokens, hidden, positions)
    split.forward(tokens[:-1], hidden[:-1], positions[:-1])
    logits, _ = split.forward(tokens[-1:], hidden[-1:], positions[-1:])
    torch.testing.assert_close(logits, expected[-1:])


def test_absent_residual_flag_means_true(tmp_path: Path) -> None:
    draft = toy_draft(draft_config(**PLAIN))
    save_draft(draft, tmp_path, torch.float32)
    edit_config(tmp_path, lambda config: config.pop("norm_before_residual"))
    tokens, aux = inputs(draft)
    with torch.no_grad():
        hidden = draft.double().fuse(aux)
    logits, _ = ServedDraft(tmp_path, VOCAB).forward(tokens, hidden, torch.arange(ROWS))
    assert not torch.allclose(logits[:, list(MAP)], own_logits(draft, tokens, hidden)[0][:, list(MAP)], atol=1e-2)


def test_absent_layer_ids_are_guessed_with_a_warning(tmp_path: Path) -> None:
    save_draft(toy_draft(), tmp_path, torch.float32)
    edit_config(tmp_path, lambda config: config.pop("eagle_aux_hidden_state_layer_ids"))
    with pytest.warns(UserWarning, match="guesses"):
        ServedDraft(tmp_path, VOCAB)


@pytest.mark.parametrize("change", ["lm_head.weight", "d2t", "t2d", "embed_tokens.weight", "input_norm.weight", "extra"])
def test_engine_refuses_missing_and_extra_tensors(change: str, tmp_path: Path) -> None:
    save_draft(toy_draft(), tmp_path, torch.float32)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(change, None) is None and tensors.update({change: torch.ones(1)}))
    with pytest.raises(ValueError, match=change):
        ServedDraft(tmp_path, VOCAB)


def test_remaps_only_a_reduced_vocabulary(tmp_path: Path) -> None:
    save_draft(toy_draft(), tmp_path / "reduced", torch.float32)
    save_draft(toy_draft(CASES["full_vocabulary"]), tmp_path / "full", torch.float32)
    reduced, full = ServedDraft(tmp_path / "reduced", VOCAB), ServedDraft(tmp_path / "full", VOCAB)
    assert torch.equal(reduced.scatter(torch.zeros(1, len(MAP))).isfinite().nonzero()[:, 1], torch.tensor(MAP))
    assert full.scatter(torch.zeros(1, VOCAB)).isfinite().all()
    assert "d2t" not in full.weights


def test_probe_attention_is_the_draft_s_own() -> None:
    draft = toy_draft()
    q, k, v = (torch.randn(5, heads, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    torch.testing.assert_close(causal_attention(q, k, v), windowed(draft)(q, k, v))


def edit_config(folder: Path, edit: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
