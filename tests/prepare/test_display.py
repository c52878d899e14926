"""What is supervised can be seen, and the totals are those of the mask."""

from __future__ import annotations

from collections.abc import Callable

from chats import CHATML, words
from transformers import PreTrainedTokenizerBase

from eagle3_fast.prepare.display import show_mask
from eagle3_fast.prepare.tokenization import ChatTokenizer


def test_spans_and_totals(make_tokenizer: Callable[[str], PreTrainedTokenizerBase]) -> None:
    tokenizer = make_tokenizer(CHATML)
    row = vars(ChatTokenizer(tokenizer, frozenset({2})).tokenize(words("[b]hi[/b]", "the answer", "more", "is")))
    plain = show_mask(row, tokenizer, colour=False)
    assert "\x1b" not in plain
    assert "[b]hi[/b]<|im_end|>" in plain
    assert plain.count("⟦") == plain.count("⟧") == 2
    assert "assistant\n⟦the answer<|im_end|>⟧\n" in plain
    assert f"supervised {sum(row['loss_mask'])} of {len(row['input_ids'])} tokens" in plain
    coloured = show_mask(row, tokenizer, colour=True)
    assert "\x1b[1;32mthe answer<|im_end|>\x1b[0m" in coloured
    assert "⟦" not in coloured
