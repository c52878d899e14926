"""The verb `plan`: what disk and GPU memory a run needs, and which ZeRO stage, recompute and accumulation fit, before anything is made.

Sizes come from the run file and the verifier's config.json alone; the formulas are those of `footprint`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.extract.shape import VerifierShape, load_config, model_class, verifier_shape
from eagle3_fast.log import logger
from eagle3_fast.model.config import DraftConfig, load_draft_config, parse_draft_config
from eagle3_fast.model.draft import Draft
from eagle3_fast.precision import training_device, training_dtype
from eagle3_fast.prepare.dataset import open_prepared
from eagle3_fast.prepare.vocab import load_mapping
from eagle3_fast.train.footprint import (
    Moment,
    Resting,
    Setting,
    Stage,
    batch_bytes,
    moments,
    packed_head_bytes,
    resting,
    update_bytes,
    weigh,
)
from eagle3_fast.train.start import new_draft_config, trains_head, with_aux_layers

GIB = 2**30
UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}
USABLE = 0.92
"""Share of a GPU's memory that tensors can have; the rest is the CUDA context, NCCL's buffers and gaps of the allocator."""
STEP_ROWS = 65_536
"""Rows of one optimizer step that accumulation is recommended for: what speculators takes on eight GPUs at its default length."""
SHORTEST = 256
"""Packed batches shorter than this are not worth recommending; lengths are tried in multiples of it."""
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)


@dataclass(frozen=True)
class Footprint:
    """Bytes on one GPU in one setting."""

    setting: Setting
    resting: Resting
    batch: int
    moment: Moment  # the fullest of a packed batch
    update: int  # what an optimizer step makes and drops
    packed_heads: int  # on CPUs
    verifier: int  # the whole verifier, where hidden states are computed while training

    @property
    def total(self) -> int:
        rest = self.resting
        resting = rest.frozen + rest.parameters + rest.gradients + rest.masters + rest.optimizer
        held = resting + self.batch + self.packed_heads + self.verifier
        return held + max(rest.gathered + self.moment.total, self.update)


class Estimate:
    """The sizes of a run, read once; `footprint` turns them into bytes for one setting."""

    def __init__(self, config: RunConfig, item: int, online: bool) -> None:
        section = config.train.verifier
        shape = verifier_shape(section.verifier_name_or_path, section.trust_remote_code)
        self.config, self.draft = config, planned_draft(config, shape)
        with torch.device("meta"):
            self.weights = weigh(Draft(self.draft, train_head=trains_head(config)), config, item)
        here = online and not config.train.generation.vllm_endpoint
        self.verifier = item * _verifier_parameters(shape, section.trust_remote_code) if here else 0

    def footprint(self, setting: Setting, rows: int | None = None) -> Footprint:
        """`rows`: instead of `train.data.total_seq_len`."""
        config = self.config if rows is None else _with_rows(self.config, rows)
        return Footprint(
            setting,
            resting(self.weights, setting, config.deepspeed),
            batch_bytes(self.draft, config, setting),
            max(moments(self.draft, self.weights, config, setting), key=lambda moment: moment.total),
            update_bytes(self.weights, setting),
            packed_head_bytes(self.draft, config, setting),
            self.verifier,
        )


@dataclass(frozen=True)
class Plan:
    """What a run needs. `footprints`: every stage without and with recompute; `fitting`: the one recommended, if any."""

    estimate: Estimate
    gpus: int
    gpu_memory: int
    tokens: int | None  # of the prepared data; None where there is none yet
    footprints: list[Footprint]

    @property
    def usable(self) -> int:
        return int(USABLE * self.gpu_memory)

    @property
    def fitting(self) -> Footprint | None:
        """Without recompute before with it; on one GPU without DeepSpeed before with it.

        On several, stage 2 before stage 3, which also gathers the weights for every packed batch; the others send float32.
        """
        preference: tuple[Stage, ...] = STAGES if self.gpus == 1 else (2, 3, 1, 0)
        fits = {(x.setting.recompute, x.setting.stage): x for x in self.footprints if x.total <= self.usable}
        order = ((recompute, stage) for recompute in (False, True) for stage in preference)
        return next((fits[key] for key in order if key in fits), None)

    @property
    def token_bytes(self) -> int:
        """Of one token's hidden states on disk."""
        draft, dtype = self.estimate.draft, getattr(torch, self.estimate.config.train.data.hidden_states_dtype)
        return (draft.num_aux + 1) * draft.verifier_hidden_size * dtype.itemsize


def plan(config: RunConfig, gpus: int = 1, gpu_memory: str | None = None, online: bool = False) -> Plan:
    """Estimate a run on `gpus` GPUs of `gpu_memory` each ("96GiB"; none: that of the GPU present).

    online: the verifier computes hidden states while training, so every GPU holds it, whole and unquantised, unless a server does.
    Raises InputError for what cannot be read; that nothing fits is said by `recommendation`.
    """
    if gpus < 1:
        raise InputError(f"--gpus {gpus}: give the number of GPUs, 1 or more")
    memory = parse_bytes(gpu_memory) if gpu_memory is not None else _present_memory()
    setting = Setting(
        device="cuda",
        item=2 if config.train.data.hidden_states_dtype == "bfloat16" else 4,
        gpus=gpus,
        stage=0,
        recompute=False,
        accumulation=max(1, round(STEP_ROWS / (gpus * config.train.data.total_seq_len))),
    )
    estimate = Estimate(config, setting.item, online)
    footprints = [
        estimate.footprint(replace(setting, stage=stage, recompute=recompute)) for recompute in (False, True) for stage in STAGES
    ]
    return Plan(estimate, gpus, memory, _prepared_tokens(config), footprints)


def planned_draft(config: RunConfig, shape: VerifierShape) -> DraftConfig:
    """The draft that `train.start` would make, from sizes alone: its vocabulary need not have been chosen yet."""
    section = config.train.draft
    if section.from_pretrained:
        return with_aux_layers(load_draft_config(section.from_pretrained), config, shape)
    mapping = load_mapping(config, shape.vocab_size) if section.d2t_path else None
    draft = new_draft_config(config, shape, mapping)
    if mapping is not None or section.draft_vocab_size is None:
        return draft
    return parse_draft_config({**draft.model_dump(), "draft_vocab_size": section.draft_vocab_size}, "train.draft")


def _verifier_parameters(shape: VerifierShape, trust_remote_code: bool) -> int:
    config = load_config(shape.path, trust_remote_code)
    with torch.device("meta"):
        model = model_class(config).from_config(config, trust_remote_code=trust_remote_code)
    return sum(value.numel() for value in model.parameters())


def _prepared_tokens(config: RunConfig) -> int | None:
    if not (Path(config.train.data.data_path) / "state.json").is_file():
        return None
    return sum(open_prepared(config.train.data.data_path)["seq_len"])


def _with_rows(config: RunConfig, rows: int) -> RunConfig:
    data = config.train.data.model_copy(update={"total_seq_len": rows})
    return config.model_copy(update={"train": config.train.model_copy(update={"data": data})})


def parse_bytes(text: str) -> int:
    """`96GiB`, `96 GB` or `512MiB` in bytes. Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)", text.strip())
    if match is None or match[2] not in UNITS or float(match[1]) == 0:
        raise InputError(f"--gpu-memory {text!r}: give a number and one of {', '.join(UNITS)}, for example 96GiB")
    return int(float(match[1]) * UNITS[match[2]])


def _present_memory() -> int:
    if training_device() == "cpu":
        raise InputError("there is no GPU here to take the memory of; give --gpu-memory, for example 96GiB")
    return torch.cuda.get_device_properties(0).total_memory


def recommendation(plan: Plan) -> str:
    """Overrides of the run file that fit. Raises InputError, one line with the shortfall, where none do."""
    best = plan.fitting
    if best is None:
        raise InputError(_shortfall(plan))
    setting = best.setting
    stage = "" if plan.gpus == 1 and setting.stage == 0 else f"deepspeed.stage={setting.stage} "
    return (
        f"{stage}engine.recompute={str(setting.recompute).lower()} engine.accumulation={setting.accumulation}"
        f" ({_size(best.total)} of {_size(plan.usable)} usable, {plan.gpus * setting.accumulation} packed batches a step)"
    )


def _shortfall(plan: Plan) -> str:
    least = min(plan.footprints, key=lambda x: x.total)
    setting = least.setting
    how = f"ZeRO stage {setting.stage}{' with engine.recompute' if setting.recompute else ''}"
    missing = f"{_size(least.total)} of {_size(plan.usable)} usable, {_size(least.total - plan.usable)} too much"
    return f"nothing fits {plan.gpus} x {_size(plan.gpu_memory)}: the least, {how}, needs {missing}; {_remedy(plan, least)}"


def _remedy(plan: Plan, least: Footprint) -> str:
    if least.verifier > plan.usable / 2:
        return f"the verifier alone takes {_size(least.verifier)}: extract hidden states first and train without --online"
    for rows in range(plan.estimate.config.train.data.total_seq_len // SHORTEST * SHORTEST, 0, -SHORTEST):
        if plan.estimate.footprint(least.setting, rows).total <= plan.usable:
            return f"train.data.total_seq_len={rows} would fit"
    return "no total_seq_len would: take larger GPUs, more of them, or deepspeed.offload_optimizer=true"


def warn_if_too_big(config: RunConfig, online: bool = False, ranks: int = 1, stage: Stage = 0) -> None:
    """Log one warning where the run is estimated to need more than this machine's GPU, or on CPUs all its ranks more than its memory.

    ranks: processes of the run. stage: `deepspeed.stage` where a launcher started them; 0 for one process alone.
    """
    device = training_device()
    setting = Setting(
        device="cpu" if device == "cpu" else "cuda",
        item=4 if training_dtype(config.train.data.hidden_states_dtype) == torch.float32 else 2,
        gpus=ranks,
        stage=stage,
        recompute=config.engine.recompute,
        accumulation=config.engine.accumulation,
    )
    needed = Estimate(config, setting.item, online).footprint(setting).total
    if device == "cpu":
        needed, present, what = needed * ranks, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine"
    else:
        present, what = torch.cuda.get_device_properties(0).total_memory, "the GPU"
    if needed > present:
        logger.warning(
            "train: this run is estimated to need %s, %s has %s; `eagle3-fast plan` says what fits",
            _size(needed),
            what,
            _size(present),
        )


def table(plan: Plan) -> None:
    """Print disk, bytes per GPU by ZeRO stage, and what was assumed."""
    out = Console(highlight=False, soft_wrap=True)
    layers, hidden = plan.estimate.draft.num_aux + 1, plan.estimate.draft.verifier_hidden_size
    count, tokens = ("per million tokens", 10**6) if plan.tokens is None else (f"for {plan.tokens} tokens", plan.tokens)
    size = plan.token_bytes // (layers * hidden)
    out.print(
        f"hidden states on disk {count}: x {layers} layers x {hidden} x {size} bytes = {tokens * plan.token_bytes / 1e9:.2f} GB"
    )
    out.print(_stages(plan))
    frozen = {name.removesuffix(".weight"): amount for name, amount in plan.estimate.weights.frozen.items() if amount >= 2**20}
    out.print("frozen parts: " + ", ".join(f"{name} {_size(amount)}" for name, amount in frozen.items()))
    setting, train = plan.footprints[0].setting, plan.estimate.config.train
    out.print(
        f"assumed: {train.data.total_seq_len} rows a packed batch, all of them supervised (the worst case), "
        f"{train.loss.ttt_steps} steps, {train.data.hidden_states_dtype}, "
        f"engine.accumulation={setting.accumulation}, {USABLE:.0%} of {_size(plan.gpu_memory)} usable"
    )


def _stages(plan: Plan) -> Table:
    best = plan.fitting
    recompute = best is not None and best.setting.recompute
    shown = [x for x in plan.footprints if x.setting.recompute == recompute]
    other = [x for x in plan.footprints if x.setting.recompute != recompute]
    sheet = Table("GiB on each GPU", *(f"ZeRO {x.setting.stage}" for x in shown), title=f"{plan.gpus} x {_size(plan.gpu_memory)}")
    for column in sheet.columns[1:]:
        column.justify = "right"
    lines: dict[str, list[int]] = {
        "frozen verifier parts": [x.resting.frozen for x in shown],
        "parameters": [x.resting.parameters for x in shown],
        "gathered while computing": [x.resting.gathered for x in shown],
        "gradients": [x.resting.gradients for x in shown],
        "float32 masters": [x.resting.masters for x in shown],
        "optimizer states": [x.resting.optimizer for x in shown],
        "packed batch": [x.batch for x in shown],
        "activations": [x.moment.kept + x.moment.passing for x in shown],
        "workspace of the loss": [x.moment.workspace for x in shown],
        "verifier": [x.verifier for x in shown],
        "host memory, optimizer": [x.resting.host for x in shown],
    }
    for name, amounts in lines.items():
        if any(amounts):
            sheet.add_row(name, *(f"{amount / GIB:.2f}" for amount in amounts))
    sheet.add_section()
    for these, choice in ((shown, recompute), (other, not recompute)):
        sheet.add_row(f"total, engine.recompute={str(choice).lower()}", *(_verdict(plan, x) for x in these))
    return sheet


def _verdict(plan: Plan, footprint: Footprint) -> str:
    return f"{footprint.total / GIB:.2f}" + (" " if footprint.total <= plan.usable else "!")


def _size(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB"
