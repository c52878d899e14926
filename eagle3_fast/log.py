"""Logging and progress: plain lines for files, one bar with an ETA for every long step."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger("eagle3_fast")
_said: set[str] = set()


def configure(level: int = logging.INFO) -> None:
    """Send the package's log to standard error. Called by the command line only; a library user keeps their own handlers."""
    rank = int(os.environ.get("RANK", "0"))  # set by a launcher of several processes; all but the first say only what is wrong
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(level if rank == 0 else logging.WARNING)
    logger.propagate = False


def say_once(message: str) -> None:
    """Log `message` the first time it comes up in this process."""
    if message not in _said:
        _said.add(message)
        logger.info(message)


def progress(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """A tqdm bar (rate and ETA) on standard error; it prints a line about every ten seconds where there is no terminal."""
    from tqdm import tqdm

    interval = 0.1 if sys.stderr.isatty() else 10.0
    silent = os.environ.get("RANK", "0") != "0"
    return tqdm(items, file=sys.stderr, mininterval=interval, dynamic_ncols=True, disable=silent, **options)
