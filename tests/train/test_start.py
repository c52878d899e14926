"""The draft that a run starts from: sizes of every kind of verifier, and frozen parts that give the verifier's own logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train.runs import run_config, write_chats
from verifiers import toy_gemma3, toy_glm5, toy_granite, toy_llama, toy_llama_rope, toy_llama_tied, toy_qwen3

from eagle3_fast.errors import InputError
from eagle3_fast.extract.verifier import Verifier
from eagle3_fast.ops import linear_divergence
from eagle3_fast.prepare.shards import prepare
from eagle3_fast.train.start import objective, start_draft

VERIFIERS = [toy_llama, toy_llama_tied, toy_llama_rope, toy_qwen3, toy_gemma3, toy_granite, toy_glm5]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    write_chats(tmp_path / "chats.jsonl", 20)
    return tmp_path


@pytest.mark.parametrize("write", VERIFIERS, ids=lambda write: write.__name__)
def test_frozen_parts_give_the_verifiers_own_distribution(chats: Path, write: object) -> None:
    """Verifier rows through the draft's norm, head and cap: the log-sum-exp and top token of the verifier's own logits."""
    folder = write(chats / "verifier")
    config = run_config(chats, folder)
    prepare(config)
    draft = start_draft(config)
    verifier = Verifier(folder, [1, 3, 5], torch.float32)
    ids = torch.arange(8, 30)
    states, logits = verifier.hidden_states([ids])[0], verifier.logits(ids)
    mapped = logits[:, torch.arange(24) + draft.d2t]
    rows = torch.arange(len(ids))
    result = linear_divergence(
        torch.zeros(len(ids), draft.config.transformer_layer_config.hidden_size),
        draft.lm_head.weight,
        draft.verifier_norm(states[:, -1]),
        draft.verifier_lm_head.weight,
        rows,
        torch.ones(len(ids)),
        {"kl_div": 1.0},
        draft.verifier_softcap,
    )
    assert torch.allclose(result.verifier_lse_M, mapped.logsumexp(-1), atol=2e-3)
    decided = mapped.topk(2).values.diff().abs().squeeze(1) > 1e-2
    assert torch.equal(result.verifier_top1_M[decided], mapped.argmax(-1)[decided])


@pytest.mark.parametrize("write", VERIFIERS, ids=lambda write: write.__name__)
def test_the_draft_takes_the_verifiers_sizes(chats: Path, write: object) -> None:
    folder = write(chats / "verifier")
    config = run_config(chats, folder)
    prepare(config)
    layer = start_draft(config).config.transformer_layer_config
    assert (layer.vocab_size, layer.model_type, layer.num_hidden_layers) == (64, "llama", 1)
    assert layer.num_attention_heads % layer.num_key_value_heads == 0
    assert layer.tie_word_embeddings is False
    if write is toy_llama_rope:
        assert (layer.rope_parameters["rope_type"], layer.rope_parameters["rope_theta"]) == ("llama3", 500000.0)


def test_a_tied_verifier_leaves_an_untied_draft_with_its_own_head(chats: Path) -> None:
    config = run_config(chats, toy_llama_tied(chats / "verifier"))
    prepare(config)
    draft = start_draft(config)
    assert draft.lm_head.weight.shape == (24, 32)
    assert torch.equal(draft.lm_head.weight, draft.embed_tokens.weight[torch.arange(24) + draft.d2t])
    assert draft.config.tie_word_embeddings is False


def test_full_vocabulary_needs_no_mapping(chats: Path, toy: Path) -> None:
    config = run_config(chats, toy, **{"train.draft": {"draft_vocab_size": None, "target_layer_ids": [1, 2]}})
    prepare(config)
    draft = start_draft(config)
    assert draft.config.draft_vocab_size == 64
    assert not {"d2t", "t2d"} & draft.state_dict().keys()
    assert draft.config.num_aux == 2


def test_a_draft_config_without_weights_can_be_given(chats: Path, toy: Path) -> None:
    from model.drafts import config_data

    from eagle3_fast.files import write_json

    write_json(chats / "only" / "config.json", config_data({"num_hidden_layers": 2}, draft_vocab_size=24))
    config = run_config(chats, toy, **{"train.draft": {"from_pretrained": str(chats / "only")}})
    prepare(config)
    assert len(start_draft(config).layers) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train.draft": {"full_attention_indices": [1]}}, "full_attention_indices"),
        ({"train.draft": {"target_layer_ids": [1, 9]}}, "target_layer_ids"),
        ({"train.draft": {"draft_vocab_size": 65}}, "draft_vocab_size 65"),
        ({"train.draft": {"token_freq_path": "absent.pt"}}, "absent.pt"),
    ],
)
def test_what_cannot_start_is_one_line(chats: Path, toy: Path, change: dict, message: str) -> None:
    config = run_config(chats, toy, **change)
    prepare(config)
    with pytest.raises(InputError, match=message) as caught:
        start_draft(config)
    assert "\n" not in str(caught.value)


def test_another_verifier_than_the_drafts_is_refused(chats: Path, toy: Path) -> None:
    from eagle3_fast.model.draft import save_draft

    config = run_config(chats, toy)
    prepare(config)
    save_draft(start_draft(config), chats / "draft")
    other = toy_llama(chats / "other", hidden_size=64)
    warm = run_config(chats, other, **{"train.draft": {"from_pretrained": str(chats / "draft"), "draft_vocab_size": None}})
    with pytest.raises(InputError, match="hidden size 32"):
        start_draft(warm)


def test_compat_decides_what_the_file_leaves_open(tmp_path: Path, toy: Path) -> None:
    old = objective(run_config(tmp_path, toy, engine={"compat": "0.3"}))
    assert (old.teacher_forced, old.verifier_norm) == (False, False)
    forced = objective(run_config(tmp_path, toy, engine={"compat": "0.3", "use_off_policy_tokens": True}))
    assert forced.teacher_forced
    new = objective(run_config(tmp_path, toy))
    assert (new.teacher_forced, new.verifier_norm) == (True, True)


def test_compat_03_trains_its_head(chats: Path, toy: Path) -> None:
    config = run_config(chats, toy, engine={"compat": "0.3"})
    prepare(config)
    draft = start_draft(config)
    assert draft.lm_head.weight.requires_grad
    assert draft.lm_head.weight.dtype == torch.float32


def test_a_logit_scale_without_a_norm_is_refused(chats: Path) -> None:
    config = run_config(chats, toy_granite(chats / "verifier"), engine={"compat": "0.3"})
    prepare(config)
    with pytest.raises(InputError, match="logit scale"):
        start_draft(config)


@pytest.mark.parametrize("compat", ["0.9", "0.3"])
def test_the_teacher_stays_what_it_is(chats: Path, toy: Path, compat: str) -> None:
    """A warm start and an optimizer step move the draft's head at most, never the verifier's."""
    from eagle3_fast.model.draft import load_tensors

    config = run_config(chats, toy, engine={"compat": compat})
    prepare(config)
    draft = start_draft(config)
    teacher = draft.verifier_lm_head.weight.clone()
    tensors = draft.exported_tensors(torch.float32)
    tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], 7.0)
    load_tensors(draft, tensors, "test", missing_ok=("verifier_lm_head.weight", "verifier_norm.weight"))
    with torch.no_grad():
        draft.lm_head.weight.add_(1.0)
    assert torch.equal(draft.verifier_lm_head.weight, teacher)


def test_a_draft_that_names_no_aux_layers_takes_those_of_the_run_file(chats: Path, toy: Path) -> None:
    from model.drafts import config_data

    from eagle3_fast.files import write_json

    write_json(chats / "old" / "config.json", config_data(eagle_aux_hidden_state_layer_ids=None))
    config = run_config(chats, toy, **{"train.draft": {"from_pretrained": str(chats / "old"), "target_layer_ids": [2, 3, 5]}})
    prepare(config)
    assert start_draft(config).config.eagle_aux_hidden_state_layer_ids == [2, 3, 5]
