"""Hidden states asked of a vLLM server, by the protocol of speculators (contract, section 8.3).

A request names tokens. The server writes their states into a folder that both sides see and answers with the file's path; beside the
file lies a lock, held until the file is whole. What has been read is deleted.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3_fast.config import RunConfig
from eagle3_fast.endpoint import Endpoint, EndpointError
from eagle3_fast.errors import InputError
from eagle3_fast.extract.sources import token_ids
from eagle3_fast.extract.store import SampleError
from eagle3_fast.extract.weights import verifier_shape
from eagle3_fast.log import logger
from eagle3_fast.records import HiddenStates

COMPLETIONS = "/v1/completions"
BACKOFF = 2.0  # seconds before the first retry; each pause is twice as long as the one before
LOCK_POLL = 0.02  # seconds between two looks at a lock
OF_ONE_ROW = (400, 413, 422)  # statuses of refusals that tell of the row, not of the server
START = "start it with `eagle3-fast serve-verifier`"


class _Broken(Exception):
    """What the server wrote cannot be used; it may write it rightly when asked again."""


class _Choice(BaseModel):
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | None = None


class _Transfer(BaseModel):
    hidden_states_path: Path


class Completion(BaseModel):
    """The part of a completion that is read here."""

    choices: list[_Choice] = Field(min_length=1, max_length=1)
    kv_transfer_params: _Transfer

    def most_likely(self) -> tuple[Tensor, Tensor] | None:
        """The two most likely successors of every prompt token but the last: ids int64 [T - 1, 2], log-probabilities float32 likewise.

        None where the answer does not tell them.
        """
        choice = self.choices[0]
        told = [entry or {} for entry in (choice.prompt_logprobs or [])[1:]]
        if len(told) != len(choice.prompt_token_ids) - 1 or any(len(entry) < 2 for entry in told):
            return None
        best = [sorted(((about["logprob"], token) for token, about in entry.items()), reverse=True)[:2] for entry in told]
        ids = torch.tensor([[token for _, token in pair] for pair in best], dtype=torch.int64)
        return ids.reshape(-1, 2), torch.tensor([[logprob for logprob, _ in pair] for pair in best]).reshape(-1, 2)


def verifier_endpoint(config: RunConfig) -> Endpoint:
    """The server that the run file names. Raises InputError where it names none."""
    section = config.train.generation
    if not section.vllm_endpoint:
        raise InputError("train.generation.vllm_endpoint is not set: give the vLLM server's address, such as http://127.0.0.1:8000")
    return Endpoint(section.vllm_endpoint, section.request_timeout, section.max_retries, BACKOFF)


class VllmStates:
    """Asks the server whenever a row is asked for; nothing is kept. May be used by several threads at once.

    A row whose states come out broken again and again, or that the server refuses, is a SampleError. A server that stays away for all
    retries, serves something else, or breaks so many rows in a row is an EndpointError: then nothing more is asked of it.
    """

    def __init__(self, config: RunConfig, dataset: Dataset, layer_ids: Sequence[int]) -> None:
        """Asks nothing yet. Raises InputError where the run file names no server."""
        verifier, section = config.train.verifier, config.train.generation
        shape = verifier_shape(verifier.verifier_name_or_path, verifier.trust_remote_code)
        served = sorted({*layer_ids, shape.num_hidden_layers})
        self.order = [served.index(layer) for layer in (*sorted(layer_ids), shape.num_hidden_layers)]
        self.served_layers, self.hidden_size = served, shape.hidden_size
        self.dataset = dataset
        self.dtype: torch.dtype = getattr(torch, config.train.data.hidden_states_dtype)
        self.concurrency = config.extract.concurrency
        self.rounds = 1 + section.generation_validation_retries
        self.patience, self.failures = section.max_consecutive_generation_failures, 0
        self.lost: str | None = None
        self._counting = threading.Lock()
        self.endpoint, self.verifier = verifier_endpoint(config), verifier.verifier_name_or_path

    @cached_property
    def model(self) -> str:
        """The server's name for the verifier. Raises EndpointError where it does not answer or serves another one."""
        return self.endpoint.served_model(self.verifier)

    def load(self, row: int) -> HiddenStates:
        ids = token_ids(self.dataset, row)
        states, _ = self.ask(f"row {row}", ids)
        return HiddenStates(token_ids=ids, states=states.to(self.dtype))

    def ask(self, name: str, ids: Tensor, **fields: Any) -> tuple[Tensor, Completion]:
        """The states [T, n_aux + 1, G] of int64 [T], in the server's dtype, and its answer to the request with these further fields.

        Raises SampleError, in the name of what is asked for, or EndpointError.
        """
        if self.lost is not None:
            raise EndpointError(self.lost)
        try:
            given = self._asked_until_whole(name, ids, fields)
        except EndpointError as error:
            self.lost = str(error)
            raise
        except SampleError as error:
            self._count(error)
            raise
        self.failures = 0
        return given

    def _count(self, error: SampleError) -> None:
        with self._counting:
            self.failures += 1
            if self.failures == self.patience:
                self.lost = f"{self.endpoint.url}: {self.failures} samples in a row could not be used; the last: {error}"
        if self.lost is not None:
            raise EndpointError(self.lost) from None

    def _asked_until_whole(self, name: str, ids: Tensor, fields: dict[str, Any]) -> tuple[Tensor, Completion]:
        for round_number in range(1, self.rounds + 1):
            try:
                return self._ask_once(name, ids, fields)
            except _Broken as broken:
                what = f"{broken}, at try {round_number} of {self.rounds}"
                logger.debug("%s: %s", name, what)
        raise SampleError(name, what)

    def _ask_once(self, name: str, ids: Tensor, fields: dict[str, Any]) -> tuple[Tensor, Completion]:
        payload = {"model": self.model, "prompt": ids.tolist(), "max_tokens": 1, "return_token_ids": True, **fields}
        try:
            completion = self._completion(self.endpoint.post(COMPLETIONS, payload))
        except EndpointError as error:
            if error.status in OF_ONE_ROW:
                raise SampleError(name, str(error)) from None
            raise
        path = completion.kv_transfer_params.hidden_states_path
        if not path.parent.is_dir():
            raise EndpointError(
                f"{self.endpoint.url}: leaves states in {path.parent}, which this machine does not see; share that folder"
            )
        lock = Path(f"{path}.lock")
        try:
            self._wait(lock)
            tensors = _read(path)
        finally:
            for file in (path, lock):
                file.unlink(missing_ok=True)
        _check_ids(name, ids, torch.tensor(completion.choices[0].prompt_token_ids, dtype=torch.int64), "the server read")
        _check_ids(name, ids, tensors["token_ids"], "its file holds")
        return self._checked(tensors["hidden_states"], len(ids)), completion

    def _completion(self, answer: dict[str, Any]) -> Completion:
        try:
            return Completion.model_validate(answer)
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise EndpointError(f"{self.endpoint.url}: its answer names no hidden states ({what}); {START}") from None

    def _wait(self, lock: Path) -> None:
        """Until the writer lets the lock go; a file without a lock is whole. speculators waits 10 s, a full disk queue takes longer."""
        try:
            handle = os.open(lock, os.O_RDONLY)
        except FileNotFoundError:
            return
        give_up = time.monotonic() + self.endpoint.timeout
        try:
            while True:
                try:
                    return fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > give_up:
                        raise _Broken(f"{lock} is still held after {self.endpoint.timeout:g} s") from None
                time.sleep(LOCK_POLL)
        finally:
            os.close(handle)

    def _checked(self, states: Tensor, tokens: int) -> Tensor:
        """The states, aux layers in ascending order and the last one behind them."""
        if states.ndim != 3 or states.shape[0] != tokens:
            raise _Broken(f"its file holds states {list(states.shape)} for {tokens} tokens")
        if states.shape[1:] != (len(self.served_layers), self.hidden_size):
            raise EndpointError(
                f"{self.endpoint.url}: gives {states.shape[1]} layers {states.shape[2]} wide, the run needs layers {self.served_layers} "
                f"{self.hidden_size} wide; {START} from this run file"
            )
        if not torch.isfinite(torch.stack(states.aminmax())).all():
            raise _Broken(f"its hidden states are not finite in {states.dtype}")
        return states if len(self.order) == len(self.served_layers) else states[:, self.order]


def _read(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise _Broken(f"the server says that it wrote {path}, which is not there (do both see one file system?)") from None
    except SafetensorError as error:
        raise _Broken(f"{path} is not a whole file ({error})") from None
    float8 = "hidden_states" in tensors and tensors["hidden_states"].dtype == torch.float8_e4m3fn
    missing = {"hidden_states", "token_ids", *(["hidden_states_scales"] if float8 else [])} - tensors.keys()
    if missing:
        raise _Broken(f"{path} holds no {' and no '.join(sorted(missing))}")
    if float8:  # speculators' fp8 connector: one scale per token
        tensors["hidden_states"] = tensors["hidden_states"].bfloat16() * tensors["hidden_states_scales"].bfloat16()
    return tensors


def _check_ids(name: str, ids: Tensor, others: Tensor, who: str) -> None:
    """Raises SampleError with the first position at which they differ; asking again would change nothing."""
    if len(others) != len(ids):
        raise SampleError(name, f"{who} {len(others)} tokens, the dataset's row has {len(ids)}")
    if not torch.equal(others, ids):
        at = int((others != ids).nonzero()[0])
        raise SampleError(name, f"{who} token {at} as {int(others[at])}, the dataset has {int(ids[at])}")
