"""Checkpoints of speculators' trainers, releases 0.3 and 0.9 (contract, section 6.4): going on from theirs, and letting theirs go on.

Their folder holds the draft in bfloat16 and, in bfloat16 too, the optimizers' states: `optimizer_state_dict.pt` (one torch state dict, a
list [Muon, AdamW], or under FSDP one by parameter name), `scheduler_state_dict.pt` unless the schedule is `none`, and
`training_state.json` (0.9, but not with `save_best`). Nothing of it says how many ranks there were or what the data was.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from eagle3_fast.config import NORM_KEYS, OptimizerSection, RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.files import read_json, written_aside
from eagle3_fast.log import logger
from eagle3_fast.model.config import DraftConfig, load_draft_config
from eagle3_fast.model.draft import VERIFIER_PARTS, Draft, load_draft, read_tensors
from eagle3_fast.train.engine import training_state
from eagle3_fast.train.optim import is_matrix

OPTIMIZER, SCHEDULER = "optimizer_state_dict.pt", "scheduler_state_dict.pt"
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
MODULE_ORDER = (
    "embed_tokens",
    "lm_head",
    "verifier_lm_head",
    "fc",
    "layers",
    "norm",
    "verifier_norm",
    "input_norm",
    "fc_norm",
)
"""Their draft's modules as release 0.9 registers them: its optimizers take states by position."""


def is_theirs(folder: Path) -> bool:
    """Whether a folder holds all that speculators writes first; what it writes afterwards may be absent in a good checkpoint."""
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", OPTIMIZER))


# --- from theirs ---------------------------------------------------------------------------------------------------------


def read_training(folder: Path, draft: Draft, optimizer: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Their checkpoint as the state that an engine takes (`engine.training_state`), and its `training_state.json`.

    Where release 0.3, or `save_best`, wrote none, the state of the schedule counts the steps.
    draft: the one that this run trains, its parameters whole; they are compared with, not changed. optimizer: `adamw` or `muon`.
    Raises InputError where their draft is not the run's, or where the optimizer is another one.
    """
    _refuse_other_draft(folder, draft)
    tensors = read_tensors(folder / "model.safetensors")
    _refuse_other_tensors(folder, tensors, draft)
    trainable = {name: value for name, value in draft.named_parameters() if value.requires_grad}
    states = _by_name(_unpickled(folder / OPTIMIZER), folder / OPTIMIZER)
    about = read_json(folder / "training_state.json") if (folder / "training_state.json").is_file() else {}
    updates = _updates(folder, about, states)
    moments = {}
    for name, value in trainable.items():
        kind = "muon" if optimizer == "muon" and is_matrix(name, value) else "adamw"
        held = states.get(name, {})
        if any(key not in held or held[key].shape != value.shape for key in MOMENTS[kind]):
            raise InputError(
                f"{folder / OPTIMIZER}: holds no {kind} state of {name}; set train.optimizer.optimizer and engine.compat to those of "
                "the run that wrote it, or start anew from its weights with train.draft.from_pretrained and another save_path"
            )
        moments[name] = {key: held[key].float() for key in MOMENTS[kind]}
        if kind == "adamw":
            moments[name]["step"] = torch.tensor(float(updates))  # theirs is rounded to bfloat16
    masters = {name: tensors[name].float() for name in trainable}
    logger.info("%s: a checkpoint of speculators; its weights and optimizer states come from bfloat16", folder)
    return training_state(masters, moments, updates), {"epoch": int(folder.name), "local_step": 0, "global_step": updates, **about}


def _refuse_other_draft(folder: Path, draft: Draft) -> None:
    theirs, ours = _facts(load_draft_config(folder)), _facts(draft.config)
    if theirs["eagle_aux_hidden_state_layer_ids"] is None:  # release 0.3 does not say
        theirs["eagle_aux_hidden_state_layer_ids"] = ours["eagle_aux_hidden_state_layer_ids"]
    other = [f"{name} ({theirs[name]}, in the run file {ours[name]})" for name in theirs if theirs[name] != ours[name]]
    if other:
        raise InputError(
            f"{folder}: this checkpoint of speculators is another draft in {', '.join(other)}; correct the run file, or take the "
            f"checkpoint's own config with --from-pretrained {folder}"
        )


def _facts(config: DraftConfig) -> dict[str, Any]:
    """What decides which function the weights are, beside their shapes."""
    layer = config.transformer_layer_config
    facts = {name: getattr(layer, name) for name in ("model_type", "num_attention_heads", "rms_norm_eps", "rope_parameters")}
    facts["sliding windows"] = [layer.window(index) for index in range(layer.num_hidden_layers)]
    return facts | {name: getattr(config, name) for name in (*NORM_KEYS, "eagle_aux_hidden_state_layer_ids")}


def _refuse_other_tensors(folder: Path, tensors: dict[str, Tensor], draft: Draft) -> None:
    """Names and shapes must be the draft's, and what this run does not train must hold the same values."""
    own = {name: value for name, value in draft.state_dict().items() if name not in VERIFIER_PARTS}
    faults = [f"{name} is missing" for name in own.keys() - tensors.keys() - {"embed_tokens.weight"}]
    faults += [f"{name} is not part of it" for name in tensors.keys() - own.keys()]
    common = sorted(own.keys() & tensors.keys())
    faults += [f"{name} is {list(tensors[name].shape)}" for name in common if tensors[name].shape != own[name].shape]
    if faults:
        raise InputError(f"{folder}/model.safetensors: not the draft of this run: {'; '.join(faults)}")
    frozen = own.keys() - {name for name, value in draft.named_parameters() if value.requires_grad}
    for name in (name for name in common if name in frozen):
        if not torch.equal(tensors[name], own[name].cpu().to(tensors[name].dtype)):
            raise InputError(
                f"{folder}/model.safetensors: {name} holds other values than this run would train with; name the same verifier and "
                f"vocabulary (and engine.compat 0.3 for a head that was trained), or take the checkpoint's own: --from-pretrained {folder}"
            )


def _by_name(payload: Any, path: Path) -> dict[str, dict[str, Tensor]]:
    """The state of every parameter that has one, whichever of the layouts it is in."""
    states: dict[str, dict[str, Tensor]] = {}
    try:
        for optimizer in payload if isinstance(payload, list) else [payload]:
            for group in optimizer["param_groups"]:
                names = group.get("param_names", group["params"])
                states |= {str(name): optimizer["state"].get(key, {}) for name, key in zip(names, group["params"], strict=True)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not an optimizer state as torch writes it ({error}); restore it") from None
    return states


def _updates(folder: Path, about: dict[str, int], states: dict[str, dict[str, Tensor]]) -> int:
    """Optimizer steps so far: as the schedule counted them, else as the trainer did, else as AdamW did (rounded to bfloat16)."""
    if (folder / SCHEDULER).is_file():
        schedule = _unpickled(folder / SCHEDULER)
        first = schedule[0] if isinstance(schedule, list) else schedule
        if not isinstance(first, dict) or not isinstance(first.get("last_epoch"), int):
            raise InputError(f"{folder / SCHEDULER}: not the state of a schedule as torch writes it; restore it")
        return first["last_epoch"]
    return about.get("global_step") or max((int(state["step"]) for state in states.values() if "step" in state), default=0)


def _unpickled(path: Path) -> Any:
    """Tensors and plain values; a file that wants more than that to be made when it is read is refused."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(f"{path}: damaged, or wants to run code when it is read: refused; restore it") from None
    except (RuntimeError, EOFError, OSError) as error:
        raise InputError(
            f"{path}: cannot be read ({error}); restore it, or delete {path.parent} to resume from the one before"
        ) from None


# --- to theirs -----------------------------------------------------------------------------------------------------------


def add_training_state(config: RunConfig, folder: Path) -> None:
    """Write into a checkpoint of ours what speculators 0.9 needs beside the draft to go on from it, one GPU or DDP.

    Costs 4 bytes for every trained value (AdamW); their format is bfloat16. Raises InputError where no release trains the same.
    """
    if config.engine.compat != "0.9":
        raise InputError(
            f"{folder}: trained its head (engine.compat {config.engine.compat}), which speculators 0.9 leaves as it is"
        )
    rates = read_json(folder / "training_state.json")["learning_rates"]
    engine = _unpickled(folder / "engine_state.pt")["engine"]
    optimizers = _their_optimizers(load_draft(folder), config.train.optimizer)
    schedules = [_schedule(optimizer, engine["updates"], rates[type(optimizer).__name__]) for optimizer in optimizers]
    states = [_optimizer_state(optimizer, engine["moments"]) for optimizer in optimizers]
    files = {OPTIMIZER: states, SCHEDULER: schedules} if config.train.scheduler.scheduler_type != "none" else {OPTIMIZER: states}
    for name, parts in files.items():
        with written_aside(folder / name) as path:
            torch.save(parts if len(parts) > 1 else parts[0], path)
    logger.info("%s: speculators 0.9 can go on from here; it takes weights and optimizer states in bfloat16", folder)


def _their_optimizers(draft: Draft, section: OptimizerSection) -> list[Optimizer]:
    """Optimizers without states over the draft's parameters, as their trainer makes them: its AdamW alone holds frozen ones as well."""
    parameters = sorted(draft.named_parameters(), key=lambda item: _place(item[0]))
    adamw: dict[str, Any] = {"lr": section.lr, "weight_decay": section.weight_decay}
    if section.optimizer == "adamw":
        return [AdamW(parameters, **adamw)]
    trained = [(name, value) for name, value in parameters if value.requires_grad]
    muon = Muon(
        [(name, value) for name, value in trained if is_matrix(name, value)],
        lr=section.muon_lr or section.lr,
        momentum=section.muon_momentum,
        weight_decay=section.muon_weight_decay,
        ns_steps=section.muon_ns_steps,
        adjust_lr_fn=section.muon_adjust_lr_fn,
    )
    return [muon, AdamW([(name, value) for name, value in trained if not is_matrix(name, value)], **adamw)]


def _place(name: str) -> tuple[int, int, bool]:
    """Sort key of a parameter; within a layer the order is ours but for `hidden_norm`, which they add last."""
    module, _, rest = name.partition(".")
    index = rest.partition(".")[0]
    return MODULE_ORDER.index(module), int(index) if index.isdigit() else 0, "hidden_norm" in name


def _schedule(optimizer: Optimizer, updates: int, rate: float) -> dict[str, Any]:
    """The state of a schedule over `optimizer` after so many updates, the next one at `rate`; the shape of the schedule is not in it."""
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    optimizer.param_groups[0]["lr"] = rate
    return {**schedule.state_dict(), "last_epoch": updates, "_step_count": updates + 1, "_last_lr": [rate]}


def _optimizer_state(optimizer: Optimizer, moments: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """torch's state dict with our moments in it, every float in bfloat16 as their trainer saves it."""
    whole = optimizer.state_dict()
    for group in whole["param_groups"]:
        for index, name in zip(group["params"], group["param_names"], strict=True):
            if name in moments:
                whole["state"][index] = {key: value.bfloat16() for key, value in moments[name].items()}
    return whole
