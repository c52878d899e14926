"""Source rows of any known form, as `Conversation`s.

Files: JSON (a list, or an object that holds one list), JSONL, Parquet, or a folder written by `datasets.save_to_disk`.
Row forms, recognised by their keys:

    messages        OpenAI: role / content, content a string or a list of text parts; reasoning_content or reasoning
    conversations   ShareGPT: from / value
    data            UltraChat: user and assistant strings in turn
    prompt, instruction or question, with or without response, completion, answer or output
    input_ids + loss_mask: already tokenized, passed through whatever else the row holds

A file that cannot be read is an `InputError`; a row that cannot be used is an `Unusable` with its reason, for the caller to
count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3_fast.errors import InputError
from eagle3_fast.records import Conversation, Message, TokenizedExample

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}
SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell it, no file and no tokenizer can take it
CHAT_KEYS = ("messages", "conversations", "data")
PROMPT_KEYS = ("prompt", "instruction", "question")
REPLY_KEYS = ("response", "completion", "answer", "output")


@dataclass(frozen=True)
class Unusable:
    """A source row that cannot become a training row, and why."""

    source: str
    reason: str


class CutConversation(Conversation):
    """A chat whose last reply was cut at a length limit: the verifier did not end that turn, so its end is not supervised."""


Row = Conversation | TokenizedExample | Unusable


class RowError(ValueError):
    """The reason why one row cannot be used."""


def read_rows(paths: list[str], max_samples: int | None = None, chats: bool = False) -> Iterator[Row]:
    """Every source row of `paths` in order, at most `max_samples` of them. Raises InputError for a file that cannot be read.

    chats: a row that holds a chat and its token ids is read as the chat.
    """
    if not paths:
        raise InputError("no data files are named: set prepare.data (or regenerate.prompts) to at least one file")
    return (parse_row(row, source, chats) for source, row in islice(_raw_rows(paths), max_samples))


def read_conversations(paths: list[str], max_samples: int | None = None) -> Iterator[Conversation]:
    """The rows of `paths` that are chats, whether answered or not."""
    return (row for row in read_rows(paths, max_samples, chats=True) if isinstance(row, Conversation))


def data_files(path: str) -> list[Path]:
    """The files that hold the rows of one data path. Raises InputError when there is nothing to read."""
    root = Path(path)
    if root.is_file():
        return [root]
    if not root.exists():
        raise InputError(f"{path}: no such data file")
    if (root / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(child.name for child in root.iterdir() if child.is_dir()))
        raise InputError(f"{path}: holds several splits; name one of its folders: {splits}")
    if not (root / "state.json").is_file():
        raise InputError(f"{path}: not a folder written by datasets.save_to_disk (no state.json); name the files in it")
    return sorted(child for child in root.iterdir() if child.is_file())


def _raw_rows(paths: list[str]) -> Iterator[tuple[str, Any]]:
    """(file:row, row) of every file; rows count from 1, and in JSONL they are line numbers."""
    readers = {".json": _json, ".jsonl": _jsonl, ".parquet": _parquet}
    for path in paths:
        data_files(path)
        reader = _arrow if Path(path).is_dir() else readers.get(Path(path).suffix)
        if reader is None:
            raise InputError(f"{path}: unknown kind of data file; known: .json, .jsonl, .parquet, datasets folders")
        for number, row in reader(Path(path)):
            yield f"{path}:{number}", row


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise InputError(f"{path}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno})") from None
        yield from _jsonl(path)  # JSON Lines under the name .json is common
        return
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error})") from None
    yield from enumerate(_rows_of(document), start=1)


def _rows_of(document: Any) -> list[Any]:
    """The list of rows in a JSON document: itself, or the one list of objects that it holds; else it is one row."""
    if isinstance(document, list):
        return document
    lists = [value for value in document.values() if isinstance(value, list)] if isinstance(document, dict) else []
    if len(lists) == 1 and lists[0] and all(isinstance(row, dict) and not {"role", "from"} & row.keys() for row in lists[0]):
        return lists[0]
    return [document]


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                yield number, json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise InputError(f"{path}:{number}: not valid JSON ({error}); correct or delete the line") from None


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{path}: not a readable Parquet file ({error})") from None


def _arrow(path: Path) -> Iterator[tuple[int, Any]]:
    import datasets

    rows = datasets.load_from_disk(str(path))
    yield from enumerate(rows.with_format(None), start=1)  # others store one, under which lists come as tensors


def parse_row(row: Any, source: str, chats: bool = False) -> Row:
    """One source row in our form; `chats` as in `read_rows`."""
    try:
        if not isinstance(row, dict):
            raise RowError("not a JSON object")
        tokenized = row.get("input_ids") is not None and row.get("loss_mask") is not None
        if tokenized and not (chats and any(row.get(key) for key in CHAT_KEYS)):
            return _tokenized(row)
        if row.get("image") or row.get("images"):
            raise RowError("has images")
        if row.get("tools"):
            raise RowError("has a tools schema")
        messages = tuple(_messages(row))
        if not messages:
            raise RowError("no messages")
        if any(SURROGATE.search(message.content + (message.reasoning or "")) for message in messages):
            raise RowError("holds half a Unicode character")
        kind = CutConversation if row.get("finish_reason") == "length" else Conversation
        return kind(messages, source)
    except RowError as reason:
        return Unusable(source, str(reason))


def _tokenized(row: dict[str, Any]) -> TokenizedExample:
    ids, mask = row["input_ids"], row["loss_mask"]
    if not (isinstance(ids, list) and isinstance(mask, list)):
        raise RowError("input_ids or loss_mask is not a list")
    if len(ids) != len(mask):
        raise RowError("input_ids and loss_mask differ in length")
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise RowError("input_ids holds values that are no token ids")
    if not all(flag in (0, 1) for flag in mask):
        raise RowError("loss_mask holds values other than 0 and 1")
    return TokenizedExample(ids, [int(flag) for flag in mask])


def _messages(row: dict[str, Any]) -> Iterator[Message]:
    turns = next((row[key] for key in CHAT_KEYS if isinstance(row.get(key), list)), None)
    if turns is not None:
        strings = bool(turns) and all(isinstance(turn, str) for turn in turns)
        chat = [_alternating(index, turn) if strings else _message(turn) for index, turn in enumerate(turns)]
    else:
        chat = _prompt_and_reply(row)
    if isinstance(row.get("system"), str) and row["system"].strip() and chat and chat[0].role != "system":
        yield Message("system", row["system"])
    yield from chat


def _alternating(index: int, text: str) -> Message:
    return Message("user" if index % 2 == 0 else "assistant", text)


def _prompt_and_reply(row: dict[str, Any]) -> list[Message]:
    prompt = next((row[key] for key in PROMPT_KEYS if isinstance(row.get(key), str)), None)
    if prompt is None:
        raise RowError(f"unknown form: keys {', '.join(sorted(map(str, row)))}"[:120])
    if isinstance(row.get("input"), str) and row["input"].strip():  # Alpaca: the text that the instruction is about
        prompt = f"{prompt}\n\n{row['input']}"
    reply = next((row[key] for key in REPLY_KEYS if isinstance(row.get(key), str)), None)
    return [Message("user", prompt)] if reply is None else [Message("user", prompt), Message("assistant", reply)]


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise RowError("a turn is not an object")
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(str(name).lower())
    if role is None:
        raise RowError(f"unknown role {name!r}")
    if turn.get("tool_calls"):
        raise RowError("has tool calls")
    reasoning = turn.get("reasoning_content") or turn.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, str):
        raise RowError("reasoning is not text")
    return Message(role, _text(turn.get("content", turn.get("value"))), reasoning)


def _text(content: Any) -> str:
    """Message content as text: a string, nothing, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("content is neither text nor a list of parts")
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return part["text"]
    raise RowError(
        f"has a content part of type {part.get('type')!r}" if isinstance(part, dict) else "has a content part without type"
    )
