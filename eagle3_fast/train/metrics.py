"""Numbers about a training run: per-step accuracies, simulated acceptance length, and where they are written.

Three accuracies of step k are easily confused. *marginal*: right at step k, whatever came before. *full* (speculators' name): right at
steps 0..k, a joint probability. *conditional*: right at step k given right before, the one that papers report; the product of the
first k + 1 conditionals is the chance that k + 1 drafts are all accepted. tau = 1 + sum of those products: tokens per verifier
pass, the verifier's own token included; nothing accepted gives 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from eagle3_fast.files import written_aside
from eagle3_fast.records import PackedBatch, TTTOutput
from eagle3_fast.train.loggers import Boards
from eagle3_fast.train.ranks import Ranks

S3_COUNT_FLOOR = 1e-5
"""What speculators 0.3 adds to the denominators of its accuracies."""


@dataclass
class Totals:
    """Sums over batches and ranks; divided only when read.

    kinds: divergences of a compound loss, each of which is told by itself.
    """

    kinds: Sequence[str] = ()
    sums: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0
    skipped: list[str] = field(default_factory=list)  # of this rank, each with its reason
    skipped_everywhere: int = 0  # of all ranks, once shared

    def add(self, output: TTTOutput, batch: PackedBatch) -> None:
        terms = ("term_losses",) if len(self.kinds) > 1 else ()
        for name in ("step_losses", "full_correct", "supervised", "cond_total", "marginal_correct", *terms):
            value = getattr(output, name).detach().double().flatten()
            self.sums[name] = self.sums.get(name, torch.zeros_like(value)) + value
        self.tokens += int((batch.document_ids >= 0).sum())
        self.skipped += batch.skipped

    def share(self, ranks: Ranks) -> None:
        """Make these the totals of all ranks."""
        names = sorted(self.sums)
        counts = torch.tensor([self.tokens, len(self.skipped)], dtype=torch.float64)
        whole = ranks.sum(torch.cat([*(self.sums[name].cpu() for name in names), counts]))
        *sums, counts = whole.split([*(len(self.sums[name]) for name in names), 2])
        self.sums = dict(zip(names, sums, strict=True))
        self.tokens, self.skipped_everywhere = map(int, counts.tolist())

    def divide_losses(self, divisor: Tensor) -> None:
        """Turn sums of losses into means; one divisor, or one of each TTT step."""
        divisor, terms = divisor.to(self.sums["step_losses"].device), self.sums.get("term_losses")
        self.sums["step_losses"] = self.sums["step_losses"] / divisor
        if terms is not None:
            self.sums["term_losses"] = (terms.view(-1, len(self.kinds)) / divisor.reshape(-1, 1)).flatten()

    def summary(self) -> dict[str, float]:
        """Rates of every step, tau, and counts. A rate without any case is left out rather than reported as 0."""
        result: dict[str, float] = {"loss": float(self.sums["step_losses"].sum())}
        full, supervised, marginal, cond = (
            self.sums[n].tolist() for n in ("full_correct", "supervised", "marginal_correct", "cond_total")
        )
        for k, loss in enumerate(self.sums["step_losses"].tolist()):
            result[f"loss_{k}"] = loss
            _put(result, f"marginal_acc_{k}", marginal[k], supervised[k])
            _put(result, f"full_acc_{k}", full[k], supervised[k])
            _put(result, f"cond_acc_{k}", full[k], cond[k])
        if "term_losses" in self.sums:
            names = (f"{kind}_loss_{k}" for k in range(len(full)) for kind in self.kinds)
            result |= zip(names, self.sums["term_losses"].tolist(), strict=True)
        result["tau"] = acceptance_length([result.get(f"cond_acc_{k}", 0.0) for k in range(len(full))])
        result["supervised_tokens"] = supervised[0]
        return result


def _put(result: dict[str, float], name: str, part: float, whole: float) -> None:
    if whole:
        result[name] = part / whole


def acceptance_length(conditional: list[float]) -> float:
    """tau: 1 + the sum of running products of conditional accuracies (the verifier's own token is counted)."""
    return 1.0 + sum(math.prod(conditional[: k + 1]) for k in range(len(conditional)))


def speculators_metrics(output: TTTOutput, kinds: list[str], ratios: bool) -> dict[str, float]:
    """The metrics of a batch under speculators' names: `X_sum` and `X_total` (0.9), or ratios (0.3, `ratios` true)."""
    pairs: dict[str, tuple[float, float]] = {"loss": (float(output.loss.detach()), 1.0)}
    for k in range(len(output.step_losses)):
        right = float(output.full_correct[k])
        pairs[f"full_acc_{k}"] = right, float(output.supervised[k])
        pairs[f"cond_acc_{k}"] = right, float(output.cond_total[k])
        pairs[f"loss_{k}"] = float(output.step_losses[k]), 1.0
        if len(kinds) > 1:
            for name, value in zip(kinds, output.term_losses[k].tolist(), strict=True):
                pairs[f"{name}_loss_{k}"] = value, 1.0
    if ratios:
        return {name: part / (whole + S3_COUNT_FLOOR) if "acc" in name else part for name, (part, whole) in pairs.items()}
    return {f"{name}_{end}": value for name, pair in pairs.items() for end, value in zip(("sum", "total"), pair, strict=True)}


class MetricsWriter:
    """Appends one JSON object a line to `metrics.jsonl`, and tells it to the run's other loggers. Without a path, nothing."""

    def __init__(self, path: Path | None, boards: Boards | None = None) -> None:
        self.path, self.boards = path, boards
        self.file = self._open()

    def _open(self) -> TextIO | None:
        if self.path is None:
            return None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path.open("a", encoding="utf-8")

    def rewind(self, step: int) -> None:
        """Drop what an earlier run wrote after `step`, the one that this run goes on from."""
        if self.path is None or self.file is None:
            return
        lines = [line for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in lines if json.loads(line)["global_step"] <= step]
        self.file.close()
        with written_aside(self.path) as partial:
            partial.write_text("".join(kept), encoding="utf-8")
        self.file = self._open()

    def write(self, step: int, values: dict[str, Any]) -> None:
        if self.file is not None:
            self.file.write(json.dumps({"global_step": step, **values}) + "\n")
            self.file.flush()
        if self.boards is not None:
            self.boards.log(values, step)

    def close(self, failed: bool = False) -> None:
        if self.file is not None:
            self.file.close()
        if self.boards is not None:
            self.boards.close(failed)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)
