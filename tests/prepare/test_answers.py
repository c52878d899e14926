"""Token ids of a chat: the last prompt and reply, every reply supervised that the chat holds as it was written."""

from __future__ import annotations

from eagle3_fast.prepare.answers import Prompt, Reply, converse, on_policy
from eagle3_fast.records import TokenizedExample


def reply(prompt: list[int] | None, written: list[int] | None, reason: str = "stop") -> Reply:
    return Reply("text", reason, 1, "", prompt, written)


def test_every_reply_that_stands_as_it_was_written_is_supervised() -> None:
    first, second = reply([1, 2], [7, 9]), reply([1, 2, 7, 9, 3], [8, 9])
    assert on_policy([first]) == TokenizedExample([1, 2, 7, 9], [0, 0, 1, 1])
    assert on_policy([first, second]) == TokenizedExample([1, 2, 7, 9, 3, 8, 9], [0, 0, 1, 1, 0, 1, 1])


def test_a_reply_that_came_back_otherwise_is_context() -> None:
    dropped = reply([1, 2], [5, 5, 7, 9])  # its reasoning, 5 5, is gone from the next prompt
    second, third = reply([1, 2, 7, 9, 3], [8, 9]), reply([1, 2, 7, 9, 3, 8, 9, 4], [6])
    example = on_policy([dropped, second, third])
    assert example == TokenizedExample([1, 2, 7, 9, 3, 8, 9, 4, 6], [0, 0, 0, 0, 0, 1, 1, 0, 1])
    moved = reply([0, 1, 2], [7, 9])  # the same ids, but after another prompt
    assert on_policy([moved, second]) == TokenizedExample([1, 2, 7, 9, 3, 8, 9], [0, 0, 0, 0, 0, 1, 1])


def test_without_all_ids_there_is_no_example() -> None:
    whole = reply([1, 2], [7, 9])
    for broken in (reply(None, [7]), reply([1], None), reply([1], [])):
        assert on_policy([broken]) is None
        assert on_policy([broken, whole]) is None
        assert on_policy([whole, broken]) is None


def test_rows_of_chats_of_different_lengths() -> None:
    asked: list[list[str]] = []

    def answer(chats: list[list[dict[str, str]]]) -> list[Reply]:
        asked.append([chat[-1]["content"] for chat in chats])
        return [Reply(f"re {chat[-1]['content']}", "length" if chat[-1]["content"] == "c" else "stop", 2, "hm") for chat in chats]

    user = [[{"role": "user", "content": text}] for text in "abcd"]
    rows, tokens = converse([Prompt(4, (user[0], user[1]), 1), Prompt(7, (user[2], user[3]), 1)], answer)
    assert asked == [["a", "c"], ["b"]]  # "d" is not asked after a reply that was cut
    assert tokens == 6
    assert [(row["id"], row["finish_reason"], len(row["messages"])) for row in rows] == [(4, "stop", 4), (7, "length", 2)]
    assert rows[1]["messages"][1] == {"role": "assistant", "content": "re c", "reasoning_content": "hm"}
    assert "input_ids" not in rows[0]
    asked.clear()
    converse([Prompt(0, (user[2], user[3]), 1)], answer)
    assert asked == [["c"]]  # and nobody is asked for nothing
