"""What the trainers of released speculators are given by the runners: our batches, and a listener to their losses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from safetensors.torch import load_file


class Batches:
    """What a trainer asks of a loader: batches of an epoch, of which it may skip the first ones through the sampler's cache.

    path: safetensors whose names are `{epoch}.{step}.{field}`; a trainer is told that no sample of theirs was unusable.
    """

    def __init__(self, path: str) -> None:
        self.epochs: dict[int, list[dict[str, Any]]] = {}
        for name, value in load_file(path).items():
            epoch, step, field = name.split(".", 2)
            steps = self.epochs.setdefault(int(epoch), [])
            steps += [{"error_records": 0} for _ in range(int(step) + 1 - len(steps))]
            steps[int(step)][field] = value
        self.batch_sampler = self
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self._cached_generated_batches = epoch, self._generate_batches(epoch)

    def _generate_batches(self, epoch: int) -> list[int]:
        return list(range(len(self.epochs[epoch])))

    def __len__(self) -> int:
        return len(self._cached_generated_batches[1])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch, steps = self._cached_generated_batches
        return (dict(self.epochs[epoch][step]) for step in steps)


class Losses(logging.Handler):
    """The loss of every step, from a trainer's own log of metrics."""

    def __init__(self, metrics: logging.Logger) -> None:
        super().__init__()
        metrics.addHandler(self)
        metrics.setLevel(logging.INFO)
        self.values: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.values.append(record.msg["train"]["loss"])
