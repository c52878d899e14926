"""Who runs forward and backward passes and optimizer steps. The trainer knows this interface and nothing behind it."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from eagle3_fast.config import RunConfig
from eagle3_fast.model.draft import Draft
from eagle3_fast.model.ttt import Objective, RowPlan, run_ttt
from eagle3_fast.precision import training_device, training_dtype
from eagle3_fast.records import PackedBatch, TTTOutput
from eagle3_fast.train.optim import build_optimizers, build_schedule
from eagle3_fast.train.ranks import Ranks


class Engine(Protocol):
    """One rank's share of training. Every rank calls the same methods in the same order."""

    draft: Draft

    def forward(self, batch: PackedBatch, plan: RowPlan, divisor_K: Tensor | None) -> TTTOutput:
        """Loss and counts of a packed batch; arguments as those of `run_ttt`."""

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of one packed batch, `last` where it is the last of the optimizer step."""

    def step(self) -> float:
        """Clip, update, advance the schedule, clear gradients; returns the gradient norm before clipping.

        Nothing is updated where that norm is not finite. The one place in a training step that waits for the device.
        """

    def skip(self) -> None:
        """A step without gradients: the schedule goes on as if it had been taken."""

    def learning_rates(self) -> dict[str, float]:
        """By optimizer."""

    def whole_draft(self) -> AbstractContextManager[Draft]:
        """The draft with all its weights in place, for reading. They may be changed by nobody and are gone afterwards."""

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, on the first rank; see `training_state`. Empty on the others."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` of any engine, on any number of ranks, gave."""


def start_engine(draft: Draft, objective: Objective, config: RunConfig, planned_steps: int, ranks: Ranks) -> Engine:
    """DeepSpeed where a launcher started this process, one plain process otherwise."""
    if not ranks.launched:
        return LocalEngine(draft, objective, config, planned_steps)
    from eagle3_fast.train.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(draft, objective, config, planned_steps, ranks)


class Updates:
    """The optimizers of a run and the schedule that they share. `count` is the optimizer steps so far, taken or skipped."""

    def __init__(self, optimizers: list[Optimizer], config: RunConfig, planned_steps: int) -> None:
        self.optimizers = optimizers
        self.owner = {value: optimizer for optimizer in optimizers for group in optimizer.param_groups for value in group["params"]}
        self.base_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        self.schedule = build_schedule(config.train.scheduler, planned_steps)
        self.go_to(0)

    def go_to(self, count: int) -> None:
        """Set the rates of the step after `count` others."""
        self.count = count
        for optimizer, rates in zip(self.optimizers, self.base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * self.schedule(count)

    def rates(self) -> dict[str, float]:
        """Learning rates by the optimizer's name."""
        names = {type(optimizer).__name__.removeprefix("Partitioned"): optimizer for optimizer in self.optimizers}
        return {name: optimizer.param_groups[0]["lr"] for name, optimizer in names.items()}


def training_state(masters: dict[str, Tensor], moments: dict[str, dict[str, Tensor]], updates: int) -> dict[str, Any]:
    """The state that every engine writes and reads, by parameter name and in whole float32 tensors: independent of ranks and stages.

    masters: trainable parameters. moments: optimizer states of each. updates: position of the schedule.
    """
    return {"masters": masters, "moments": moments, "updates": updates}


def checked_names(state: dict[str, Any], own: set[str]) -> None:
    """Raise ValueError where a state is of other parameters than this run trains."""
    if own != state["masters"].keys():
        raise ValueError(f"checkpoint trains {sorted(state['masters'])}, this run trains {sorted(own)}")


class LocalEngine:
    """One process: float32 master weights, forward passes under autocast."""

    def __init__(self, draft: Draft, objective: Objective, config: RunConfig, planned_steps: int) -> None:
        self.device = training_device()
        self.draft, self.objective = draft.to(self.device), objective
        self.dtype = training_dtype(config.train.data.hidden_states_dtype)
        self.max_grad_norm = config.engine.max_grad_norm
        self.trainable = {name: value for name, value in draft.named_parameters() if value.requires_grad}
        self.updates = Updates(build_optimizers(draft.named_parameters(), config.train.optimizer), config, planned_steps)

    def forward(self, batch: PackedBatch, plan: RowPlan, divisor_K: Tensor | None) -> TTTOutput:
        with nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device, dtype=self.dtype):
            return run_ttt(self.draft, batch.to(self.device), self.objective, divisor_K, plan)

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.trainable.values(), self.max_grad_norm))
        if math.isfinite(norm):
            for optimizer in self.updates.optimizers:
                optimizer.step()
        for parameter in self.trainable.values():
            parameter.grad = None
        self.updates.go_to(self.updates.count + 1)
        return norm

    def skip(self) -> None:
        self.updates.go_to(self.updates.count + 1)

    def learning_rates(self) -> dict[str, float]:
        return self.updates.rates()

    def whole_draft(self) -> AbstractContextManager[Draft]:
        return nullcontext(self.draft)

    def state_dict(self) -> dict[str, Any]:
        masters = {name: value.detach() for name, value in self.trainable.items()}
        moments = {name: dict(self._moments(value)) for name, value in self.trainable.items()}
        return training_state(masters, moments, self.updates.count)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        checked_names(state, set(self.trainable))
        for name, value in self.trainable.items():
            value.data.copy_(state["masters"][name])
            moments = self._moments(value)
            moments.clear()
            moments.update({key: moment.to(value.device, copy=True) for key, moment in state["moments"][name].items()})
        self.updates.go_to(state["updates"])

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of a parameter, empty before its first update."""
        return self.updates.owner[parameter].state[parameter]
