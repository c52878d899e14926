"""The training loop: windows of packed batches into optimizer steps, epochs into checkpoints."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3_fast.config import RunConfig
from eagle3_fast.endpoint import EndpointError
from eagle3_fast.errors import InputError, Interrupted
from eagle3_fast.extract.pt_folder import note_lengths
from eagle3_fast.extract.weights import verifier_fingerprint
from eagle3_fast.log import logger, progress
from eagle3_fast.model.ttt import RowPlan, plan_rows
from eagle3_fast.ops import select
from eagle3_fast.prepare.vocab import VocabMapping
from eagle3_fast.records import PackedBatch
from eagle3_fast.train.artifacts import record_run
from eagle3_fast.train.checkpoint import (
    Position,
    drop_old,
    is_own,
    latest_checkpoint,
    load_checkpoint,
    locked,
    record_validation,
    save_checkpoint,
    saved_slots,
)
from eagle3_fast.train.dry_run import dry_run
from eagle3_fast.train.engine import start_engine
from eagle3_fast.train.loader import PackedRows, training_loader, validation_loader
from eagle3_fast.train.loggers import Boards, require_loggers
from eagle3_fast.train.metrics import MetricsWriter, Totals
from eagle3_fast.train.noise import noise_of
from eagle3_fast.train.norm_rule import check_norm_rule
from eagle3_fast.train.plan import warn_if_too_big
from eagle3_fast.train.ranks import Ranks, join, leave
from eagle3_fast.train.start import objective, start_draft
from eagle3_fast.train.tracing import trace

PHASES = {"data": "fetch", "forward": "fwd", "backward": "bwd", "optimizer": "opt"}
"""Timed phases of a step, and how speculators calls them."""


def train(config: RunConfig, online: bool = False) -> dict[str, Any]:
    """Train a draft as the run file says, going on where an earlier run stopped; returns the last metrics (of a dry run, none).

    One process, or every process that a launcher (`deepspeed`) started. Raises InputError for what the user can mend, Interrupted
    after SIGTERM or SIGINT once a checkpoint is written, or where another rank is gone.
    """
    _seed(config)
    if config.train.dry_run:
        dry_run(config)
        return {}
    select(config.ops.impl, config.ops.logits)
    ranks = join(config.deepspeed.join_timeout)
    try:
        with ExitStack() as held:
            ranks.on_first(lambda: require_loggers(config))
            ranks.on_first(lambda: held.enter_context(locked(Path(config.train.trainer.save_path))))
            return Trainer(config, online, ranks).run()
    except RuntimeError as error:
        gone = ranks.lost(error)
        if gone is None:
            raise
        raise gone from None
    finally:
        leave()


class Trainer:
    """One run, or one rank of it. `position` says how far it is; everything else follows from the run file and the data."""

    def __init__(self, config: RunConfig, online: bool = False, ranks: Ranks | None = None) -> None:
        self.config, self.objective, self.ranks = config, objective(config), ranks or Ranks()
        self.save_path = Path(config.train.trainer.save_path)
        if self.ranks.first:
            warn_if_too_big(config, online, self.ranks.size, config.deepspeed.stage if self.ranks.launched else 0)
        draft = start_draft(config)
        if self.ranks.size > 1:
            self.ranks.on_first(lambda: note_lengths(config.train.data.data_path))
        rows = PackedRows(config, draft.config, online)
        self.ranks.on_first(lambda: check_norm_rule(config, rows, self.objective.verifier_norm))
        self.served = rows.served
        training, validation = rows.splits()
        self.checkpoint = self._checkpoint_to_resume()
        self.slots = self._batches_of_a_step()
        self.loader = training_loader(rows, training, config, self.ranks, self.slots)
        self.validation = validation_loader(rows, validation, config, self.ranks) if validation.lengths else None
        self.planned = self._planned_steps()
        self.engine = start_engine(draft, self.objective, config, self.planned, self.ranks)
        self.position = Position()
        self.depends_on = self._dependencies(rows)
        self.seconds: dict[str, float] = defaultdict(float)
        self.told: dict[str, float] = defaultdict(float)  # of `seconds`, what earlier lines of metrics held
        self.skipped = 0
        self.unvalidated: Path | None = None
        self.saved: tuple[int, Path] | None = None  # at which step, where
        self.interrupted = False
        self.metrics = MetricsWriter(None)
        self.last: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """All epochs from the current position to the end."""
        self._resume()
        if self.ranks.first:
            record_run(self.config, sys.argv, self.save_path)
        self.ranks.on_first(self._open_metrics)
        with self.metrics:
            if self.unvalidated is not None:  # an earlier run ended between this checkpoint and its validation
                self._validate(self.unvalidated)
            with (
                self._signals(),
                progress(total=self.planned, initial=self.position.global_step, unit="step", desc="train") as self.bar,
                trace(self.config.engine.profile_steps, self.save_path / "profile", self.ranks.rank) as self.tracer,
            ):
                while self.position.epoch < self.config.train.trainer.epochs and not self._at_step_limit():
                    self._epoch()
        self._summarise()
        return {**self.last, "global_step": self.position.global_step, "seconds": dict(self.seconds)}

    def _open_metrics(self) -> None:
        """The log of metrics, cut back to where this run goes on; only the first rank has one."""
        step = self.position.global_step
        self.metrics = MetricsWriter(self.save_path / "metrics.jsonl", Boards(self.config, step))
        self.metrics.rewind(step)

    def _summarise(self) -> None:
        """Where the time went and what was left out, in two lines at most."""
        if self.seconds:
            logger.info("time: %s", ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in self.seconds.items()))
        if self.skipped:
            logger.warning("%d unusable samples were skipped in training, each named above", self.skipped)

    def _planned_steps(self) -> int:
        """Optimizer steps of the whole run."""
        settings = self.config.train.trainer
        steps = sum(self.loader.count(epoch) for epoch in range(settings.epochs))
        return min(steps, settings.max_steps or steps)

    def _epoch(self) -> None:
        """The rest of the current epoch, its checkpoint and its validation. A checkpoint is written before anything can fail."""
        count = self.loader.count(self.position.epoch)
        if count == 0:
            raise InputError(f"{self.config.train.data.data_path}: its training rows do not fill a single packed batch")
        frequency = self.config.train.trainer.checkpoint_freq
        interval = max(1, round(count * frequency)) if frequency < 1 else 0
        saved_at, stop = self.position.local_step, False
        for window in self._windows():
            stop = self._step(window)
            self.position.local_step += 1
            if stop or self._at_step_limit():
                break
            if interval and interval <= self.position.local_step - saved_at and count - self.position.local_step >= interval / 4:
                self._save()
                saved_at = self.position.local_step
        finished = self.position.local_step >= count
        if finished:
            self.position.epoch, self.position.local_step = self.position.epoch + 1, 0
        ends = self.position.epoch == self.config.train.trainer.epochs or self._at_step_limit()
        due = finished and (frequency <= 1 or self.position.epoch == 1 or self.position.epoch % int(frequency) == 0)
        folder = self._save(finished) if due or ends or stop else None
        if stop:
            raise Interrupted(f"interrupted at step {self.position.global_step}; saved to {folder}, run the same command to go on")
        if finished or ends:
            self._validate(folder)

    def _windows(self) -> Iterator[list[PackedBatch]]:
        """This rank's batches of each step."""
        steps = self._while_served(self.loader.steps(self.position.epoch, self.position.local_step))
        while True:
            with self._timed("data"):
                window = next(steps, None)
            if window is None:
                return
            yield window

    def _while_served(self, steps: Iterator[list[PackedBatch]]) -> Iterator[list[PackedBatch]]:
        """`steps`; where some rank's server of hidden states is gone for good, all ranks save and raise InputError."""
        if not self.served:
            yield from steps
            return
        while True:
            window, failure = None, None
            try:
                window = next(steps, None)
            except EndpointError as error:
                failure = error
            if self.ranks.any(failure is not None):
                what = failure or "another rank has lost its server"
                raise InputError(f"step {self.position.global_step}: {what}; {self._kept()}, run the same command to go on")
            if window is None:
                return
            yield window

    def _kept(self) -> str:
        """Save what is not saved yet, and say where it is."""
        if self.position.global_step == 0:
            return "nothing was trained yet"
        if self.saved is None or self.saved[0] != self.position.global_step:
            self._save(finished_epoch=self.position.local_step == 0)
        assert self.saved is not None
        return f"saved to {self.saved[1]}"

    def _step(self, window: list[PackedBatch]) -> bool:
        """One optimizer step; returns whether some rank was asked to stop.

        The loss is divided by the supervised rows of all ranks and batches of the step, so that the split does not matter.
        """
        totals, began = Totals(list(self.objective.kinds)), time.perf_counter()
        plans = [plan_rows(batch, self.objective) for batch in window]
        counts, batches = self._counted(window, plans)
        by_step, supervised = self.config.engine.divisor == "step", bool(counts.any())
        with torch.set_grad_enabled(supervised):
            for at, (batch, plan) in enumerate(zip(window, plans, strict=True), start=1):
                with self._timed("forward"):
                    output = self.engine.forward(batch, plan, counts if by_step else None)
                totals.add(output, batch)
                if supervised:
                    with self._timed("backward"):
                        loss = output.loss if by_step else output.loss / batches
                        self.engine.backward(poisoned(loss), last=at == len(window))
        if not by_step:
            totals.divide_losses(batches)
        with self._timed("optimizer"):
            norm = self.engine.step() if supervised else self._skip_step()
        self.position.global_step += 1
        self.tracer.step()
        totals.share(self.ranks)
        self._report(totals, norm, time.perf_counter() - began, supervised)
        return self.ranks.any(self.interrupted)

    def _counted(self, window: list[PackedBatch], plans: list[RowPlan]) -> tuple[Tensor, Tensor]:
        """Supervised rows of each TTT step, and batches that hold samples, of the whole optimizer step over all ranks."""
        counts = torch.stack([plan.counts for plan in plans]).sum(0)
        filled = sum(bool((batch.document_ids >= 0).any()) or bool(batch.skipped) for batch in window)
        whole = self.ranks.sum(torch.cat((counts, torch.tensor([float(filled)]))))
        return whole[:-1], whole[-1].clamp_min(1)

    def _skip_step(self) -> float:
        self.engine.skip()
        return 0.0

    def _report(self, totals: Totals, norm: float, seconds: float, supervised: bool) -> None:
        """Write metrics; name what went wrong in this step and act as the run file says."""
        step, finite = self.position.global_step, math.isfinite(norm)
        self.skipped += totals.skipped_everywhere
        for sample in totals.skipped:
            logger.warning("step %d: skipped %s", step, sample)
        if not supervised and self.ranks.first:
            logger.warning("step %d: nothing to supervise in its batches; no update", step)
        if not finite:
            message = f"step {step}: loss or gradient is not finite; no update"
            if self.config.engine.on_nan == "stop":
                raise InputError(
                    f"{message}. Lower the learning rate or set engine.on_nan to skip; checkpoints are in {self.save_path}"
                )
            if self.ranks.first:
                logger.warning(message)
        values: dict[str, Any] = {
            "split": "train",
            "epoch": self.position.epoch,
            **totals.summary(),
            "grad_norm": norm,
            "tokens_per_s": totals.tokens / seconds,
            "skipped_samples": totals.skipped_everywhere,
            "skipped_step": not (finite and supervised),
            **{f"lr/{name}": rate for name, rate in self.engine.learning_rates().items()},
            **self._phase_times(),
            "profile/step_ms": 1e3 * seconds,
        }
        if step % self.config.train.trainer.log_freq == 0:
            self.metrics.write(step, values)
        self.last = values
        self.bar.update(1)
        self.bar.set_postfix(
            {"loss": f"{values['loss']:.3f}", "tau": f"{values['tau']:.2f}", "tok/s": round(values["tokens_per_s"])}
        )

    def _phase_times(self) -> dict[str, float]:
        """What each phase of the step took on the host, by speculators' names."""
        spent = {f"profile/{name}_ms": 1e3 * (self.seconds[phase] - self.told[phase]) for phase, name in PHASES.items()}
        self.told = self.seconds.copy()
        return spent

    @torch.no_grad()
    def _validate(self, folder: Path | None) -> None:
        """Loss and accuracies of the validation rows, weighted by their tokens; the best checkpoint so far gets the link."""
        if self.validation is None or not self.validation.count(0):
            return
        totals = Totals(list(self.objective.kinds))
        with self._timed("validation"):
            for step in self._while_served(self.validation.steps(0)):
                for batch in step:
                    # Undivided sums of every batch: the summary divides once, by all supervised rows.
                    undivided = torch.ones(self.objective.ttt_steps)
                    totals.add(self.engine.forward(batch, plan_rows(batch, self.objective), undivided), batch)
            totals.share(self.ranks)
        for sample in totals.skipped:
            logger.warning("validation: skipped %s", sample)
        totals.divide_losses(totals.sums["supervised"].clamp_min(1))
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
        if folder is not None and self.ranks.first:
            record_validation(self.save_path, folder, values)
            drop_old(self.save_path, self.config.engine.keep_last)  # a new best one frees the old one

    def _save(self, finished_epoch: bool = False) -> Path:
        with self._timed("checkpoint"):
            folder = save_checkpoint(self.save_path, self.engine, self.ranks, self.position, self.depends_on, finished_epoch)
            if self.ranks.first:
                drop_old(self.save_path, self.config.engine.keep_last)
        self.saved = self.position.global_step, folder
        return folder

    def _checkpoint_to_resume(self) -> Path | None:
        folder = self.ranks.on_first(lambda: latest_checkpoint(self.save_path))
        if folder is not None and self.config.train.trainer.no_resume_from_checkpoint:
            raise InputError(f"{self.save_path}: holds checkpoints that are not to be resumed; give another save_path or delete it")
        return folder

    def _batches_of_a_step(self) -> int:
        """Over all ranks and micro-batches. A run that goes on with another number of ranks keeps it, with another accumulation."""
        own = self.ranks.size * self.config.engine.accumulation
        if self.checkpoint is None:
            return own
        saved = saved_slots(self.checkpoint)
        if saved is None:
            return own
        slots, ranks = saved
        if slots == own or ranks == self.ranks.size:
            return own
        if slots % self.ranks.size:
            raise InputError(
                f"{self.checkpoint}: was trained with {slots} packed batches a step, which {self.ranks.size} ranks cannot share evenly; "
                f"resume on a number of ranks that divides {slots}"
            )
        logger.info("resuming on %d ranks instead of %d: accumulation is %d", self.ranks.size, ranks, slots // self.ranks.size)
        return slots

    def _resume(self) -> None:
        folder = self.checkpoint
        if folder is None:
            return
        self.position = load_checkpoint(folder, self.engine, self.depends_on)
        self.saved = self.position.global_step, folder
        logger.info("resumed from %s at step %d", folder, self.position.global_step)
        missed = self.position.local_step == 0 and not (folder / "val_metrics.json").is_file()
        self.unvalidated = folder if missed and is_own(folder) else None  # speculators keeps the metrics of its best alone

    def _dependencies(self, rows: PackedRows) -> dict[str, Any]:
        """What the order of samples and the meaning of the weights depend on; a resumed run must have the same."""
        draft, noise = self.engine.draft, noise_of(self.config)
        return {
            "rows": len(rows.rows),
            "training rows": len(self.loader.split.lengths),
            "total_seq_len": self.config.train.data.total_seq_len,
            "batches of a step": self.slots,
            "seed": self.config.train.seed,
            "draft vocabulary": VocabMapping(draft.d2t.cpu(), draft.t2d.cpu()).digest() if draft.config.reduced_vocab else "full",
            "draft": draft.config.model_dump(mode="json", exclude={"speculators_config"}),
            "objective": asdict(self.objective),
            "noise": noise and asdict(noise),
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
        """The first SIGTERM or SIGINT ends the run after the current step; a second one acts as it would without us.

        Under a launcher all further ones are ignored: it passes one Ctrl-C on several times, and kills what does not end in time.
        """
        before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def ask(number: int, frame: Any) -> None:
            self.interrupted = True
            for asked in before if self.ranks.launched else (number,):
                signal.signal(asked, signal.SIG_IGN if self.ranks.launched else before[asked])

        for number in before:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def poisoned(loss: Tensor) -> Tensor:
    """The loss; where it is not finite, its gradients become NaN, so that the gradient norm tells of it on every rank."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


def _seed(config: RunConfig) -> None:
    random.seed(config.train.seed)
    np.random.seed(config.train.seed)
    torch.manual_seed(config.train.seed)
    if config.engine.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
    torch.use_deterministic_algorithms(config.engine.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # our own tests do this; here it would only cost time
