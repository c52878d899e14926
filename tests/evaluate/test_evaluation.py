"""The verb on real files: prompts in, a trained draft from its exported folder, results out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from eagle3_fast.config import EvaluateSection
from eagle3_fast.errors import InputError
from eagle3_fast.evaluate.acceptance import Pass
from eagle3_fast.evaluate.choice import Greedy
from eagle3_fast.evaluate.decode import Decoded, plain_decode
from eagle3_fast.evaluate.evaluation import Comparison, evaluate, first_difference, matching_verifier, summarise, table
from eagle3_fast.evaluate.prompts import Prompt, read_prompts
from eagle3_fast.extract.verifier import Verifier
from eagle3_fast.extract.weights import verifier_weights
from eagle3_fast.model.draft import Draft, load_draft, save_draft
from eagle3_fast.model.ttt import Objective, run_ttt
from eagle3_fast.records import HiddenStates
from eagle3_fast.train.packing import pack
from tests.export.drafts import draft_config, map_vocabulary, run_config, toy_draft
from tests.verifiers import toy_llama, toy_tokenizer

AUX = [1, 2, 4]
OVERFIT_STEPS = 90
CHAT = {"messages": [{"role": "user", "content": "how are you"}, {"role": "assistant", "content": "well"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return toy_llama(tmp_path_factory.mktemp("verifier"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "chats.jsonl"
    rows = [{"prompt": "hello there"}, CHAT, {"prompt": "what is this?"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory, folder) -> Path:
    path = tmp_path_factory.mktemp("draft")
    draft = toy_draft()
    method = draft.config.speculators_config
    named = method.model_copy(update={"verifier": method.verifier.model_copy(update={"name_or_path": str(folder)})})
    draft.config = draft.config.model_copy(update={"speculators_config": named})
    save_draft(draft, path)
    return path


def config(folder: Path | str, prompts: Path, output: Path, **section):
    settings = {"prompts": [str(prompts)], "max_new_tokens": 12, "output": str(output / "evaluation.json"), **section}
    return run_config(folder, output / "draft", evaluate=settings)


def test_results_are_returned_written_and_shown(folder, prompts, draft_folder, tmp_path):
    result = evaluate(config(folder, prompts, tmp_path), draft_folder)
    assert json.loads((tmp_path / "evaluation.json").read_text()) == result
    assert {key: result[key] for key in ("draft", "draft_tokens", "temperature", "max_new_tokens", "dtype")} == {
        "draft": str(draft_folder),
        "draft_tokens": 3,
        "temperature": 0.0,
        "max_new_tokens": 12,
        "dtype": "float32",
    }
    (entry,) = result["prompt_sets"]
    assert (entry["name"], entry["prompts"], entry["identical"], entry["first_difference"]) == ("chats", 3, 3, None)
    assert entry["tau"] == entry["tokens"] / entry["passes"]
    assert entry["tokens"] <= 3 * 11
    assert len(entry["alpha"]) == len(entry["conditional"]) == 3
    assert entry["plain_tokens_per_s"] > 0
    assert entry["speculative_tokens_per_s"] > 0
    console = Console(width=200, record=True)
    table(result, console)
    text = console.export_text()
    assert "3/3" in text
    assert "the verifier's own token included" in text


def test_the_drafts_own_config_names_the_verifier_where_the_run_file_does_not(prompts, draft_folder, tmp_path):
    result = evaluate(config("", prompts, tmp_path, max_prompts=2, max_new_tokens=3), draft_folder)
    assert result["prompt_sets"][0]["prompts"] == 2


def test_sampling_claims_no_identity_and_repeats_itself(folder, prompts, draft_folder, tmp_path):
    runs = [evaluate(config(folder, prompts, tmp_path, temperature=1.0), draft_folder)["prompt_sets"][0] for _ in range(2)]
    assert runs[0]["identical"] is None
    assert runs[0]["alpha"] == runs[1]["alpha"]
    assert runs[0]["tokens"] == runs[1]["tokens"]


def test_bfloat16_leaves_the_rotary_table_in_float32(folder, draft_folder, monkeypatch):
    monkeypatch.setattr("eagle3_fast.precision.cpu_multiplies_bfloat16", lambda: True)
    draft = load_draft(draft_folder)
    section = EvaluateSection(dtype="bfloat16")
    verifier = matching_verifier(run_config(folder, Path("unused")).train.verifier, draft, section)
    assert verifier.dtype == draft.fc.weight.dtype == torch.bfloat16
    assert draft.rotary.inv_freq.dtype == torch.float32


def test_the_first_difference_is_named():
    section = EvaluateSection(draft_tokens=1)
    same = Decoded([1, 2, 3], [Pass(1, 1, 2)], 1.0)
    pairs = [
        Comparison(Prompt("f:1", [1]), same, same),
        Comparison(Prompt("f:2", [1]), same, Decoded([1, 5], [Pass(1, 0, 1)], 1.0)),
    ]
    entry = summarise("f", pairs, section)
    assert (entry["prompts"], entry["identical"]) == (2, 1)
    assert entry["first_difference"] == {"source": "f:2", "token": 1, "plain": 2, "speculative": 5}
    assert entry["plain_tokens_per_s"] == 2.0
    assert entry["speculative_tokens_per_s"] == 1.5
    ended = Comparison(Prompt("f:3", [1]), same, Decoded([1, 2]))
    assert first_difference(ended) == {"source": "f:3", "token": 2, "plain": 3, "speculative": None}


def test_prompts_end_before_the_last_reply(prompts, tmp_path):
    tokenizer = toy_tokenizer()
    texts = [tokenizer.decode(prompt.token_ids) for prompt in read_prompts(str(prompts), tokenizer, None, None)]
    assert texts[0] == "<|user|>hello there</s><|assistant|>"
    assert texts[1] == "<|user|>how are you</s><|assistant|>"


def test_unusable_prompts_are_left_out_and_counted(tmp_path, caplog):
    path = tmp_path / "mixed.jsonl"
    rows = [{"prompt": "a" * 50}, {"prompt": "ok"}, {"input_ids": [1], "loss_mask": [1]}, {"image": "x", "prompt": "y"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [prompt.source for prompt in read_prompts(str(path), toy_tokenizer(), None, 20)] == [f"{path}:2"]
    assert "1 x longer than 20 tokens" in caplog.text
    assert "already tokenized" in caplog.text
    assert "has images" in caplog.text
    with pytest.raises(InputError, match=r"mixed\.jsonl: no usable prompts"):
        read_prompts(str(path), toy_tokenizer(), None, 2)


def test_what_cannot_be_evaluated_is_refused(folder, prompts, draft_folder, tmp_path):
    with pytest.raises(InputError, match=r"evaluate\.prompts is empty"):
        evaluate(run_config(folder, draft_folder))
    other = toy_llama(tmp_path / "other", hidden_size=48)
    with pytest.raises(InputError, match=r"made for a verifier of 64 tokens and hidden size 32, but .* has 64 and 48"):
        evaluate(config(other, prompts, tmp_path), draft_folder)
    lost = load_draft(draft_folder)
    lost.d2t.zero_()
    save_draft(lost, tmp_path / "lost")
    with pytest.raises(InputError, match="d2t and t2d"):
        evaluate(config(folder, prompts, tmp_path), tmp_path / "lost")
    assert not (tmp_path / "evaluation.json").exists()


@pytest.mark.parametrize("norm_output", [True, False])
def test_an_overfitted_draft_is_accepted_when_served_from_its_exported_files(norm_output, folder, prompts, tmp_path):
    """One text of 64 tokens learned by heart: of 3 drafts at least 2.8 are accepted, or serving differs from training."""
    first = read_prompts(str(prompts), toy_tokenizer(), 1, None)[0].token_ids
    verifier = Verifier(folder, AUX, torch.float32)
    tokens = first + plain_decode(verifier, first, 64 - len(first), Greedy()).tokens
    vocabulary = torch.tensor(sorted({*tokens, 0}))
    draft = Draft(draft_config(draft_vocab_size=len(vocabulary), norm_output=norm_output))
    overfit(draft, vocabulary, verifier, folder, torch.tensor(tokens))
    save_draft(draft, tmp_path / "draft")
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "hello there"}))
    result = evaluate(config(folder, tmp_path / "one.jsonl", tmp_path, max_new_tokens=64 - len(first)), tmp_path / "draft")
    entry = result["prompt_sets"][0]
    assert entry["identical"] == 1
    assert sum(entry["alpha"]) >= 2.8


def overfit(draft: Draft, vocabulary: torch.Tensor, verifier: Verifier, folder: Path, tokens: torch.Tensor) -> None:
    """Train on one text with frozen embedding and head, as speculators 0.9 does."""
    draft.initialise(0)
    map_vocabulary(draft, vocabulary)
    weights = verifier_weights(folder)
    draft.embed_tokens.weight.data.copy_(weights.embed)
    draft.verifier_norm.weight.data.copy_(weights.norm)
    for head in (draft.lm_head, draft.verifier_lm_head):
        head.weight.data.copy_(weights.head[vocabulary])
    (states,) = verifier.hidden_states([tokens])
    batch = pack([(HiddenStates(tokens, states), torch.ones(len(tokens)))], len(tokens), 3, 32, torch.float32)
    optimizer = torch.optim.Adam([p for p in draft.parameters() if p.requires_grad], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, OVERFIT_STEPS)
    for _ in range(OVERFIT_STEPS):
        optimizer.zero_grad()
        run_ttt(draft, batch, Objective(ttt_steps=3)).loss.backward()
        optimizer.step()
        schedule.step()
