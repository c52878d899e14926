"""A server answers as this process does; what it refuses is counted, what it does not answer ends the run, and nothing is lost."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai_server import serving

from eagle3_fast import endpoint
from eagle3_fast.config import RunConfig
from eagle3_fast.endpoint import Endpoint, EndpointError
from eagle3_fast.errors import InputError
from eagle3_fast.prepare.dataset import open_prepared
from eagle3_fast.prepare.local_answers import LocalAnswerer
from eagle3_fast.prepare.regenerate import regenerate
from eagle3_fast.prepare.shards import prepare

Setup = Callable[..., RunConfig]
ROWS = [{"prompt": f"question {i}"} for i in range(40)]
END = "~"


def ids(text: str) -> list[int]:
    return [ord(letter) % 256 for letter in text]


def completion(chat: list[dict[str, str]], text: str | None = None, **choice: Any) -> dict[str, Any]:
    """What vLLM answers; one id a letter, and a chat template that keeps everything."""
    prompt = "".join(f"{message['role']}:{message['content']}{END}" for message in chat) + "assistant:"
    text = f"re {chat[-1]['content']}" if text is None else text
    written = ids(text + END)
    return {
        "prompt_token_ids": ids(prompt),
        "choices": [
            {"message": {"content": text}, "finish_reason": "stop", "token_ids": written} | choice,
        ],
        "usage": {"completion_tokens": len(written)},
    }


class Server:
    """Serves `model`; `trouble` may answer a request instead, given its payload."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.requests: list[Any] = []
        self.trouble: Callable[[Any], Any] = lambda payload: False
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    def __call__(self, path: str, payload: Any, headers: dict[str, str]) -> Any:
        if path == "/v1/models":
            return 200, {"data": [{"id": self.model}]}
        if path != "/v1/chat/completions":
            return 404, ""
        with self.lock:
            self.requests.append(payload)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            answer = self.trouble(payload)
            return (200, completion(payload["messages"])) if answer is False else answer
        finally:
            with self.lock:
                self.at_once -= 1

    @property
    def asked(self) -> list[str]:
        return [request["messages"][-1]["content"] for request in self.requests]


@pytest.fixture
def server(answering_verifier: Path) -> Server:
    return Server(str(answering_verifier))


@pytest.fixture
def setup(
    server: Server,
    run_config: Callable[..., RunConfig],
    write_jsonl: Callable[..., str],
    answering_verifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    monkeypatch.setattr(Endpoint, "__init__", _quick(Endpoint.__init__))
    with ExitStack() as stack:

        def make(rows: list[Any] = ROWS, **section: Any) -> RunConfig:
            if "endpoint" not in section:
                section["endpoint"] = stack.enter_context(serving(server))
            settings = {
                "prompts": [write_jsonl(rows, "prompts.jsonl")],
                "output": str(tmp_path / "chats.jsonl"),
                "max_new_tokens": 6,
                "max_retries": 2,
            }
            return run_config(answering_verifier, regenerate=settings | section)

        yield make


def _quick(init: Any) -> Any:
    def patched(self: Endpoint, *arguments: Any) -> None:
        init(self, *arguments, backoff=0.01)

    return patched


def written(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(config.regenerate.output).read_text(encoding="utf-8").splitlines()]


def test_every_prompt_is_asked_once_and_rows_keep_their_order(setup: Setup, server: Server) -> None:
    def uneven(payload: Any) -> Any:
        time.sleep(0.03 if payload["messages"][-1]["content"].endswith(("0", "3")) else 0.005)
        return False

    server.trouble = uneven
    config = setup(concurrency=8, temperature=0.7, top_p=0.9, sampling_params={"top_k": 20, "seed": 5})
    manifest = regenerate(config)
    assert manifest["counts"] == {"stop": 40}
    assert sorted(server.asked) == sorted(row["prompt"] for row in ROWS)
    assert 2 <= server.most_at_once <= 8
    fields = {"max_tokens": 6, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 5, "return_token_ids": True}
    assert server.requests[0] == {"model": server.model, "messages": server.requests[0]["messages"], **fields}
    for number, row in enumerate(written(config)):
        answer = f"re question {number}"
        assert (row["id"], row["finish_reason"]) == (number, "stop")
        assert row["messages"] == [{"role": "user", "content": ROWS[number]["prompt"]}, {"role": "assistant", "content": answer}]
        assert row["input_ids"] == ids(f"user:question {number}{END}assistant:{answer}{END}")
        assert sum(row["loss_mask"]) == len(answer) + 1 == sum(row["loss_mask"][-len(answer) - 1 :])
    asked = len(server.requests)
    assert regenerate(config) == manifest
    assert len(server.requests) == asked


def test_no_seed_is_sent_unasked(setup: Setup, server: Server) -> None:
    regenerate(setup(rows=ROWS[:1]))
    assert "seed" not in server.requests[0]


def test_a_server_and_this_process_answer_alike(setup: Setup, server: Server) -> None:
    rows = [{"prompt": "the question"}, {"messages": [{"role": "user", "content": text} for text in ("a reply", "an answer")]}]
    here = setup(rows=rows, endpoint=None, batch_size=1)
    local = LocalAnswerer.load(here)

    def verifier(payload: Any) -> Any:
        with server.lock:
            (reply,) = local.reply([payload["messages"]])
        return 200, completion(payload["messages"], reply.text, finish_reason=reply.finish_reason)

    server.trouble = verifier
    regenerate(here)
    expected = written(here)
    for path in Path(here.regenerate.output).parent.glob("chats.jsonl*"):
        path.unlink()
    there = setup(rows=rows)
    regenerate(there)
    assert [{name: row[name] for name in ("id", "messages", "finish_reason")} for row in written(there)] == expected


def test_turns_and_finish_reasons(setup: Setup, server: Server) -> None:
    special = {
        "cut": {"finish_reason": "length"},
        "silent": {"text": " "},
        "filtered": {"finish_reason": "content_filter"},
        "thinking": {"message": {"content": None, "reasoning": "hm"}, "finish_reason": "length"},
    }

    def answer(payload: Any) -> Any:
        chat = payload["messages"]
        return (200, completion(chat, **special[chat[-1]["content"]])) if chat[-1]["content"] in special else False

    server.trouble = answer
    turns = [{"role": "system", "content": "s"}] + [{"role": "user", "content": text} for text in "abc"]
    config = setup(rows=[{"messages": turns}, *({"prompt": name} for name in special), {"data": ["cut", "old", "never asked"]}])
    manifest = regenerate(config)
    assert manifest["counts"] == {"stop": 1, "length": 3, "empty reply": 1, "content_filter": 1}
    whole, cut, thinking, last = written(config)
    assert [message["content"] for message in whole["messages"]] == ["s", "a", "re a", "b", "re b", "c", "re c"]
    supervised = [token for token, flag in zip(whole["input_ids"], whole["loss_mask"], strict=True) if flag]
    assert supervised == ids("".join(f"re {text}{END}" for text in "abc"))
    assert cut["messages"][-1]["content"] == "re cut"
    assert thinking["messages"][-1] == {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert len(last["messages"]) == 2
    assert "never asked" not in server.asked


@pytest.mark.parametrize("place", ["vllm", "sglang", "nowhere"])
def test_where_servers_put_the_ids(setup: Setup, server: Server, place: str, caplog: pytest.LogCaptureFixture) -> None:
    def answer(payload: Any) -> Any:
        answer = completion(payload["messages"])
        prompt_ids = answer.pop("prompt_token_ids") if place != "vllm" else None
        if place == "sglang":
            answer["choices"][0]["prompt_token_ids"] = prompt_ids
        if place == "nowhere":
            answer["choices"][0].pop("token_ids")
        return 200, answer

    server.trouble = answer
    config = setup(rows=ROWS[:3])
    with caplog.at_level("INFO", logger="eagle3_fast"):
        regenerate(config)
    assert all(("input_ids" in row) == (place != "nowhere") for row in written(config))
    if place == "nowhere":
        assert "the server gives no token ids" in caplog.text


def test_prepare_takes_the_ids_as_they_are(setup: Setup, server: Server, tmp_path: Path) -> None:
    config = setup(rows=[*ROWS[:4], {"prompt": "long " * 20}])
    regenerate(config)
    output = config.regenerate.output
    prepare(config.model_copy(update={"prepare": config.prepare.model_copy(update={"data": [output], "seq_length": 64})}))
    prepared = open_prepared(tmp_path / "out")
    rows = written(config)
    assert len(prepared) == 4  # of the long prompt no reply is left within 64 tokens
    for found, row in zip(prepared, rows, strict=False):
        assert found["input_ids"] == row["input_ids"][:64]
        assert found["loss_mask"] == row["loss_mask"][:64]


@pytest.mark.parametrize("trouble", [(429, "busy"), (500, "oops"), None])
def test_passing_trouble_costs_no_row(setup: Setup, server: Server, trouble: Any) -> None:
    tries: Counter[str] = Counter()

    def first_try_fails(payload: Any) -> Any:
        text = payload["messages"][-1]["content"]
        with server.lock:
            tries[text] += 1
        return trouble if tries[text] == 1 else False

    server.trouble = first_try_fails
    config = setup(rows=ROWS[:10])
    assert regenerate(config)["counts"] == {"stop": 10}
    assert set(tries.values()) == {2}


def test_a_server_that_dies_loses_nothing(setup: Setup, server: Server, tmp_path: Path) -> None:
    alive = 15

    def dies(payload: Any) -> Any:
        with server.lock:
            served = len(server.requests)
        return False if served <= alive else None

    server.trouble = dies
    config = setup(concurrency=4)
    with pytest.raises(EndpointError, match=r"/v1/chat/completions: no answer in 3 tries .* is the server running") as failure:
        regenerate(config)
    assert "\n" not in str(failure.value)
    assert not Path(config.regenerate.output).exists()
    partial = tmp_path / "chats.jsonl.partial"
    lines = partial.read_bytes().splitlines(keepends=True)
    assert len(lines) == alive
    partial.write_bytes(b"".join(lines[:-1]) + lines[-1][:30])  # and a kill left the last line half written
    before = {json.loads(line)["id"] for line in lines[:-1]}
    server.trouble, server.requests = lambda payload: False, []
    again = setup(concurrency=4)  # another port
    regenerate(again)
    assert sorted(server.asked) == sorted(row["prompt"] for i, row in enumerate(ROWS) if i not in before)
    assert [row["id"] for row in written(again)] == list(range(40))
    assert not partial.exists()


def test_ctrl_c_keeps_what_is_in_flight(setup: Setup, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, calls = endpoint.wait, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return wait(*arguments, **options)

    monkeypatch.setattr(endpoint, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        regenerate(setup(concurrency=4))
    assert len((tmp_path / "chats.jsonl.partial").read_bytes().splitlines()) == len(server.requests) < 40


MALFORMED = {
    "no choices": {"choices": []},
    "two choices": {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}] * 2},
    "no message": {"choices": [{"finish_reason": "stop"}]},
    "content": {"choices": [{"message": {"content": [1]}, "finish_reason": "stop"}]},
    "unfinished": {"choices": [{"message": {"content": "a"}, "finish_reason": None}]},
    "ids": {"choices": [{"message": {"content": "a"}, "finish_reason": "stop", "token_ids": ["x"]}]},
    "half a letter": {"choices": [{"message": {"content": "\ud83d"}, "finish_reason": "stop"}]},
}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((400, {"error": {"message": "roles must alternate"}}), "refused by the server"),
        ((400, {"error": {"message": "This model's maximum context length is 64 tokens."}}), "prompt too long"),
        *(((200, value), "refused by the server") for value in MALFORMED.values()),
        ((200, "no json"), "refused by the server"),
    ],
)
def test_one_bad_prompt_costs_one_row(setup: Setup, server: Server, answer: Any, reason: str) -> None:
    server.trouble = lambda payload: answer if payload["messages"][-1]["content"] == "question 0" else False
    config = setup(rows=ROWS[:4], concurrency=1)
    assert regenerate(config)["counts"] == {"stop": 3, reason: 1}
    assert [row["id"] for row in written(config)] == [1, 2, 3]


@pytest.mark.parametrize("value", MALFORMED.values(), ids=MALFORMED)
def test_a_server_that_answers_nothing_usable(setup: Setup, server: Server, value: Any) -> None:
    server.trouble = lambda payload: (200, value)
    with pytest.raises(EndpointError, match=r"its answer is no chat completion \(choices") as failure:
        regenerate(setup(rows=ROWS[:3]))
    assert "\n" not in str(failure.value)


def test_a_server_that_refuses_everything(setup: Setup, server: Server, tmp_path: Path) -> None:
    server.trouble = lambda payload: (400, {"error": {"message": "top_k must be positive"}})
    with pytest.raises(EndpointError, match=r"16 prompts in a row were refused; the last: .*top_k must be positive"):
        regenerate(setup(concurrency=2, sampling_params={"top_k": -7}))
    assert len(server.requests) < 20
    assert not (tmp_path / "chats.jsonl.partial").read_bytes()
    server.trouble = lambda payload: (401, "")
    with pytest.raises(EndpointError, match="set OPENAI_API_KEY"):
        regenerate(setup(concurrency=2))


def test_another_model(setup: Setup, server: Server) -> None:
    server.model = "someone/else"
    with pytest.raises(EndpointError, match="serves someone/else, not .*answering0; serve .*--served-model-name"):
        regenerate(setup())
    assert not server.requests


def test_what_decides_the_text_may_not_change(setup: Setup, server: Server) -> None:
    regenerate(setup(rows=ROWS[:2], sampling_params={"logit_bias": {7: 1.5}}))
    asked = len(server.requests)
    regenerate(setup(rows=ROWS[:2], sampling_params={"logit_bias": {7: 1.5}}, concurrency=2, max_retries=0))
    assert len(server.requests) == asked
    for change in ({"sampling_params": {"top_k": 5}}, {"temperature": 0.5}, {"endpoint": None}, {"max_new_tokens": 7}):
        with pytest.raises(InputError, match="was begun with another"):
            regenerate(setup(**{"rows": ROWS[:2], "sampling_params": {"logit_bias": {7: 1.5}}} | change | _none(change)))


def _none(change: dict[str, Any]) -> dict[str, Any]:
    """Without a server there are no parameters for it."""
    return {"sampling_params": {}} if "endpoint" in change else {}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"sampling_params": {"temperature": 1}}, "temperature cannot be among them: set regenerate.temperature"),
        ({"sampling_params": {"max_completion_tokens": 9}}, "set regenerate.max_new_tokens"),
        ({"sampling_params": {"n": 2}}, "a prompt gets one answer"),
        ({"sampling_params": {"top_k": float("nan")}}, "not JSON compliant"),
        ({"sampling_params": {"stop": {1, 2}}}, "cannot be sent as JSON"),
        ({"sampling_params": {"top_k": 5}, "endpoint": None}, "set regenerate.endpoint"),
        ({"concurrency": 0}, "greater than or equal to 1"),
    ],
)
def test_sections_that_contradict_themselves(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate(
            {"train": {"verifier": {"verifier_name_or_path": "v"}}, "regenerate": {"endpoint": "http://h:1"} | section}
        )
