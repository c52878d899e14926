"""A request is answered, tried again where that can help, or refused in one line that says what to do."""

from __future__ import annotations

import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai_server import serving

from eagle3_fast.endpoint import Endpoint, EndpointError
from eagle3_fast.errors import InputError

CHAT = "/v1/chat/completions"


def endpoint(url: str, **settings: Any) -> Endpoint:
    return Endpoint(url, **{"timeout": 5.0, "max_retries": 2, "backoff": 0.01} | settings)


def failure(url: str, **settings: Any) -> EndpointError:
    with pytest.raises(EndpointError) as caught:
        endpoint(url, **settings).post(CHAT, {"n": 1})
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/", CHAT, "/v1/completions/"])
@pytest.mark.parametrize("prefix", ["", "/team/vllm"])
def test_every_spelling_of_the_address(prefix: str, tail: str) -> None:
    assert Endpoint(f"http://host:8000{prefix}{tail}").url == f"http://host:8000{prefix}"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "localhost:8000/v1", "", "ftp://h", "http://h:port", "http://u:p@h", "http://h?a=b"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InputError, match="is not the address of a server"):
        Endpoint(url)


def test_a_request_arrives_and_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def answer(path: str, payload: Any, headers: dict[str, str]) -> Any:
        seen.append((path, payload, headers["Authorization"]))
        return 200, {"got": payload["text"]}

    with serving(answer) as url:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        assert endpoint(url).post(CHAT, {"text": "größer 🙂"}) == {"got": "größer 🙂"}
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        endpoint(url + "/v1").post("/v1/completions", {"text": ""})
    assert seen == [(CHAT, {"text": "größer 🙂"}, "Bearer EMPTY"), ("/v1/completions", {"text": ""}, "Bearer secret")]


def test_netrc_does_not_replace_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password mine\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with serving(lambda path, payload, headers: (200, {"key": headers["Authorization"]})) as url:
        assert endpoint(url).post(CHAT, {})["key"].startswith("Bearer ")


@pytest.mark.parametrize("trouble", [(429, "busy"), (500, {}), (503, "loading"), None, (200, "{", {"Content-Length": "50"})])
def test_passing_trouble_is_tried_again(trouble: Any) -> None:
    answers = iter([trouble, trouble, (200, {"ok": True})])
    with serving(lambda *_: next(answers)) as url:
        assert endpoint(url, timeout=0.5).post(CHAT, {}) == {"ok": True}


def test_trouble_that_stays_is_named() -> None:
    tries: list[float] = []

    def answer(path: str, payload: Any, headers: dict[str, str]) -> Any:
        tries.append(time.monotonic())
        return 500, {"error": {"message": "engine\ndied"}}

    with serving(answer) as url:
        error = failure(url, backoff=0.1)
    assert str(error) == f"{url}{CHAT}: answered 500 in 3 tries (engine died); see the server's log"
    assert error.status == 500
    assert len(tries) == 3
    assert tries[1] - tries[0] >= 0.1 and tries[2] - tries[1] >= 0.2


def test_a_server_says_how_long_to_wait() -> None:
    answers = iter([(429, "", {"Retry-After": "1"}), (200, {})])
    with serving(lambda *_: next(answers)) as url:
        begin = time.monotonic()
        endpoint(url).post(CHAT, {})
    assert time.monotonic() - begin >= 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((400, {"error": {"message": "too long"}}), "refused with 400 (too long); correct what was asked for"),
        ((400, {"object": "error", "message": "older vLLM"}), "refused with 400 (older vLLM)"),
        ((422, {"detail": [{"loc": "x"}]}), "refused with 422 ([{'loc': 'x'}])"),
        ((401, {"error": "Unauthorized"}), "refused with 401 (Unauthorized); set OPENAI_API_KEY"),
        ((404, ""), "refused with 404 (Not Found); is the server running, and is this its address?"),
        ((307, "", {"Location": "http://other/v1"}), "moved to http://other/v1; give that address"),
        ((200, "<html>\nhello"), "its answer is no JSON object ('<html> hello')"),
        ((200, [1]), "its answer is no JSON object ('[1]')"),
    ],
)
def test_a_refusal_is_final(answer: Any, said: str) -> None:
    calls: list[str] = []
    with serving(lambda path, *_: calls.append(path) or answer) as url:
        error = failure(url)
    assert str(error).startswith(f"{url}{CHAT}: {said}")
    assert error.status == answer[0]
    assert calls == [CHAT]


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        error = failure(url)
    assert str(error).startswith(f"{url}{CHAT}: no answer in 3 tries (Failed to establish a new connection: ")
    assert str(error).endswith("is the server running, and is this its address?")
    assert error.status is None


def test_a_server_that_stays_silent() -> None:
    with serving(lambda *_: time.sleep(0.5)) as url:
        error = failure(url, timeout=0.1, max_retries=0)
    assert "no answer in 1 try (Read timed out." in str(error)
    assert "raise the timeout" in str(error)


def test_the_model_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: Any = {"data": [{"id": "first", "root": str(tmp_path)}, {"id": "second"}]}
    monkeypatch.chdir(tmp_path.parent)
    with serving(lambda path, *_: (200, models) if path == "/v1/models" else (404, "")) as url:
        served = endpoint(url).served_model
        assert served() == "first"
        assert served("second") == "second"
        assert served(tmp_path.name) == "first"  # another spelling of the folder
        with pytest.raises(EndpointError, match="serves first, second, not third; serve third, under that name"):
            served("third")
        models = {"data": []}
        with pytest.raises(EndpointError, match="serves no model; load one"):
            served()
        models = {"models": []}
        with pytest.raises(EndpointError, match="lists no models"):
            served()


def test_many_threads_and_a_pickle() -> None:
    with serving(lambda path, payload, headers: (200, payload)) as url, ThreadPoolExecutor(16) as pool:
        copy = pickle.loads(pickle.dumps(endpoint(url)))
        answers = list(pool.map(lambda i: copy.post(CHAT, {"i": i}), range(200)))
    assert answers == [{"i": i} for i in range(200)]
