"""The processes that share a run: who is here, small exchanges between their hosts, and what to say when one is missing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3_fast.errors import InputError, Interrupted

Result = TypeVar("Result")

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other once all have joined: one may be writing a checkpoint."""
GRACE = timedelta(seconds=3)
"""After a failure, how long the others have to say that they are still there."""
SETTINGS = (
    "see that every rank was started and reaches that address; with several networks name one in NCCL_SOCKET_IFNAME or "
    "GLOO_SOCKET_IFNAME; cards that cannot copy to each other (two RTX PRO 6000 behind some boards) need NCCL_P2P_DISABLE=1; "
    "deepspeed.join_timeout sets the wait"
)


class Ranks:
    """One process among `size`. Started without a launcher it is alone, and nothing here communicates.

    Exchanges run on the hosts (gloo) and wait for no GPU; gradients and weights are the engine's own business.
    """

    def __init__(self, rank: int = 0, size: int = 1, launched: bool = False, store: dist.Store | None = None) -> None:
        self.rank, self.size, self.launched, self.store = rank, size, launched, store
        self.host = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if size > 1 else None

    @property
    def first(self) -> bool:
        """Whether this rank writes files, logs and bars."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks of a tensor on the CPU; the same bits on every rank."""
        if self.host is None:
            return values
        total = values.clone()
        dist.all_reduce(total, group=self.host)
        return total

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on some rank."""
        return bool(self.sum(torch.tensor(float(flag))))

    def on_first(self, work: Callable[[], Result]) -> Result:
        """What `work` returned on the first rank, given to all of them; its InputError is raised on all of them."""
        if self.host is None:
            return work()
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = work()
            except InputError as error:
                outcome[1] = str(error)
        dist.broadcast_object_list(outcome, src=0, group=self.host)
        if outcome[1] is not None:
            raise InputError(outcome[1])
        return outcome[0]

    def lost(self, error: Exception) -> Interrupted | None:
        """What to raise where `error` says that a rank is gone, naming it; None where it says something else."""
        broken = isinstance(error, dist.DistError) or "gloo/" in str(error) or "NCCL" in str(error)
        if self.store is None or not broken:
            return None
        missing = self._missing()
        names = f"rank {', '.join(map(str, missing))} of {self.size} is gone" if missing else f"ranks lost each other ({error})"
        return Interrupted(f"{names}; the steps since the last checkpoint are lost, run the same command to go on from it")

    def _missing(self) -> list[int]:
        """Ranks that do not answer within the grace time; the first one where nobody can be asked, since it holds the store."""
        assert self.store is not None
        try:
            self.store.set(f"alive/{self.rank}", "")
            time.sleep(GRACE.total_seconds())
            return [rank for rank in range(self.size) if not self.store.check([f"alive/{rank}"])]
        except (dist.DistError, RuntimeError):
            return [0]


def join(timeout: float) -> Ranks:
    """Meet the other processes that the launcher started; alone where no launcher did.

    Raises InputError where they are not all there after `timeout` seconds, or cannot exchange a number in as many.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Ranks()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    where, wait = f"rank {rank} of {size} at {address}:{port}", timedelta(seconds=timeout)
    owner = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(address, port, size, is_master=owner, timeout=wait)
    except (dist.DistError, RuntimeError) as error:
        raise InputError(f"{where}: not all ranks joined within {timeout:.0f} s ({_short(error)}); {SETTINGS}") from None
    device = "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        device = "cuda"
    backend = "nccl" if device == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
        dist.all_reduce(torch.ones((), device=device), async_op=True).wait(wait)
    except (dist.DistError, RuntimeError) as error:
        raise InputError(f"{where}: the ranks cannot exchange a number ({_short(error)}); {SETTINGS}") from None
    return Ranks(rank, size, launched=True, store=store)


def leave() -> None:
    """Close what `join` opened."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:160]
