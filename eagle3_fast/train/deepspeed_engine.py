"""DeepSpeed behind the engine's interface: ZeRO 0 to 3 on any number of ranks. The only file that knows DeepSpeed's vocabulary.

The draft is one module to ZeRO-3: its weights serve every step of training-time test, so a rank gathers them once for a packed
batch, not once for each layer and step, and every rank makes the same collectives whatever rows its batch holds.

DeepSpeed cuts gradients, float32 masters and optimizer states; the updates are ours, so that they are those of one process:
Muon works on whole matrices that travel to one rank each (`train.muon`), AdamW is torch's. Masters and states are saved whole and by name
(`train.engine.training_state`): a run goes on with another number of ranks or another stage.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn
from torch.optim import Optimizer

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.log import logger
from eagle3_fast.model.draft import Draft
from eagle3_fast.model.ttt import Objective, RowPlan, run_ttt
from eagle3_fast.precision import training_device, training_dtype
from eagle3_fast.records import PackedBatch, TTTOutput
from eagle3_fast.train.engine import Updates, checked_names, training_state
from eagle3_fast.train.footprint import reduce_bucket
from eagle3_fast.train.muon import Muon, PartitionedMuon
from eagle3_fast.train.optim import build_optimizers
from eagle3_fast.train.partitions import Partition, each_cut, row_cut
from eagle3_fast.train.ranks import Ranks


class DeepSpeedEngine:
    """One rank of a run that a launcher started."""

    def __init__(self, draft: Draft, objective: Objective, config: RunConfig, planned_steps: int, ranks: Ranks) -> None:
        deepspeed_logger.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's calls, not the user's
        self.draft, self.objective, self.ranks = draft, objective, ranks
        self.device, self.dtype = training_device(), training_dtype(config.train.data.hidden_states_dtype)
        self.names = {value: name for name, value in draft.named_parameters() if value.requires_grad}
        settings = deepspeed_settings(config, self.dtype, sum(value.numel() for value in self.names))
        self.stage: int = settings["zero_optimization"]["stage"]
        self.max_grad_norm = config.engine.max_grad_norm
        muon = PartitionedMuon if self.stage else Muon
        self.updates = Updates(build_optimizers(draft.named_parameters(), config.train.optimizer, muon), config, planned_steps)
        unit, chain = _Unit(draft.to(self.device)), _Chain(self.updates.optimizers)
        self.engine, *_ = deepspeed.initialize(model=unit, optimizer=chain, config=settings)
        self.partitions = self._partitions()
        for optimizer in self.updates.optimizers:
            if isinstance(optimizer, PartitionedMuon):
                optimizer.partitions = self.partitions
        logger.info("DeepSpeed: ZeRO-%d, %d rank%s", self.stage, ranks.size, "s" * (ranks.size > 1))

    def forward(self, batch: PackedBatch, plan: RowPlan, divisor_K: Tensor | None) -> TTTOutput:
        single = self.dtype == torch.float32 or self.stage  # ZeRO keeps weights in the run's dtype; without it they stay float32
        with nullcontext() if single else torch.autocast(self.device, dtype=self.dtype):
            values = self.engine(lambda: run_ttt(self.draft, batch.to(self.device), self.objective, divisor_K, plan))
        return TTTOutput(*values)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.ranks.size, scale_wrt_gas=False)  # DeepSpeed takes the mean over ranks

    def step(self) -> float:
        norm = self._step_whole() if self.stage == 0 else self._step_partitioned()
        self.updates.go_to(self.updates.count + 1)
        return norm

    def _step_partitioned(self) -> float:
        """ZeRO leaves everything as it is where the norm is not finite."""
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return float(norm if norm is not None else torch.nan)

    def _step_whole(self) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.names, self.max_grad_norm))
        if math.isfinite(norm):
            self.engine.step()
        self.engine.zero_grad()
        return norm

    def skip(self) -> None:
        self.updates.go_to(self.updates.count + 1)

    def learning_rates(self) -> dict[str, float]:
        return self.updates.rates()

    @contextmanager
    def whole_draft(self) -> Iterator[Draft]:
        gathered = deepspeed.zero.GatheredParameters(list(self.draft.parameters())) if self.stage == 3 else nullcontext()
        with gathered:
            yield self.draft

    def state_dict(self) -> dict[str, Any]:
        masters: dict[str, Tensor] = {}
        moments: dict[str, dict[str, Tensor]] = {name: {} for name in self.names.values()}
        for piece, optimizer in self._pieces():
            partition = self.partitions[piece]
            masters |= partition.gather(piece.detach())
            for key, value in sorted(optimizer.state[piece].items()):
                if value.shape == piece.shape:
                    for name, whole in partition.gather(value).items():
                        moments[name][key] = whole
                else:  # a count
                    moments |= {name: {**moments[name], key: value.clone()} for name in partition.names}
        return training_state(masters, moments, self.updates.count) if self.ranks.first else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        checked_names(state, set(self.names.values()))
        for piece, optimizer in self._pieces():
            partition = self.partitions[piece]
            partition.scatter(state["masters"], piece.data)
            held = optimizer.state[piece]
            held.clear()
            for key, value in state["moments"][partition.names[0]].items():
                if value.shape == partition.shapes[0] and value.ndim:
                    held[key] = torch.zeros_like(piece)
                    partition.scatter({name: state["moments"][name][key] for name in partition.names}, held[key])
                else:
                    held[key] = value.to(piece.device, copy=True)
        self._masters_to_weights()
        self.updates.go_to(state["updates"])

    def _masters_to_weights(self) -> None:
        if self.stage == 3:
            for group in range(len(self.engine.optimizer.fp32_partitioned_groups_flat)):
                self.engine.optimizer._reassign_or_swap_out_partitioned_parameters(group)
        elif self.stage:
            self.engine.optimizer.update_lp_params()

    def _pieces(self) -> Iterator[tuple[Tensor, Optimizer]]:
        """This rank's flat masters (without ZeRO the parameters themselves), each with the optimizer that updates it."""
        owner = {self.names[value]: optimizer for value, optimizer in self.updates.owner.items()}
        for piece, partition in self.partitions.items():
            yield piece, owner[partition.names[0]]

    def _partitions(self) -> dict[Tensor, Partition]:
        """How each flat tensor of masters is made up."""
        rank, size, zero = self.ranks.rank, self.ranks.size, self.engine.optimizer
        if self.stage == 0:  # nothing is cut
            return {value: each_cut([name], [value.shape], 0, 1) for value, name in self.names.items()}
        if self.stage == 3:
            groups = zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
            return {
                piece: each_cut([self.names[p] for p in group], [p.ds_shape for p in group], rank, size) for piece, group in groups
            }
        if isinstance(zero, BF16_Optimizer):  # what DeepSpeed takes for stage 1 in bfloat16; the same cut under other names
            groups = zip(zero.fp32_groups_flat_partition, zero.bf16_groups, strict=True)
        else:
            groups = zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True)
        return {
            piece: row_cut([self.names[p] for p in group], [p.shape for p in group], piece.numel(), rank, size)
            for piece, group in groups
        }


class _Unit(nn.Module):
    """What DeepSpeed sees of the draft: one module that owns all parameters and uses them in one forward call."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        for name, value in draft.named_parameters():
            self.register_parameter(name.replace(".", "/"), value)

    def forward(self, run: Callable[[], TTTOutput]) -> tuple[Any, ...]:
        """As a tuple: DeepSpeed finds the tensors of a backward pass in tuples only."""
        return tuple(vars(run()).values())


class _Chain(Optimizer):
    """Several optimizers as the one that DeepSpeed drives: it exchanges the tensors in their groups for flat pieces."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


def deepspeed_settings(config: RunConfig, dtype: torch.dtype, trained: int) -> dict[str, Any]:
    """DeepSpeed's own configuration: what the run file says, and the keys that the user's JSON adds to it.

    trained: elements of the trainable parameters.
    Raises InputError where the JSON says something else than the run file, or sets what is the run file's business.
    """
    section, own = config.deepspeed, _own_settings(config, dtype)
    settings = own if section.config is None else _merged(own, _theirs(section.config), section.config, "")
    if section.stage:
        settings["zero_optimization"].setdefault("reduce_bucket_size", reduce_bucket(trained))
    return settings


def _theirs(path: str) -> dict[str, Any]:
    """The user's JSON."""
    try:
        theirs = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not a readable DeepSpeed JSON ({error}); correct deepspeed.config") from None
    if not isinstance(theirs, dict):
        raise InputError(f"{path}: a DeepSpeed JSON is a mapping, this is {type(theirs).__name__}; correct deepspeed.config")
    for key, remedy in ELSEWHERE.items():
        if key in theirs:
            raise InputError(f"{path}: {key} is set by the run file ({remedy}); remove it from the JSON")
    return theirs


ELSEWHERE = {
    "optimizer": "train.optimizer",
    "scheduler": "train.scheduler",
    "fp16": "train.data.hidden_states_dtype, bfloat16 or float32",
    "amp": "train.data.hidden_states_dtype",
    "train_batch_size": "total_seq_len, engine.accumulation and the number of ranks",
}


def _own_settings(config: RunConfig, dtype: torch.dtype) -> dict[str, Any]:
    section = config.deepspeed
    zero: dict[str, Any] = {"stage": section.stage}
    if section.stage:
        zero |= {"overlap_comm": section.overlap_communication, "contiguous_gradients": True}
        if section.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the trainer says where a step ends
        "gradient_clipping": config.engine.max_grad_norm if section.stage else 0.0,
        "zero_optimization": zero,
        "bf16": {"enabled": bool(section.stage) and dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


def _merged(own: dict[str, Any], theirs: dict[str, Any], where: str, prefix: str) -> dict[str, Any]:
    """`own` and the keys that only `theirs` has; "auto" stands for the run file's value."""
    result = dict(own)
    for key, value in theirs.items():
        if isinstance(value, dict) and isinstance(own.get(key), dict):
            result[key] = _merged(own[key], value, where, f"{prefix}{key}.")
        elif key not in own:
            result[key] = value
        elif value not in ("auto", own[key]):
            raise InputError(
                f"{where}: {prefix}{key} is {value!r}, the run file makes it {own[key]!r}{RUN_FILE_KEYS.get(prefix + key, '')}; "
                "remove it from the JSON"
            )
    return result


RUN_FILE_KEYS = {
    "zero_optimization.stage": " (deepspeed.stage)",
    "zero_optimization.overlap_comm": " (deepspeed.overlap_communication)",
    "zero_optimization.offload_optimizer": " (deepspeed.offload_optimizer)",
    "gradient_clipping": " (engine.max_grad_norm)",
    "gradient_accumulation_steps": " (engine.accumulation; DeepSpeed's own count stays 1)",
}
