"""The training loop: windows of packed batches into optimizer steps, epochs into checkpoints."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError, Interrupted
from eagle3_fast.extract.weights import verifier_fingerprint
from eagle3_fast.log import logger, progress
from eagle3_fast.model.ttt import plan_rows, run_ttt
from eagle3_fast.ops import select
from eagle3_fast.prepare.vocab import VocabMapping
from eagle3_fast.records import PackedBatch
from eagle3_fast.train.checkpoint import Position, latest_checkpoint, load_checkpoint, record_validation, save_checkpoint
from eagle3_fast.train.engine import LocalEngine
from eagle3_fast.train.loader import VALIDATION_SEED, BatchLoader, PackedRows
from eagle3_fast.train.metrics import MetricsWriter, Totals
from eagle3_fast.train.start import objective, start_draft


def train(config: RunConfig, online: bool = False) -> dict[str, Any]:
    """Train a draft as the run file says, going on where an earlier run stopped; returns the last metrics.

    Raises InputError for what the user can mend, Interrupted after SIGTERM or SIGINT once a checkpoint is written.
    """
    _seed(config)
    select(config.ops.impl, config.ops.logits)
    return Trainer(config, online).run()


class Trainer:
    """One run. `position` says how far it is; everything else follows from the run file and the data."""

    def __init__(self, config: RunConfig, online: bool = False) -> None:
        self.config, self.objective = config, objective(config)
        draft = start_draft(config)
        rows = PackedRows(config, draft.config, online)
        training, validation = rows.splits()
        self.loader = BatchLoader(rows, training, config, config.train.seed)
        self.validation = BatchLoader(rows, validation, config, VALIDATION_SEED) if validation.lengths else None
        self.engine = LocalEngine(draft, config, self.planned_steps())
        self.save_path = Path(config.train.trainer.save_path)
        self.position = Position()
        self.depends_on = self._dependencies(rows)
        self.seconds: dict[str, float] = defaultdict(float)
        self.skipped = 0
        self.unvalidated: Path | None = None
        self.interrupted = False
        self.last: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """All epochs from the current position to the end."""
        self._resume()
        settings = self.config.train.trainer
        board = Path(self.config.train.logging.log_dir) / (self.config.train.logging.run_name or "run")
        self.metrics = MetricsWriter(self.save_path / "metrics.jsonl", board if self.config.train.logging.logger else None)
        self.metrics.rewind(self.position.global_step)
        if self.unvalidated is not None:  # an earlier run ended between this checkpoint and its validation
            self._validate(self.unvalidated)
        steps = self.planned_steps()
        with self._signals(), progress(total=steps, initial=self.position.global_step, unit="step", desc="train") as self.bar:
            while self.position.epoch < settings.epochs and not self._at_step_limit():
                self._epoch()
        self.metrics.close()
        self._summarise()
        return {**self.last, "global_step": self.position.global_step, "seconds": dict(self.seconds)}

    def _summarise(self) -> None:
        """Where the time went and what was left out, in two lines at most."""
        if self.seconds:
            logger.info("time: %s", ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in self.seconds.items()))
        if self.skipped:
            logger.warning("%d unusable samples were skipped in training, each named above", self.skipped)

    def planned_steps(self) -> int:
        """Optimizer steps of the whole run; the last window of an epoch may be short."""
        settings, window = self.config.train.trainer, self.config.engine.accumulation
        steps = sum(math.ceil(self.loader.count(epoch) / window) for epoch in range(settings.epochs))
        return min(steps, settings.max_steps or steps)

    def _epoch(self) -> None:
        """The rest of the current epoch, its checkpoint and its validation. A checkpoint is written before anything can fail."""
        count = self.loader.count(self.position.epoch)
        if count == 0:
            raise InputError(f"{self.config.train.data.data_path}: its training rows do not fill a single packed batch")
        frequency = self.config.train.trainer.checkpoint_freq
        interval = max(1, round(count * frequency)) if frequency < 1 else 0
        saved_at = self.position.local_step
        for window in self._windows():
            self._step(window)
            self.position.local_step += len(window)
            if self.interrupted or self._at_step_limit():
                break
            if interval and interval <= self.position.local_step - saved_at and count - self.position.local_step >= interval / 4:
                self._save()
                saved_at = self.position.local_step
        finished = self.position.local_step >= count
        if finished:
            self.position.epoch, self.position.local_step = self.position.epoch + 1, 0
        ends = self.position.epoch == self.config.train.trainer.epochs or self._at_step_limit()
        due = finished and (frequency <= 1 or self.position.epoch % int(frequency) == 1)
        folder = self._save(finished) if due or ends or self.interrupted else None
        if self.interrupted:
            raise Interrupted(f"interrupted at step {self.position.global_step}; saved to {folder}, run the same command to go on")
        if finished or ends:
            self._validate(folder)

    def _windows(self) -> Iterator[list[PackedBatch]]:
        """Groups of `accumulation` batches; the last of an epoch may hold fewer."""
        batches = self.loader.batches(self.position.epoch, self.position.local_step)
        while True:
            with self._timed("data"):
                window = list(islice(batches, self.config.engine.accumulation))
            if not window:
                return
            yield window

    def _step(self, window: list[PackedBatch]) -> None:
        """One optimizer step. Its loss is divided by the supervised rows of the whole window, so that the split does not matter."""
        totals, began = Totals(), time.perf_counter()
        plans = [plan_rows(batch, self.objective) for batch in window]
        counts = torch.stack([plan.counts for plan in plans])
        divisor_K = counts.sum(0) if self.config.engine.divisor == "step" else None
        for batch, plan in zip(window, plans, strict=True):
            with self._timed("forward"), self.engine.autocast():
                output = run_ttt(self.engine.draft, batch.to(self.engine.device), self.objective, divisor_K, plan)
            loss = output.loss if divisor_K is not None else output.loss / len(window)
            with self._timed("backward"):
                self.engine.backward(loss)
            totals.add(output, batch)
        if divisor_K is None:
            totals.sums["step_losses"] /= len(window)
        finite = torch.isfinite(totals.sums["step_losses"]).all()
        with self._timed("optimizer"):
            norm = self.engine.step(finite) if counts.any() else self._skip_step()
        self.position.global_step += 1
        self._report(totals, norm, time.perf_counter() - began, bool(finite) and math.isfinite(norm), bool(counts.any()))

    def _skip_step(self) -> float:
        self.engine.drop_gradients()
        return 0.0

    def _report(self, totals: Totals, norm: float, seconds: float, finite: bool, supervised: bool) -> None:
        """Write metrics; name what went wrong in this step and act as the run file says."""
        step = self.position.global_step
        self.skipped += len(totals.skipped)
        for sample in totals.skipped:
            logger.warning("step %d: skipped %s", step, sample)
        if not supervised:
            logger.warning("step %d: nothing to supervise in its batches; no update", step)
        if not finite:
            message = f"step {step}: loss or gradient is not finite; no update"
            if self.config.engine.on_nan == "stop":
                raise InputError(
                    f"{message}. Lower the learning rate or set engine.on_nan to skip; checkpoints are in {self.save_path}"
                )
            logger.warning(message)
        values: dict[str, Any] = {
            "split": "train",
            "epoch": self.position.epoch,
            **totals.summary(),
            "grad_norm": norm,
            "tokens_per_s": totals.tokens / seconds,
            "skipped_samples": len(totals.skipped),
            "skipped_step": not (finite and supervised),
            **{f"lr/{name}": rate for name, rate in self.engine.learning_rates().items()},
        }
        if step % self.config.train.trainer.log_freq == 0:
            self.metrics.write(step, values)
        self.last = values
        self.bar.update(1)
        self.bar.set_postfix(
            {"loss": f"{values['loss']:.3f}", "tau": f"{values['tau']:.2f}", "tok/s": round(values["tokens_per_s"])}
        )

    @torch.no_grad()
    def _validate(self, folder: Path | None) -> None:
        """Loss and accuracies of the validation rows, weighted by their tokens; the best checkpoint so far gets the link."""
        if self.validation is None or not self.validation.count(0):
            return
        totals = Totals()
        with self._timed("validation"), self.engine.autocast():
            for batch in self.validation.batches(0):
                plan = plan_rows(batch, self.objective)
                # Undivided sums of every batch: the summary divides once, by all supervised rows.
                undivided = torch.ones(self.objective.ttt_steps)
                totals.add(run_ttt(self.engine.draft, batch.to(self.engine.device), self.objective, undivided, plan), batch)
        for sample in totals.skipped:
            logger.warning("validation: skipped %s", sample)
        totals.divide_losses()
        values = {"split": "val", "epoch": self.position.epoch, **totals.summary()}
        self.metrics.write(self.position.global_step, values)
        self.last = {**self.last, **{f"val_{name}": value for name, value in values.items()}}
        rates = ", ".join(f"{values.get(f'cond_acc_{k}', 0):.3f}" for k in range(self.objective.ttt_steps))
        logger.info(
            "epoch %d: validation loss %.4f, conditional accuracy %s, tau %.3f",
            self.position.epoch,
            values["loss"],
            rates,
            values["tau"],
        )
        if folder is not None:
            record_validation(self.save_path, folder, values)

    def _save(self, finished_epoch: bool = False) -> Path:
        with self._timed("checkpoint"):
            return save_checkpoint(self.save_path, self.engine, self.position, self.depends_on, finished_epoch)

    def _resume(self) -> None:
        folder = latest_checkpoint(self.save_path)
        if folder is None:
            return
        if self.config.train.trainer.no_resume_from_checkpoint:
            raise InputError(f"{self.save_path}: holds checkpoints that are not to be resumed; give another save_path or delete it")
        self.position = load_checkpoint(folder, self.engine, self.depends_on)
        logger.info("resumed from %s at step %d", folder, self.position.global_step)
        self.unvalidated = folder if self.position.local_step == 0 and not (folder / "val_metrics.json").is_file() else None

    def _dependencies(self, rows: PackedRows) -> dict[str, Any]:
        """What the order of samples and the meaning of the weights depend on; a resumed run must have the same."""
        draft = self.engine.draft
        return {
            "rows": len(rows.rows),
            "training rows": len(self.loader.split.lengths),
            "total_seq_len": self.config.train.data.total_seq_len,
            "accumulation": self.config.engine.accumulation,
            "seed": self.config.train.seed,
            "draft vocabulary": VocabMapping(draft.d2t.cpu(), draft.t2d.cpu()).digest() if draft.config.reduced_vocab else "full",
            "draft": draft.config.model_dump(mode="json", exclude={"speculators_config"}),
            "objective": asdict(self.objective),
            "compat": self.config.engine.compat,
            "divisor": self.config.engine.divisor,
            "optimizer": self.config.train.optimizer.optimizer,
            "verifier": verifier_fingerprint(self.config.train.verifier.verifier_name_or_path),
        }

    def _at_step_limit(self) -> bool:
        limit = self.config.train.trainer.max_steps
        return limit is not None and self.position.global_step >= limit

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - began

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGTERM or SIGINT ends the run after the current step; a second one acts as it would without us."""
        before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def ask(number: int, frame: Any) -> None:
            self.interrupted = True
            signal.signal(number, before[number])

        for number in before:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _seed(config: RunConfig) -> None:
    random.seed(config.train.seed)
    np.random.seed(config.train.seed)
    torch.manual_seed(config.train.seed)
    if config.engine.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
    torch.use_deterministic_algorithms(config.engine.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # our own tests do this; here it would only cost time
