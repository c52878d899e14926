"""vLLM's connector for hidden states where memory cannot be pinned: on a CPU.

Imported by the vLLM server that `serve-verifier` starts (`kv_connector_module_path`), never by this package, and made for vLLM 0.32.
The stock connector does all but the copy out of the cache, for which it asks for pinned memory and CUDA events.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class Finished:
    """In place of the CUDA event of a copy that has ended."""

    def query(self) -> bool:
        return True


class HostHiddenStatesConnector(ExampleHiddenStatesConnector):
    """The stock connector with a plain copy. A file is written aside and renamed, so it is whole even for a reader without locks."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        """Copy a finished request's states out of the cache and have a thread write them, which then lets their lock go."""
        if not self._is_tp_rank_zero:
            return
        cache, size, tokens = self._kv_cache, self._block_size, len(pending.token_ids)
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * size + torch.arange(size)).flatten()[:tokens].to(cache.device)
        states = extract_from_kv_cache(cache, slots, tokens).cpu().contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.to(torch.int64)}
        lock = self._lock_fds.pop(pending.req_id, None)  # taken when the request arrived; none where locks are switched off
        future = self._executor.submit(_write, tensors, Path(pending.filename), lock)
        self._req_copy_events[pending.req_id] = Finished()
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))


def _write(tensors: dict[str, torch.Tensor], path: Path, lock: int | None) -> None:
    partial_path = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial_path)
        os.replace(partial_path, path)
    finally:
        partial_path.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)
