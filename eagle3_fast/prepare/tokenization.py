"""A chat as token ids with a loss mask, through the verifier's own chat template.

The whole conversation is rendered once and that text is tokenized, without a second beginning-of-sequence token. Supervised is
what the verifier itself emits after a generation prompt: reasoning, content and the token that ends the turn. Where those spans
lie in the text is learnt in one of two ways:

* generation markers: the template says so itself with `{% generation %}`;
* turn boundaries: the conversation is rendered a second time with a mark after the text of every message. Without its marks
  that text must equal the first render, so a mark gives the exact end of a reply whatever the template does to it (trim it,
  drop earlier reasoning). A reply starts where the generation prompt ends: after the text that the template, asked for such a
  prompt, puts behind the mark of the message before it.

A token that lies across the start of a span is supervised: it carries the first letters of the reply.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import replace
from operator import itemgetter
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from eagle3_fast.prepare.conversations import CutConversation, RowError
from eagle3_fast.records import Conversation, Message, TokenizedExample

MARK = "e3mark7d41c09b"  # letters and digits only: no template trims, escapes or splits it
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
EMPTY_REASONING = re.compile(r"\s*(?:[<\[]\w+[>\]])?\s*[<\[]/\w+[>\]]\s*")  # <think></think>; the prompt may hold the first tag

Span = tuple[int, int]  # characters of the rendered text, end excluded


class ChatTokenizer:
    """Tokenizes chats for one verifier.

    `mask_path` names the way in which spans are found; `notes` collects what a user should know of the data, once per kind.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: frozenset[int],
        supervise_template_reasoning: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.stop_texts = tuple(text for text in tokenizer.convert_ids_to_tokens(sorted(stop_ids)) if text)
        self.supervise_template_reasoning = supervise_template_reasoning
        self.template = tokenizer.get_chat_template()
        self.mask_path = "generation markers" if GENERATION_MARKER.search(self.template) else "turn boundaries"
        self.notes: dict[str, str] = {}

    def tokenize(self, conversation: Conversation) -> TokenizedExample:
        """Ids and mask of a whole chat, not cut. Raises RowError with the reason when the chat cannot be used."""
        messages = _answered(conversation.messages)
        text, spans = self._marked_spans(messages) if self.mask_path == "generation markers" else self._turn_spans(messages)
        replies = [message for message in messages if message.role == "assistant"]
        if len(spans) == len(replies):  # a template may mark fewer turns, such as the last one only
            spans = [self._emitted(text, span, reply) for span, reply in zip(spans, replies, strict=True)]
        self._compare_with_prompt(messages, text)
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
        pieces = [text[a:b] for a, b in offsets]
        mask = [0] * len(ids)
        for span in spans:
            first, end = _tokens_of(offsets, span)
            if first < end and offsets[first][0] < span[0]:
                self.notes.setdefault(
                    "first token",
                    f"the first token of some replies begins in the generation prompt ({pieces[first]!r}); "
                    "a server gives the verifier other ids there",
                )
            if not (isinstance(conversation, CutConversation) and span is spans[-1]):
                end = self._with_turn_end(ids, pieces, end)
            mask[first:end] = [1] * (end - first)
        return TokenizedExample(ids, mask)

    def _render(self, messages: list[Message], **options: Any) -> tuple[str, list[Span]]:
        """The template's text of `messages`, and the spans that it marks as generated."""
        options |= self.tokenizer.special_tokens_map
        try:
            rendered: Any = render_jinja_template(
                [[_as_dict(message) for message in messages]], chat_template=self.template, **options
            )
        except TemplateError as error:
            raise RowError(f"the chat template refuses it: {error}") from None
        (text,), spans = rendered
        return text, spans[0] if spans else []

    def _marked_spans(self, messages: list[Message]) -> tuple[str, list[Span]]:
        """Spans between the template's generation markers, without the end of the turn, which some put inside."""
        text, spans = self._render(messages, return_assistant_tokens_mask=True)
        return text, [(start, start + len(self._without_turn_end(text[start:end]))) for start, end in spans]

    def _without_turn_end(self, reply: str) -> str:
        for stop in self.stop_texts:
            reply = reply.rstrip().removesuffix(stop)
        return reply

    def _turn_spans(self, messages: list[Message]) -> tuple[str, list[Span]]:
        """Spans found by marking the end of every message's text (see the head of this file)."""
        if messages[0].role == "assistant":
            raise RowError("begins with an assistant turn")
        text, _ = self._render(messages)
        marked = [_with_mark(message, index) for index, message in enumerate(messages)]
        ends = _mark_positions(self._render(marked)[0], text)
        spans = []
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            if index not in ends or index - 1 not in ends:
                raise RowError("the chat template leaves out a message")
            prompt, _ = self._render(marked[:index], add_generation_prompt=True)
            after_mark = prompt.rpartition(_mark(index - 1))[2]
            anchor = ends[index - 1]
            start = anchor + _shared_length(after_mark, text[anchor:])
            spans.append((min(start, ends[index]), ends[index]))
        return text, spans

    def _emitted(self, text: str, span: Span, reply: Message) -> Span:
        """The span without empty reasoning tags that the template put before a reply that has no reasoning."""
        start, end = span
        body, answer = text[start:end], _reasoning_and_answer(reply)[1]
        inserted = body[: -len(answer)] if body.endswith(answer) else ""
        if not EMPTY_REASONING.fullmatch(inserted):
            return span
        self.notes.setdefault(
            "empty reasoning",
            f"the chat template puts {inserted!r} before replies without reasoning; the verifier emits that only where its "
            "generation prompt says so",
        )
        return span if self.supervise_template_reasoning else (start + len(inserted), end)

    def _compare_with_prompt(self, messages: list[Message], text: str) -> None:
        """Note when the last reply does not follow the very prompt that a server would give the verifier."""
        if _reasoning_and_answer(messages[-1])[0] not in text:
            self.notes.setdefault(
                "reasoning", "the chat template leaves out the reasoning of a last reply, which the verifier emits"
            )
        if "prompt" in self.notes:
            return
        prompt, _ = self._render(messages[:-1], add_generation_prompt=True)
        if not text.startswith(prompt):
            at = _shared_length(prompt, text)
            self.notes["prompt"] = (
                f"the chat template renders a stored reply otherwise than it prompts for one: at character {at} the prompt "
                f"goes on with {prompt[at : at + 40]!r}, the stored chat with {text[at : at + 40]!r}"
            )

    def _with_turn_end(self, ids: list[int], pieces: list[str], end: int) -> int:
        """The end of a turn's tokens, moved past its stop token when nothing but blanks stands before it."""
        for index in range(end, len(ids)):
            if ids[index] in self.stop_ids:
                return index + 1
            if pieces[index].strip():
                break
        self.notes.setdefault(
            "turn end", "some replies are not followed by a stop token of the verifier; their end is not supervised"
        )
        return end


def cut(example: TokenizedExample, seq_length: int, minimum_valid_tokens: int) -> TokenizedExample:
    """The first `seq_length` tokens of a row. Raises RowError when what is left is no training row."""
    ids, mask = example.input_ids[:seq_length], example.loss_mask[:seq_length]
    supervised = sum(mask)
    if supervised == 0:
        cause = f"in its first {seq_length} tokens" if any(example.loss_mask) else "at all"
        raise RowError(f"no supervised token {cause}")
    if supervised < minimum_valid_tokens:
        raise RowError(f"fewer than {minimum_valid_tokens} supervised tokens")
    if supervised == len(mask):
        raise RowError("every token is supervised")
    return TokenizedExample(ids, mask)


def _answered(messages: tuple[Message, ...]) -> list[Message]:
    """The messages up to the last reply; what follows it can reach no loss."""
    replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not replies:
        raise RowError("no assistant turn")
    if any(not messages[index].content.strip() for index in replies):
        raise RowError("empty reply")
    return [_with_both_tags(message) for message in messages[: replies[-1] + 1]]


def _with_both_tags(message: Message) -> Message:
    """A reply whose opening tag was in its generation prompt, given that tag, so that a template sees one whole block."""
    if message.role != "assistant" or "</think>" not in message.content or "<think>" in message.content:
        return message
    return replace(message, content=f"<think>\n{message.content.lstrip()}")


def _reasoning_and_answer(reply: Message) -> tuple[str, str]:
    """The reasoning of a reply (empty if it has none) and what follows it, both without surrounding blanks."""
    thought, tag, answer = reply.content.rpartition("</think>")
    if tag and not reply.reasoning:
        return thought.rpartition("<think>")[2].strip(), answer.strip()
    return (reply.reasoning or "").strip(), reply.content.strip()


def _as_dict(message: Message) -> dict[str, Any]:
    reasoning = {"reasoning_content": message.reasoning, "reasoning": message.reasoning} if message.reasoning else {}
    return {"role": message.role, "content": message.content, **reasoning}


def _mark(index: int) -> str:
    return f"{MARK}{index:05d}"


def _with_mark(message: Message, index: int) -> Message:
    body = message.content.rstrip()
    return replace(message, content=body + _mark(index) + message.content[len(body) :])


def _mark_positions(marked: str, text: str) -> dict[int, int]:
    """Where each mark stands in the text without marks, by message index."""
    pieces = re.split(rf"{MARK}(\d{{5}})", marked)
    literals, indices = pieces[0::2], [int(index) for index in pieces[1::2]]
    if "".join(literals) != text or len(set(indices)) < len(indices):
        raise RowError("the chat template does not keep the text of its messages")
    positions, at = {}, 0
    for index, literal in zip(indices, literals, strict=False):
        at += len(literal)
        positions[index] = at
    return positions


def _shared_length(left: str, right: str) -> int:
    """How many leading characters two texts share."""
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)


def _tokens_of(offsets: list[Span], span: Span) -> Span:
    """First and past-the-end index of the tokens that share a character with the span."""
    start, end = span
    return bisect_right(offsets, start, key=itemgetter(1)), bisect_left(offsets, end, key=itemgetter(0))
