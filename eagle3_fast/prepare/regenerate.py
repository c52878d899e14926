"""The verifier answers the prompts itself, so that the draft trains on text that the verifier writes.

Every user turn is answered in sequence, each with the verifier's own earlier replies before it, in this process or by a server
(`regenerate.endpoint`). Rows are appended to `<output>.partial` as they come; when all are done they go to `output` in prompt
order. A kill loses at most what is in work.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.files import read_json, write_json, written_aside
from eagle3_fast.log import logger, progress
from eagle3_fast.prepare.answers import Answerer, Chat, Prompt, Row
from eagle3_fast.prepare.conversations import read_rows
from eagle3_fast.prepare.local_answers import LocalAnswerer
from eagle3_fast.prepare.served_answers import ServedAnswerer
from eagle3_fast.records import Conversation


def regenerate(config: RunConfig) -> dict[str, Any]:
    """Answer `regenerate.prompts` into the JSONL file `regenerate.output`; returns its manifest.

    Rows: `{"id", "messages", "finish_reason"}`, and `"input_ids"`, `"loss_mask"` where a server gives token ids; finish_reason is
    "stop", or "length" when the last reply was cut. The manifest `<output>.manifest.json` holds the settings and counts. Raises
    InputError when the output was begun with other settings, and EndpointError when the server fails; run again to go on.
    """
    section = config.regenerate
    output, partial = Path(section.output), Path(f"{section.output}.partial")
    manifest_path = Path(f"{section.output}.manifest.json")
    prompts, skipped = read_prompts(section.prompts)
    answerer: type[Answerer] = LocalAnswerer if section.endpoint is None else ServedAnswerer
    turns = json.dumps([prompt.turns for prompt in prompts]).encode()
    settings = {"prompts": hashlib.sha256(turns).hexdigest(), **answerer.settings(config)}
    answered = set(_index(partial))
    _claim(output, manifest_path, settings, begun=bool(answered))
    if output.is_file():
        logger.info("%s: already complete, nothing to do", output)
        return dict(read_json(manifest_path))

    if answered:
        logger.info("%s: going on after %d answered prompts", partial, len(answered))
    if len(answered) < len(prompts):
        answers = answerer.load(config).answers(prompts, answered)
        _append(answers, partial, len(answered), len(prompts))
    manifest = {"settings": settings, "counts": _finish(partial, output, skipped)}
    write_json(manifest_path, manifest)
    partial.unlink()
    logger.info("%s: %s", output, ", ".join(f"{count} {name}" for name, count in manifest["counts"].items()))
    return manifest


def read_prompts(paths: list[str]) -> tuple[list[Prompt], Counter[str]]:
    """The prompts of all rows in order, and the rows that have none, counted by reason. Assistant turns are dropped."""
    prompts: list[Prompt] = []
    skipped: Counter[str] = Counter()
    for row in read_rows(paths, chats=True):
        turns = _turns(row) if isinstance(row, Conversation) else ()
        if turns:
            prompts.append(Prompt(len(prompts), turns, sum(len(message["content"]) for message in turns[0])))
        else:
            skipped[getattr(row, "reason", "no user turn to answer")] += 1
    if not prompts:
        raise InputError(f"{', '.join(paths)}: no prompts found ({dict(skipped) or 'the files are empty'})")
    return prompts, skipped


def _turns(conversation: Conversation) -> tuple[Chat, ...]:
    """The messages to send before each reply; none when tool turns make the chat depend on replies that we do not have."""
    turns: list[Chat] = []
    pending: Chat = []
    for message in conversation.messages:
        if message.role == "tool":
            return ()
        if message.role != "assistant":
            pending.append({"role": message.role, "content": message.content})
        if message.role == "user":
            turns.append(pending)
            pending = []
    return tuple(turns)


def _claim(output: Path, manifest_path: Path, settings: dict[str, Any], begun: bool) -> None:
    """Note the settings before the first reply; refuse to mix replies made under different ones."""
    if output.exists() and not manifest_path.is_file():
        raise InputError(f"{output}: exists but was not made by regenerate (no {manifest_path.name}); choose another output")
    if not (manifest_path.is_file() and (output.exists() or begun)):
        write_json(manifest_path, {"settings": settings})
        return
    before = read_json(manifest_path)["settings"]
    changed = [name for name in settings if settings[name] != before.get(name)]
    if changed:
        raise InputError(
            f"{output}: was begun with another {', '.join(changed)}; set regenerate.output to a new file or delete {output}*"
        )


def _index(partial: Path) -> dict[int, tuple[int, str]]:
    """Where in the file the row of each prompt begins, and its finish reason. A last line that a kill left half written is cut off."""
    rows: dict[int, tuple[int, str]] = {}
    if not partial.is_file():
        return rows
    with partial.open("rb") as lines:
        at = 0
        for line in lines:
            if not line.endswith(b"\n"):
                os.truncate(partial, at)
                break
            row = json.loads(line)
            rows.setdefault(row["id"], (at, row["finish_reason"]))
            at += len(line)
    return rows


def _append(answers: Iterable[tuple[list[Row], int]], partial: Path, before: int, total: int) -> None:
    """Add rows to `partial` as they come."""
    generated = 0
    with progress(total=total, initial=before, unit="prompt", desc="regenerate") as bar, partial.open("ab") as lines:
        for rows, tokens in answers:
            lines.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
            lines.flush()
            os.fsync(lines.fileno())
            generated += tokens
            bar.update(len(rows))
            bar.set_postfix({"tokens/s": round(generated / bar.format_dict["elapsed"])})


def _finish(partial: Path, output: Path, skipped: Counter[str]) -> dict[str, int]:
    """Copy the answered rows in prompt order; returns how many rows were written and left out."""
    rows = sorted(_index(partial).items())
    with written_aside(output) as aside, partial.open("rb") as source, aside.open("wb") as target:
        for _, (at, finish_reason) in rows:
            if finish_reason in ("stop", "length"):
                source.seek(at)
                target.write(source.readline())
    return dict(Counter(finish_reason for _, (_, finish_reason) in rows)) | dict(skipped)
