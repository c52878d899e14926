"""Prompts to evaluate on: chats of any form that `prepare` reads, rendered by the verifier's chat template up to a reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedTokenizerBase

from eagle3_fast.errors import InputError
from eagle3_fast.log import logger
from eagle3_fast.prepare.conversations import Unusable, read_rows
from eagle3_fast.records import Conversation


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt, its generation prompt included."""

    source: str  # "file:row"
    token_ids: list[int]


def read_prompts(path: str, tokenizer: PreTrainedTokenizerBase, max_prompts: int | None, max_tokens: int | None) -> list[Prompt]:
    """The first `max_prompts` usable prompts of one file, each of at most `max_tokens` tokens.

    Rows that cannot be used are counted and logged. Raises InputError when the file cannot be read or has no usable prompt.
    """
    skipped: Counter[str] = Counter()
    prompts = list(islice(_usable(path, tokenizer, max_tokens, skipped), max_prompts))
    reasons = ", ".join(f"{count} x {reason}" for reason, count in skipped.items())
    if not prompts:
        raise InputError(f"{path}: no usable prompts ({reasons or 'the file is empty'}); name another file in evaluate.prompts")
    if reasons:
        logger.warning("%s: rows left out: %s", path, reasons)
    return prompts


def _usable(path: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None, skipped: Counter[str]) -> Iterator[Prompt]:
    for row in read_rows([path], chats=True):
        if not isinstance(row, Conversation):
            skipped[row.reason if isinstance(row, Unusable) else "already tokenized"] += 1
            continue
        chat = _unanswered(row)
        if not chat:
            skipped["no user turn"] += 1
            continue
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if max_tokens is not None and len(token_ids) > max_tokens:
            skipped[f"longer than {max_tokens} tokens, what the verifier's context leaves beside the reply"] += 1
            continue
        yield Prompt(row.source, token_ids)


def _unanswered(conversation: Conversation) -> list[dict[str, str]]:
    """The chat before its last reply; nothing where no user speaks."""
    messages = list(conversation.messages)
    while messages and messages[-1].role == "assistant":
        messages.pop()
    spoken = any(message.role == "user" for message in messages)
    return [{"role": message.role, "content": message.content} for message in messages] if spoken else []
