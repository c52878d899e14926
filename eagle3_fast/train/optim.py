"""Optimizers and learning-rate schedules (contract, section 6.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from eagle3_fast.config import OptimizerSection, SchedulerSection
from eagle3_fast.errors import InputError
from eagle3_fast.train.muon import Muon

MUON_NEVER = ("embed_tokens", "lm_head")
"""Matrices whose rows are words, not features: orthogonalising their update has no meaning."""
DEFAULT_WARMUP = 0.01
"""Share of all steps, where the run file says nothing."""


def build_optimizers(
    parameters: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection, muon: type[Muon] = Muon
) -> list[Optimizer]:
    """AdamW for all, or Muon (Jordan et al. 2024) for matrices and AdamW for the rest. Frozen parameters are left out."""
    trainable = [(name, value) for name, value in parameters if value.requires_grad]
    matrices = [value for name, value in trainable if section.optimizer == "muon" and is_matrix(name, value)]
    chosen = {id(value) for value in matrices}
    rest = [value for _, value in trainable if id(value) not in chosen]
    optimizers: list[Optimizer] = []
    if matrices:
        optimizers.append(
            muon(
                matrices,
                lr=section.muon_lr or section.lr,
                momentum=section.muon_momentum,
                weight_decay=section.muon_weight_decay,
                ns_steps=section.muon_ns_steps,
                adjust_lr_fn=section.muon_adjust_lr_fn,
            )
        )
    if rest:
        optimizers.append(AdamW(rest, lr=section.lr, weight_decay=section.weight_decay, fused=True))
    if not optimizers:
        raise InputError("the draft has no trainable parameter")
    return optimizers


def is_matrix(name: str, value: torch.Tensor) -> bool:
    return value.ndim == 2 and min(value.shape) > 1 and not any(part in name for part in MUON_NEVER)


def build_schedule(section: SchedulerSection, planned_steps: int) -> Callable[[int], float]:
    """By how much the rates of a step are multiplied, given the optimizer steps before it.

    Linear or cosine decay to 0 after a linear warm-up from 0; `none` keeps the rate.
    """
    total = section.scheduler_total_steps or planned_steps
    if section.scheduler_warmup_steps is not None:
        warmup = section.scheduler_warmup_steps
    elif section.scheduler_warmup_ratio is not None:
        warmup = int(total * section.scheduler_warmup_ratio)
    else:
        warmup = int(total * DEFAULT_WARMUP)
    shapes: dict[str, Callable[[int], float]] = {
        "linear": partial(_linear, total=total, warmup=warmup),
        "cosine": partial(_cosine, total=total, warmup=warmup, cycles=section.scheduler_num_cosine_cycles),
        "none": _constant,
    }
    return shapes[section.scheduler_type]


def _linear(step: int, total: int, warmup: int) -> float:
    if step < warmup:
        return step / warmup
    return max(0.0, (total - step) / max(1, total - warmup))


def _cosine(step: int, total: int, warmup: int, cycles: float) -> float:
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return max(0.0, 0.5 * (1 + math.cos(2 * math.pi * cycles * progress)))


def _constant(step: int) -> float:
    return 1.0
