"""The verifier answers every prompt once; a resumed run writes what an undisturbed one writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.prepare import local_answers
from eagle3_fast.prepare.answers import Reply
from eagle3_fast.prepare.conversations import CutConversation, read_conversations
from eagle3_fast.prepare.local_answers import LocalAnswerer, batches
from eagle3_fast.prepare.regenerate import read_prompts, regenerate

Configure = Callable[..., RunConfig]
Write = Callable[..., str]
PROMPTS: list[Any] = [{"prompt": "the question " * (i % 4 + 1) + str(i)} for i in range(7)]


@pytest.fixture
def setup(run_config: Configure, write_jsonl: Write, answering_verifier: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    def make(rows: list[Any] = PROMPTS, name: str = "chats.jsonl", **section: Any) -> RunConfig:
        settings = {"prompts": [write_jsonl(rows)], "output": str(tmp_path / name), "max_new_tokens": 6, "batch_size": 2}
        return run_config(answering_verifier, regenerate=settings | section)

    return make


def written(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(config.regenerate.output).read_text().splitlines()]


def test_replies_are_the_verifiers_own(setup: Callable[..., RunConfig], answering_verifier: Path) -> None:
    config = setup()
    manifest = regenerate(config)
    rows = written(config)
    assert [row["id"] for row in rows] == list(range(7))
    assert sum(manifest["counts"].values()) == 7
    model = AutoModelForCausalLM.from_pretrained(answering_verifier, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(answering_verifier)
    agree = 0
    for row, prompt in zip(rows, PROMPTS, strict=True):
        user, assistant = row["messages"]
        assert user == {"role": "user", "content": prompt["prompt"]}
        ids = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        agree += tokenizer.decode(alone, skip_special_tokens=False).removesuffix("<|im_end|>") == assistant["content"]
    assert agree >= 6  # a bfloat16 tie may fall otherwise in a padded batch


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_killed_run_goes_on(setup: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    undisturbed = setup(name="undisturbed.jsonl", temperature=temperature)
    regenerate(undisturbed)
    config = setup(temperature=temperature)
    converse, calls = local_answers.converse, []

    def killed_at_the_third(batch: Any, reply: Any) -> Any:
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return converse(batch, reply)

    monkeypatch.setattr(local_answers, "converse", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        regenerate(config)
    partial = Path(config.regenerate.output + ".partial")
    assert not Path(config.regenerate.output).exists()
    lines = partial.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    partial.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # the last line half written
    regenerate(config)
    assert written(config) == written(undisturbed)
    assert len(calls) == 3 + 3  # the batch of the half line, and the two that were left
    assert not partial.exists()
    regenerate(config)
    assert len(calls) == 6


def test_other_settings_are_refused(setup: Callable[..., RunConfig], tmp_path: Path) -> None:
    regenerate(setup())
    for change in ({"max_new_tokens": 5}, {"temperature": 0.5}, {"rows": PROMPTS[:3]}):
        with pytest.raises(InputError, match="was begun with another"):
            regenerate(setup(**change))
    regenerate(setup(batch_size=3))  # does not decide what greedy replies say
    (tmp_path / "mine.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="was not made by regenerate"):
        regenerate(setup(name="mine.jsonl"))


def test_settings_bind_no_one_before_the_first_answer(setup: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(local_answers, "converse", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        regenerate(setup())
    regenerate(setup(max_new_tokens=5))


def test_text_that_looks_like_line_ends_stays_one_row(setup: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\u2028b\x85c\x0cd\r\ne"
    monkeypatch.setattr(LocalAnswerer, "reply", lambda self, chats: [Reply(text, "stop", 1) for _ in chats])
    config = setup()
    regenerate(config)
    rows = Path(config.regenerate.output).read_bytes().splitlines()
    assert [json.loads(row)["messages"][1]["content"] for row in rows] == [text] * 7


def test_a_prompt_that_was_answered_twice_is_one_row(setup: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    config = setup()
    answers = LocalAnswerer.answers

    def twice(self: LocalAnswerer, *arguments: Any) -> Any:
        for rows, tokens in answers(self, *arguments):
            yield rows, tokens
            yield rows, tokens

    monkeypatch.setattr(LocalAnswerer, "answers", twice)
    assert sum(regenerate(config)["counts"].values()) == 7
    assert [row["id"] for row in written(config)] == list(range(7))


def test_every_user_turn_is_answered_in_sequence(setup: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def reply(self: LocalAnswerer, chats: list[Any]) -> list[Reply]:
        asked.extend(" | ".join(message["content"] for message in chat) for chat in chats)
        kinds = {"empty": ("", "empty reply"), "long": ("cut", "length")}
        return [Reply(*kinds.get(chat[-1]["content"], (f"re {chat[-1]['content']}", "stop")), 1) for chat in chats]

    monkeypatch.setattr(LocalAnswerer, "reply", reply)
    turns = [{"role": "system", "content": "s"}] + [
        {"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "old"), ("user", "b")]
    ]
    tool = [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}]
    rows = [
        {"messages": turns},
        {"prompt": "empty"},
        {"data": ["long", "old", "never asked"]},
        {"messages": tool},
        {"text": "?"},
    ]
    config = setup(rows=rows, batch_size=8)
    manifest = regenerate(config)
    assert manifest["counts"] == {
        "stop": 1, "empty reply": 1, "length": 1, "no user turn to answer": 1, "unknown form: keys text": 1,
    }  # fmt: skip
    assert [[message["content"] for message in row["messages"]] for row in written(config)] == [
        ["s", "a", "re a", "b", "re b"],
        ["long", "cut"],
    ]
    assert "s | a | re a | b" in asked
    chats = list(read_conversations([config.regenerate.output]))
    assert [isinstance(chat, CutConversation) for chat in chats] == [False, True]


def test_prompts_without_room_are_counted(setup: Callable[..., RunConfig]) -> None:
    manifest = regenerate(setup(rows=[{"prompt": "why " * 200}, {"prompt": "the"}]))
    assert manifest["counts"].pop("prompt too long") == 1
    assert sum(manifest["counts"].values()) == 1


def test_batches_hold_like_lengths_and_every_prompt_once(write_jsonl: Write) -> None:
    prompts, _ = read_prompts([write_jsonl([{"prompt": "x" * (i * 37 % 50 + 1)} for i in range(100)])])
    cut = list(batches(prompts, 4))
    assert sorted(prompt.id for batch in cut for prompt in batch) == list(range(100))
    assert max(max(p.length for p in batch) - min(p.length for p in batch) for batch in cut[:16]) <= 8
    with pytest.raises(InputError, match="no prompts found"):
        read_prompts([write_jsonl([{"text": "?"}])])
