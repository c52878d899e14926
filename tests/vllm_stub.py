"""A small stand-in for vLLM's hidden-state server (contract of speculators, section 8.3), over a toy verifier."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3_fast.extract.verifier import Verifier

Tensors = dict[str, torch.Tensor]


class VllmStub:
    """Answers as a function for `openai_server.serving`. Requests for states are numbered from 0 as they come.

    refuse: an HTTP answer in place of the usual one, given the number and the request; False for the usual one.
    damage: what the file holds, given the number and the right tensors; None writes no file.
    read_as: the tokens that the server says, and its file says, it read. held: seconds for which a file's lock is held.
    unlocked: files are whole before the answer, and have no lock (vLLM's `use_synchronization_lock: false`).
    """

    def __init__(self, verifier: Path, layer_ids: list[int], folder: Path) -> None:
        self.name, self.folder = str(verifier), folder
        self.verifier = Verifier(verifier, layer_ids, torch.float32)
        self.refuse: Callable[[int, Any], Any] = lambda number, payload: False
        self.damage: Callable[[int, Tensors], Tensors | None] = lambda number, tensors: tensors
        self.read_as: Callable[[list[int]], list[int]] = lambda ids: ids
        self.held, self.unlocked = 0.0, False
        self.prompts: list[list[int]] = []
        self.at_once = self.most_at_once = 0
        self.counting, self.computing = threading.Lock(), threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, path: str, payload: Any, headers: dict[str, str]) -> Any:
        if path == "/v1/models":
            return 200, {"data": [{"id": self.name}]}
        assert path == "/v1/completions"
        assert (payload["model"], payload["max_tokens"], payload["return_token_ids"]) == (self.name, 1, True)
        with self.counting:
            number = len(self.prompts)
            self.prompts.append(payload["prompt"])
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            refusal = self.refuse(number, payload)
            return self._completion(number, payload) if refusal is False else refusal
        finally:
            with self.counting:
                self.at_once -= 1

    def _completion(self, number: int, payload: Any) -> Any:
        ids = self.read_as(payload["prompt"])
        path = self.folder / f"cmpl-{number}.safetensors"
        lock = Path(f"{path}.lock").open("w")  # noqa: SIM115 -- the writing thread closes it
        fcntl.flock(lock, fcntl.LOCK_EX)
        with self.computing:
            (states,) = self.verifier.hidden_states([torch.tensor(ids)])
            logprobs = self._logprobs(ids, payload["prompt_logprobs"]) if "prompt_logprobs" in payload else None
        tensors = self.damage(number, {"hidden_states": states, "token_ids": torch.tensor(ids)})
        writer = threading.Thread(target=self._write, args=(tensors, path, lock))
        writer.start()
        if self.unlocked:
            writer.join()
            Path(lock.name).unlink()
        choice = {"prompt_token_ids": ids, "prompt_logprobs": logprobs, "text": "x", "finish_reason": "length"}
        return 200, {"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)}}

    def _write(self, tensors: Tensors | None, path: Path, lock: Any) -> None:
        time.sleep(self.held)
        if tensors is not None:
            save_file(tensors, path)
        lock.close()

    def _logprobs(self, ids: list[int], count: int) -> list[Any]:
        """As vLLM tells them: of each token but the first the `count` most likely ones before it was read, and itself."""
        told: list[Any] = [None]
        for token, row in zip(ids[1:], self.verifier.logits(torch.tensor(ids)).log_softmax(-1), strict=False):
            named = {*row.topk(count).indices.tolist(), token}
            told.append({str(t): {"logprob": float(row[t]), "rank": int((row > row[t]).sum()) + 1} for t in named})
        return told
