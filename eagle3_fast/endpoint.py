"""A client of OpenAI-compatible servers (vLLM, SGLang and others): one JSON request, answered or refused in one line.

Connection errors, timeouts, 429 and 5xx are tried again, each pause twice as long as the one before; other statuses are not.
The key is read from the environment variable OPENAI_API_KEY; a server that asks for none gets "EMPTY".
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests

from eagle3_fast.errors import InputError
from eagle3_fast.log import logger

Item = TypeVar("Item")
Result = TypeVar("Result")

_ALIVE = "is the server running, and is this its address?"
LONGEST_PAUSE = 60.0  # seconds, whatever a server's Retry-After says

_threads = threading.local()  # requests.Session is not made to be shared by threads
os.register_at_fork(after_in_child=lambda: vars(_threads).clear())  # a forked process must not write to its parent's sockets


class EndpointError(InputError):
    """A request got no usable answer. `status` is the HTTP status of the last answer, None when there was none."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Endpoint:
    """A server. May be used by many threads at once, pickled, and carried over a fork.

    url: with or without `/v1` and what follows it; kept as the server's root. timeout: seconds that one try may stay silent.
    max_retries: tries after the first. backoff: seconds before the first of them. Raises InputError for a URL that is none.
    """

    url: str
    timeout: float = 120.0
    max_retries: int = 3
    backoff: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _root(self.url))

    def post(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that the server answers to `payload` at `path` (such as "/v1/completions"). Raises EndpointError."""
        return self._ask("POST", path, payload)

    def served_model(self, asked: str | None = None) -> str:
        """The id to name in requests: that of the first model served, or of the one that is `asked` for, by name or by folder.

        Raises EndpointError when the server has none, or others only.
        """
        answer = self._ask("GET", "/v1/models", None)
        try:
            served = {str(model["id"]): str(model.get("root") or model["id"]) for model in answer["data"]}
        except (KeyError, TypeError, AttributeError):
            raise EndpointError(f"{self.url}/v1/models: lists no models; is this an OpenAI-compatible server?") from None
        for name, root in served.items():
            if asked is None or _same_model(asked, name) or _same_model(asked, root):
                return name
        names = ", ".join(served) or "no model"
        remedy = f"serve {asked}, under that name (vLLM and SGLang: --served-model-name {asked})" if asked else "load one"
        raise EndpointError(f"{self.url}: serves {names}" + (f", not {asked}" if asked else "") + f"; {remedy}")

    def _ask(self, method: str, path: str, payload: dict[str, Any] | None) -> dict[str, Any]:
        where, tries = self.url + path, self.max_retries + 1
        for attempt in range(tries):
            try:
                response = _session().request(
                    method, where, json=payload, timeout=(min(self.timeout, 10.0), self.timeout), allow_redirects=False
                )
            except requests.RequestException as error:
                remedy = "raise the timeout, or ask for less at a time" if isinstance(error, requests.ReadTimeout) else _ALIVE
                failure, pause = EndpointError(f"{where}: no answer in {_times(tries)} ({_reason(error)}); {remedy}"), 0.0
            else:
                if response.status_code != 429 and response.status_code < 500:
                    return _answer(where, response)
                what = f"{where}: answered {response.status_code} in {_times(tries)} ({_complaint(response)})"
                failure, pause = EndpointError(f"{what}; see the server's log", response.status_code), _retry_after(response)
            if attempt < self.max_retries:
                time.sleep(min(max(pause, self.backoff * 2**attempt), LONGEST_PAUSE))
        raise failure


def _root(url: str) -> str:
    """Scheme, host, port and what stands before `/v1` of a URL."""
    parts = urlsplit(url)
    try:
        plain = parts.username is None and not parts.query
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and plain
    except ValueError:
        usable = False  # a port that is no number
    if not usable:
        raise InputError(f"{url!r} is not the address of a server; write it as http://127.0.0.1:8000")
    prefix = f"{parts.path.rstrip('/')}/".partition("/v1/")[0].rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{prefix}"


def _same_model(asked: str, served: str) -> bool:
    """Two names of one model: equal, or two spellings of one folder."""
    return asked == served or (Path(asked).is_dir() and Path(served).is_dir() and Path(asked).samefile(served))


def _session() -> requests.Session:
    """This thread's session. It takes no password from .netrc, which would replace the key."""
    if not hasattr(_threads, "session"):
        _threads.session = requests.Session()
        _threads.session.auth = _sign
    return _threads.session


def _sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
    request.headers["Authorization"] = f"Bearer {os.environ.get('OPENAI_API_KEY') or 'EMPTY'}"
    return request


def _answer(where: str, response: requests.Response) -> dict[str, Any]:
    """The JSON object of a success. Raises EndpointError for a refusal, and for an answer that is something else."""
    status = response.status_code
    if status >= 400:
        remedy = {401: "set OPENAI_API_KEY", 403: "set OPENAI_API_KEY", 404: _ALIVE}.get(status, "correct what was asked for")
        raise EndpointError(f"{where}: refused with {status} ({_complaint(response)}); {remedy}", status)
    if status >= 300:
        raise EndpointError(f"{where}: moved to {response.headers.get('Location')}; give that address", status)
    try:
        answer = response.json()
    except requests.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        begin = _one_line(response.text[:200])
        raise EndpointError(f"{where}: its answer is no JSON object ({begin!r}); is this an OpenAI-compatible server?", status)
    return answer


def _complaint(response: requests.Response) -> str:
    """What the server says is wrong, in one line: OpenAI's `error.message`, FastAPI's `detail`, or the beginning of the text."""
    try:
        answer = response.json()
    except requests.JSONDecodeError:
        answer = None
    if isinstance(answer, dict):
        error = answer.get("error") or answer
        said = error.get("message") or error.get("detail") if isinstance(error, dict) else error
        if said:
            return _one_line(str(said))[:400]
    return _one_line(response.text[:400]) or response.reason or "no text"


def _reason(error: requests.RequestException) -> str:
    """What happened, without the connection pools that requests and urllib3 name before it."""
    inner: Any = error.args[0] if error.args else error
    return _one_line(str(getattr(inner, "reason", None) or inner).rpartition("): ")[2])


def _retry_after(response: requests.Response) -> float:
    """Seconds that the server asks to wait, 0 when it does not say."""
    seconds = response.headers.get("Retry-After", "")
    return float(seconds) if seconds.isdigit() else 0.0


def _times(tries: int) -> str:
    return "1 try" if tries == 1 else f"{tries} tries"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def in_flight(
    work: Callable[[Item], Result], items: Iterator[Item], concurrency: int, of_one: Callable[[BaseException], bool]
) -> Iterator[tuple[Item, Future[Result]]]:
    """Items as their work ends, each with its ended future. of_one: whether an error concerns its item alone.

    After any other error, or Ctrl-C, nothing more is begun; what is in flight still comes out before it is raised.
    """
    failure: BaseException | None = None
    with ThreadPoolExecutor(concurrency) as pool:
        running = {pool.submit(work, item): item for item in islice(items, concurrency)}
        while running:
            try:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
            except KeyboardInterrupt as interrupt:
                logger.info("waiting for the %d requests in flight, then ending", len(running))
                failure, items = failure or interrupt, iter(())
                continue
            for future in done:
                item, error = running.pop(future), future.exception()
                if error is None or of_one(error):
                    yield item, future
                else:
                    failure, items = failure or error, iter(())
                running |= {pool.submit(work, item): item for item in islice(items, 1)}
    if failure is not None:
        raise failure
