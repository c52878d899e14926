"""Ids come from one whole render; the mask is what the verifier itself would emit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chats import CHATML, MARKED, REASONING, words
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eagle3_fast.prepare.conversations import CutConversation, RowError
from eagle3_fast.prepare.tokenization import ChatTokenizer, cut
from eagle3_fast.records import Conversation, Message, TokenizedExample

Make = Callable[[str], PreTrainedTokenizerBase]
STOP = frozenset({2})


def supervised(tokenizer: PreTrainedTokenizerBase, example: TokenizedExample) -> list[str]:
    """Text of each run of supervised tokens."""
    runs: list[list[int]] = [[]]
    for token, flag in zip(example.input_ids, example.loss_mask, strict=True):
        if flag:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [str(tokenizer.decode(run)) for run in runs if run]


def tokenize(tokenizer: PreTrainedTokenizerBase, chat: Conversation, **options: bool) -> TokenizedExample:
    return ChatTokenizer(tokenizer, STOP, **options).tokenize(chat)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_replies_and_their_end_are_supervised(make_tokenizer: Make, template: str) -> None:
    tokenizer = make_tokenizer(template)
    chat = words("hi", "the answer", "and you?", "is an answer  ", "trailing question")
    chat = Conversation((Message("system", "be kind"), *chat.messages), chat.source)
    example = tokenize(tokenizer, chat)
    assert supervised(tokenizer, example) == ["the answer<|im_end|>", "is an answer  <|im_end|>"]
    whole = tokenizer.apply_chat_template([{"role": m.role, "content": m.content} for m in chat.messages[:-1]], tokenize=False)
    assert example.input_ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_both_ways_give_the_same_row_at_any_length(make_tokenizer: Make) -> None:
    chat = words("hi", "the answer", "more", "is a reply")
    ways = [ChatTokenizer(make_tokenizer(template), STOP) for template in (CHATML, MARKED)]
    assert [way.mask_path for way in ways] == ["turn boundaries", "generation markers"]
    for length in (16, 22, 2048):
        rows = [cut(way.tokenize(chat), length, 1) for way in ways]
        assert rows[0] == rows[1]
        assert len(rows[0].input_ids) == len(rows[0].loss_mask) <= length


def test_exactly_one_beginning_token(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer("{{ bos_token }}" + CHATML)
    example = tokenize(tokenizer, words("hi", "the answer"))
    assert example.input_ids.count(tokenizer.bos_token_id) == 1
    assert example.input_ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("reply", [Message("assistant", "4", "2 and 2"), Message("assistant", "<think>\n2 and 2\n</think>\n\n4")])
def test_reasoning_is_supervised(make_tokenizer: Make, reply: Message) -> None:
    tokenizer = make_tokenizer(REASONING)
    example = tokenize(tokenizer, Conversation((Message("user", "sum"), reply), "t:1"))
    assert supervised(tokenizer, example) == ["<think>\n2 and 2\n</think>\n\n4<|im_end|>"]


def test_only_closing_tag_stays_in_one_block(make_tokenizer: Make) -> None:
    both = CHATML.replace(
        "m['content']", "('' if m['role'] == 'user' or '<think>' in m.content else '<think>\n\n</think>\n\n') + m['content']"
    )
    for template in (REASONING, both):
        tokenizer = make_tokenizer(template)
        example = tokenize(tokenizer, words("sum", "2 and 2\n</think>\n\n4"))
        assert supervised(tokenizer, example) == ["<think>\n2 and 2\n</think>\n\n4<|im_end|>"]


def test_inserted_empty_reasoning_follows_the_option(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(REASONING)
    chat = words("sum", "the answer")
    off, on = tokenize(tokenizer, chat), tokenize(tokenizer, chat, supervise_template_reasoning=True)
    assert off.input_ids == on.input_ids
    assert supervised(tokenizer, off) == ["the answer<|im_end|>"]
    assert supervised(tokenizer, on) == ["<think>\n\n</think>\n\nthe answer<|im_end|>"]
    inserted = [t for t, a, b in zip(on.input_ids, on.loss_mask, off.loss_mask, strict=True) if a != b]
    assert tokenizer.decode(inserted) == "<think>\n\n</think>\n\n"
    assert sum(on.loss_mask) - sum(off.loss_mask) == len(inserted)


def test_opening_tag_in_the_generation_prompt(make_tokenizer: Make) -> None:
    template = REASONING.replace(
        "{{ '<|im_start|>assistant\n' }}{% endif %}", "{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    tokenizer = make_tokenizer(template)
    thinking = ChatTokenizer(tokenizer, STOP)
    assert supervised(tokenizer, thinking.tokenize(words("sum", "2 and 2</think>4"))) == ["2 and 2\n</think>\n\n4<|im_end|>"]
    assert supervised(tokenizer, thinking.tokenize(words("sum", "the answer"))) == ["the answer<|im_end|>"]
    assert "prompt" not in thinking.notes


def test_template_that_depends_on_other_turns(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(REASONING)
    first, last = Message("assistant", "4", "dropped"), Message("assistant", " 6 ", "kept")
    chat = Conversation((Message("user", "sum"), first, Message("user", "and now"), last), "t:1")
    assert supervised(tokenizer, tokenize(tokenizer, chat)) == ["4<|im_end|>", "<think>\nkept\n</think>\n\n6<|im_end|>"]
    # Mistral's way: the system text moves into the last user turn, so no prefix of the chat renders as a prefix of the text.
    moved = (
        "{% set s = messages[0].content %}{% for m in messages[1:] %}{% if m.role == 'user' %}"
        "[INST] {{ s + '\n\n' if loop.index0 >= messages[1:]|length - 2 else '' }}{{ m.content }}[/INST]"
        "{% else %} {{ m.content|trim }}<|im_end|>{% endif %}{% endfor %}"
    )
    tokenizer = make_tokenizer(moved)
    chat = Conversation((Message("system", "be kind"), *words("hi", "a reply", "more", "is").messages), "t:1")
    assert supervised(tokenizer, tokenize(tokenizer, chat)) == [" a reply<|im_end|>", " is<|im_end|>"]


@pytest.mark.parametrize("merges", [[(":", "Y")], []])
def test_first_reply_token_is_supervised(merges: list[tuple[str, str]]) -> None:
    letters = sorted(set("USERASSISTANT: hiYes!\n"))
    vocabulary = {piece: index for index, piece in enumerate([*letters, "<e>", ":Y"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role|upper + ':' + m.content }}{{ eos_token if m.role == 'assistant' else '\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    chats = ChatTokenizer(tokenizer, frozenset({tokenizer.eos_token_id}))
    example = chats.tokenize(words("hi", "Yes!"))
    first = example.loss_mask.index(1)
    assert tokenizer.convert_ids_to_tokens(example.input_ids[first]) == (":Y" if merges else "Y")
    assert sum(example.loss_mask[first:]) == 5
    assert ("first token" in chats.notes) == bool(merges)


def test_cut_reply_has_no_end(make_tokenizer: Make) -> None:
    for template in (CHATML, MARKED):
        tokenizer = make_tokenizer(template)
        chat = CutConversation(words("hi", "the answer", "more", "is a").messages, "t:1")
        assert supervised(tokenizer, tokenize(tokenizer, chat)) == ["the answer<|im_end|>", "is a"]


def test_note_when_the_reply_does_not_follow_the_prompt(make_tokenizer: Make) -> None:
    chats = ChatTokenizer(make_tokenizer(CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")), STOP)
    example = chats.tokenize(words("hi", "the answer"))
    assert supervised(chats.tokenizer, example) == ["the answer<|im_end|>"]
    assert "the prompt goes on with '<think>" in chats.notes["prompt"]
    assert "the stored chat with 'the answer" in chats.notes["prompt"]
    plain = ChatTokenizer(make_tokenizer(CHATML), STOP)
    plain.tokenize(words("hi", "the answer"))
    assert plain.notes == {}
    plain.tokenize(Conversation((Message("user", "sum"), Message("assistant", "4", "2 and 2")), "t:1"))
    assert set(plain.notes) == {"reasoning"}


@pytest.mark.parametrize(
    ("chat", "template", "reason"),
    [
        (words("hi"), CHATML, "no assistant turn"),
        (words("hi", " \n"), CHATML, "empty reply"),
        (Conversation((Message("assistant", "hi"),), "t:1"), CHATML, "begins with an assistant turn"),
        (words("hi", "a"), CHATML.replace("m['content']", "m['content'][:3]"), "does not keep the text"),
        (words("hi", "a", "b", "c"), "{% for m in messages[-2:] %}{{ m.content }}{% endfor %}", "leaves out a message"),
        (words("hi", "a"), "{{ raise_exception('no') }}", "the chat template refuses it: no"),
    ],
)
def test_chats_that_cannot_be_used(make_tokenizer: Make, chat: Conversation, template: str, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        tokenize(make_tokenizer(template), chat)


def test_cut_checks_what_is_left() -> None:
    row = TokenizedExample([1, 2, 3, 4], [0, 0, 0, 1])
    assert cut(row, 4, 1) == row
    for example, length, least, reason in [
        (row, 3, 1, "no supervised token in its first 3 tokens"),
        (TokenizedExample([1], [0]), 3, 1, "no supervised token at all"),
        (row, 4, 2, "fewer than 2 supervised tokens"),
        (TokenizedExample([1, 2], [1, 1]), 4, 1, "every token is supervised"),
    ]:
        with pytest.raises(RowError, match=reason):
            cut(example, length, least)
