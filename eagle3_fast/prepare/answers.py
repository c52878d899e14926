"""Prompts, the verifier's replies to them, and the rows that they make: the same whoever lets the verifier speak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from eagle3_fast.config import RunConfig
from eagle3_fast.records import TokenizedExample

Chat = list[dict[str, str]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One row to answer: `turns` are the messages before each reply (system and first user, then one user turn each)."""

    id: int
    turns: tuple[Chat, ...]
    length: int  # characters of the first turn


@dataclass(frozen=True)
class Reply:
    """What the verifier wrote after one generation prompt.

    `finish_reason`: "stop", "length" (cut at the limit), or why there is nothing to use. `prompt_ids` and `reply_ids` are the ids
    that it read and wrote, the end of the turn included; none where they are not known.
    """

    text: str
    finish_reason: str
    tokens: int
    reasoning: str = ""
    prompt_ids: list[int] | None = None
    reply_ids: list[int] | None = None

    @property
    def message(self) -> dict[str, str]:
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.text, **thought}


class Answerer(Protocol):
    """Who lets the verifier speak: this process, or a server."""

    @staticmethod
    def settings(config: RunConfig) -> dict[str, Any]:
        """Everything beside the prompts that decides the text of the replies."""

    @classmethod
    def load(cls, config: RunConfig) -> Answerer:
        """Make it ready. Raises InputError when the verifier cannot be had."""

    def answers(self, prompts: list[Prompt], answered: set[int]) -> Iterator[tuple[list[Row], int]]:
        """Rows of the prompts whose id is not in `answered`, in any order, and how many tokens were generated for them."""


def converse(batch: list[Prompt], reply: Callable[[list[Chat]], list[Reply]]) -> tuple[list[Row], int]:
    """Answer every user turn of every prompt in sequence; returns the rows and the number of generated tokens.

    A row is `{"id", "messages", "finish_reason"}`, and `"input_ids"`, `"loss_mask"` where the ids of all its replies are known.
    """
    chats: list[Chat] = [[] for _ in batch]
    replies: list[list[Reply]] = [[] for _ in batch]
    for turn in range(max(len(prompt.turns) for prompt in batch)):
        active = [
            i
            for i, prompt in enumerate(batch)
            if turn < len(prompt.turns) and all(earlier.finish_reason == "stop" for earlier in replies[i])
        ]
        if not active:
            break
        for i in active:
            chats[i] += batch[i].turns[turn]
        for i, answer in zip(active, reply([chats[i] for i in active]), strict=True):
            chats[i].append(answer.message)
            replies[i].append(answer)
    rows = [_row(prompt.id, chat, said) for prompt, chat, said in zip(batch, chats, replies, strict=True)]
    return rows, sum(answer.tokens for said in replies for answer in said)


def _row(number: int, chat: Chat, replies: list[Reply]) -> Row:
    row: Row = {"id": number, "messages": chat, "finish_reason": replies[-1].finish_reason}
    example = on_policy(replies)
    return row if example is None else row | vars(example)


def on_policy(replies: list[Reply]) -> TokenizedExample | None:
    """The chat as the verifier read it before its last reply, and that reply. None where ids are missing.

    Supervised are the last reply, and every earlier one that the chat still holds as it was written, after the very prompt that it
    was written to. A template that drops earlier reasoning, or text that is tokenized otherwise when it comes back, leaves an
    earlier reply as context only.
    """
    turns = [(reply.prompt_ids, reply.reply_ids) for reply in replies if reply.prompt_ids and reply.reply_ids]
    if len(turns) < len(replies):
        return None
    ids = turns[-1][0] + turns[-1][1]
    mask = [0] * len(ids)
    for prompt, reply in turns:
        end = len(prompt) + len(reply)
        if ids[:end] == prompt + reply:
            mask[len(prompt) : end] = [1] * len(reply)
    return TokenizedExample(ids, mask)
