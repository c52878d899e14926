"""Every row form becomes the same chat; what cannot be read or used says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from eagle3_fast.errors import InputError
from eagle3_fast.prepare.conversations import CutConversation, Unusable, parse_row, read_conversations, read_rows
from eagle3_fast.records import Conversation, Message, TokenizedExample

CHAT = (Message("user", "hi"), Message("assistant", "hello"))
FORMS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "hello"}]}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    {"conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    {"data": ["hi", "hello"]},
    {"prompt": "hi", "response": "hello"},
    {"prompt": "hi", "completion": "hello"},
    {"question": "hi", "answer": "hello"},
    {"instruction": "hi", "input": "", "output": "hello"},
    {
        "prompt": "hi",
        "prompt_id": "x",
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
    },
]


@pytest.mark.parametrize("row", FORMS)
def test_forms_agree(row: dict[str, Any]) -> None:
    assert parse_row(row, "f:1") == Conversation(CHAT, "f:1")


def test_reasoning_system_input_and_bare_prompts() -> None:
    thinking = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "4", "reasoning_content": "2+2"}]}
    assert parse_row(thinking, "f:1").messages[1] == Message("assistant", "4", "2+2")  # type: ignore[union-attr]
    bare = parse_row({"prompt": "hi", "system": "be kind"}, "f:1")
    assert bare == Conversation((Message("system", "be kind"), Message("user", "hi")), "f:1")
    about = parse_row({"instruction": "translate", "input": "ja", "output": "yes"}, "f:1")
    assert about.messages[0].content == "translate\n\nja"  # type: ignore[union-attr]


def test_cut_replies_and_tokenized_rows() -> None:
    assert isinstance(parse_row(FORMS[0] | {"finish_reason": "length"}, "f:1"), CutConversation)
    assert not isinstance(parse_row(FORMS[0] | {"finish_reason": "stop"}, "f:1"), CutConversation)
    assert parse_row({"input_ids": [5, 6], "loss_mask": [0, 1]}, "f:1") == TokenizedExample([5, 6], [0, 1])
    both = FORMS[0] | {"input_ids": [5, 6], "loss_mask": [0, True]}
    assert parse_row(both, "f:1") == TokenizedExample([5, 6], [0, 1])
    assert parse_row(both, "f:1", chats=True) == Conversation(CHAT, "f:1")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "x"}, "unknown form: keys text"),
        ([1], "not a JSON object"),
        ({"messages": []}, "no messages"),
        ({"prompt": "cut \ud83d"}, "holds half a Unicode character"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role 'narrator'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "has a content part of type 'image_url'",
        ),
        ({"image": "x.png", "conversations": [{"from": "human", "value": "<image>"}]}, "has images"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "has tool calls"),
        ({"input_ids": [1], "loss_mask": [1, 0]}, "input_ids and loss_mask differ in length"),
        ({"input_ids": [1], "loss_mask": [2]}, "loss_mask holds values other than 0 and 1"),
        ({"input_ids": [1], "loss_mask": [[1]]}, "loss_mask holds values other than 0 and 1"),
        ({"input_ids": [1.5], "loss_mask": [1]}, "input_ids holds values that are no token ids"),
        ({"input_ids": [-1], "loss_mask": [1]}, "input_ids holds values that are no token ids"),
        ({"input_ids": [2**31], "loss_mask": [1]}, "input_ids holds values that are no token ids"),
        ({"input_ids": "1", "loss_mask": [1]}, "input_ids or loss_mask is not a list"),
    ],
)
def test_unusable_rows_have_a_reason(row: Any, reason: str) -> None:
    assert parse_row(row, "f:1") == Unusable("f:1", reason)


def test_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps(row) for row in FORMS[:2]) + "\n\n")
    (tmp_path / "list.json").write_text(json.dumps(FORMS[:2]))
    (tmp_path / "held.json").write_text(json.dumps({"version": 1, "data": FORMS[:2]}))
    (tmp_path / "lines.json").write_text("\n".join(json.dumps(row) for row in FORMS[:2]))
    (tmp_path / "one.json").write_text(json.dumps(FORMS[0]))
    table = datasets.Dataset.from_list([{"prompt": "hi", "response": "hello"}] * 2)
    table.to_parquet(str(tmp_path / "table.parquet"))
    table.save_to_disk(str(tmp_path / "folder"))
    for name, rows in [
        ("lines.jsonl", 2),
        ("list.json", 2),
        ("held.json", 2),
        ("lines.json", 2),
        ("one.json", 1),
        ("table.parquet", 2),
    ]:
        chats = list(read_conversations([str(tmp_path / name)]))
        assert [chat.messages for chat in chats] == [CHAT] * rows, name
        assert chats[0].source == f"{tmp_path / name}:1"
    assert [chat.messages for chat in read_conversations([str(tmp_path / "folder")])] == [CHAT] * 2
    tokenized = datasets.Dataset.from_dict({"input_ids": [[5, 6]], "loss_mask": [[0, 1]]}).with_format("torch")
    tokenized.save_to_disk(str(tmp_path / "tensors"))
    assert list(read_rows([str(tmp_path / "tensors")])) == [TokenizedExample([5, 6], [0, 1])]
    assert len(list(read_rows([str(tmp_path / "list.json"), str(tmp_path / "lines.jsonl")], max_samples=3))) == 3


def test_unreadable_files_name_the_place(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": \n')
    (tmp_path / "bad.json").write_text('[\n{"prompt": }]')
    (tmp_path / "bad.parquet").write_text("no")
    (tmp_path / "notes.txt").write_text("no")
    (tmp_path / "empty").mkdir()
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"a": 1}])}).save_to_disk(str(tmp_path / "splits"))
    for name, words in [
        ("bad.jsonl", "bad.jsonl:3: not valid JSON"),
        ("bad.json", "bad.json:2: not valid JSON"),
        ("bad.parquet", "not a readable Parquet file"),
        ("notes.txt", "unknown kind of data file"),
        ("absent.jsonl", "no such data file"),
        ("empty", "no state.json"),
        ("splits", "name one of its folders: train"),
    ]:
        with pytest.raises(InputError, match=words) as failure:
            list(read_rows([str(tmp_path / name)]))
        assert "\n" not in str(failure.value)
