"""Who runs backward passes and optimizer steps. The trainer knows this interface and nothing behind it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from eagle3_fast.config import RunConfig
from eagle3_fast.model.draft import Draft
from eagle3_fast.precision import training_device, training_dtype
from eagle3_fast.train.optim import build_optimizers, build_schedule


class Engine(Protocol):
    """One rank's share of training."""

    draft: Draft
    device: str

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that forward passes run in."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one packed batch."""

    def step(self, finite: Tensor) -> float:
        """Clip, update, advance the schedule, clear gradients; returns the gradient norm before clipping.

        finite: bool scalar, whether the step's losses are. Nothing is updated where they or the gradients are not. The one place in
        a training step that waits for the device.
        """

    def drop_gradients(self) -> None:
        """Forget the gradients of this step; the schedule goes on as if it had been taken."""

    def learning_rates(self) -> dict[str, float]:
        """By optimizer."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class LocalEngine:
    """One process: float32 master weights, forward passes under autocast."""

    def __init__(self, draft: Draft, config: RunConfig, planned_steps: int) -> None:
        self.device = training_device()
        self.draft = draft.to(self.device)
        self.dtype = training_dtype(config.train.data.hidden_states_dtype)
        self.max_grad_norm = config.engine.max_grad_norm
        self.parameters = [value for value in draft.parameters() if value.requires_grad]
        self.optimizers = build_optimizers(draft.named_parameters(), config.train.optimizer)
        self.schedules = [build_schedule(optimizer, config.train.scheduler, planned_steps) for optimizer in self.optimizers]

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device, dtype=self.dtype)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, finite: Tensor) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        if not (torch.isfinite(norm) & finite):
            self._clear()
        self._advance()
        return float(norm)

    def drop_gradients(self) -> None:
        self._clear()
        self._advance()

    def _advance(self) -> None:
        """Update and move the schedule on; parameters without a gradient stay as they are."""
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        self._clear()

    def _clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def learning_rates(self) -> dict[str, float]:
        return {type(optimizer).__name__: optimizer.param_groups[0]["lr"] for optimizer in self.optimizers}

    def state_dict(self) -> dict[str, Any]:
        """Masters in float32, optimizer and schedule states; nothing frozen."""
        masters = {name: value.detach() for name, value in self.draft.named_parameters() if value.requires_grad}
        return {
            "masters": masters,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedules": [schedule.state_dict() for schedule in self.schedules],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = {name: value for name, value in self.draft.named_parameters() if value.requires_grad}
        if own.keys() != state["masters"].keys():
            raise ValueError(f"checkpoint trains {sorted(state['masters'])}, this run trains {sorted(own)}")
        for name, value in state["masters"].items():
            own[name].data.copy_(value)
        for optimizer, schedule, *saved in zip(
            self.optimizers, self.schedules, state["optimizers"], state["schedules"], strict=True
        ):
            _load_keeping_settings(optimizer, schedule, *saved)


def _load_keeping_settings(optimizer: Optimizer, schedule: LambdaLR, moments: dict[str, Any], progress: dict[str, Any]) -> None:
    """Moments and position from the checkpoint; rates, decay and momentum from the run file, which may have changed them."""
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    base_rates = schedule.base_lrs
    optimizer.load_state_dict(moments)
    schedule.load_state_dict(progress)
    schedule.base_lrs = base_rates
    for group, own, rate, shape in zip(optimizer.param_groups, settings, base_rates, schedule.lr_lambdas, strict=True):
        group.update(own, lr=rate * shape(schedule.last_epoch))
