"""Our connector on a stand-in for vLLM's stock one: what it copies out of the cache, and what a reader sees meanwhile."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import sys
import threading
import types
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3_fast import extract

STOCK = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
BLOCK, LAYERS, WIDTH = 4, 3, 8


@dataclass
class PendingSave:
    req_id: str
    filename: str
    token_ids: torch.Tensor
    block_ids: list[int]


class Stock:
    """The attributes of the stock connector that ours uses, as vLLM 0.32 has them."""

    def __init__(self, cache: torch.Tensor) -> None:
        self._kv_cache, self._block_size, self._is_tp_rank_zero = cache, BLOCK, True
        self._executor = ThreadPoolExecutor(2)
        self._lock_fds: dict[str, int] = {}
        self._req_futures: dict[str, Future] = {}
        self._req_copy_events: dict[str, Any] = {}
        self.errors: list[BaseException | None] = []

    def _on_write_done(self, request: str, future: Future) -> None:
        self._req_futures.pop(request, None)
        self.errors.append(future.exception())

    def locked(self, request: str, path: Path) -> None:
        self._lock_fds[request] = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(self._lock_fds[request], fcntl.LOCK_EX)


def from_cache(cache: torch.Tensor, slots: torch.Tensor, tokens: int) -> torch.Tensor:
    """Slot s of a paged cache [blocks, layers, block size, width] lies in block s // size at s % size."""
    return torch.stack([cache[int(slot) // BLOCK, :, int(slot) % BLOCK] for slot in slots])[:tokens]


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Any:
    parts = STOCK.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    vars(sys.modules[STOCK]).update(ExampleHiddenStatesConnector=Stock, PendingSave=PendingSave, extract_from_kv_cache=from_cache)
    spec = importlib.util.spec_from_file_location("vllm_connector", Path(extract.__file__).parent / "vllm_connector.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CACHE = torch.arange(6 * LAYERS * BLOCK * WIDTH).reshape(6, LAYERS, BLOCK, WIDTH).bfloat16()
IDS = torch.tensor([7, 8, 9, 10, 11, 12])


def submitted(connector: Any, path: Path, locked: bool = True) -> Any:
    own = connector.HostHiddenStatesConnector(CACHE.clone())
    if locked:
        own.locked("a", path)
    own._submit_async_write(PendingSave("a", str(path), IDS, [5, 2]))
    return own


@pytest.mark.parametrize("locked", [True, False])
def test_a_finished_request_is_written(connector: Any, tmp_path: Path, locked: bool) -> None:
    path = tmp_path / "a.safetensors"
    own = submitted(connector, path, locked)
    assert own._req_copy_events["a"].query()  # the blocks may be given away at once: the copy is over
    own._kv_cache.zero_()
    own._executor.shutdown()
    tensors = load_file(path)
    expected = torch.cat([CACHE[5].transpose(0, 1), CACHE[2].transpose(0, 1)])[: len(IDS)]
    assert torch.equal(tensors["hidden_states"], expected)
    assert torch.equal(tensors["token_ids"], IDS)
    assert own.errors == [None] and not own._req_futures and not own._lock_fds


def test_the_lock_is_held_until_the_file_is_whole(connector: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, go, save = tmp_path / "a.safetensors", threading.Event(), connector.save_file
    monkeypatch.setattr(connector, "save_file", lambda tensors, where: (save(tensors, where), go.wait(10)))
    own = submitted(connector, path)
    with Path(f"{path}.lock").open() as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert not path.exists()
        go.set()
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert load_file(path)["token_ids"].tolist() == IDS.tolist()
    own._executor.shutdown()


def test_a_write_that_fails_lets_the_lock_go_and_leaves_nothing(
    connector: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, where: Path) -> None:
        where.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(connector, "save_file", full)
    own = submitted(connector, tmp_path / "a.safetensors")
    with (tmp_path / "a.safetensors.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
    own._executor.shutdown()
    assert isinstance(own.errors[0], OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors.lock"]


def test_only_the_first_tensor_parallel_rank_writes(connector: Any, tmp_path: Path) -> None:
    own = connector.HostHiddenStatesConnector(CACHE)
    own._is_tp_rank_zero = False
    own._submit_async_write(PendingSave("a", str(tmp_path / "a.safetensors"), IDS, [0, 1]))
    own._executor.shutdown()
    assert not own._req_copy_events and list(tmp_path.iterdir()) == []
