"""Checkpoints: a servable draft and everything that training needs to go on, in one folder that is whole or absent.

{save_path}/{epoch}/   config.json, model.safetensors   the draft as it would be served
                       engine_state.pt                  float32 masters, optimizers, schedules, random state
                       training_state.json              epoch, local_step (steps done in it; 0: all), global_step, what the run depends on
                       val_metrics.json                 of the validation that followed, if one did; names end in `_epoch`
{save_path}/epoch{E}_end | epoch{E}_step{N} -> {epoch}   where it stands
{save_path}/checkpoint_best -> {epoch}                   lowest validation loss so far

The layout is that of speculators 0.9, whose own checkpoints are resumed too (`speculators_checkpoint`). It differs in that
`engine_state.pt` takes the place of two files that round to bfloat16, `val_metrics.json` lies in every validated checkpoint, an
interrupted run saves into its epoch's folder, from where it goes on, instead of `interrupted/`, and `config.py` and a copy of the
command are left out.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from eagle3_fast.errors import InputError
from eagle3_fast.files import read_json, write_json, written_aside
from eagle3_fast.log import logger
from eagle3_fast.model.draft import save_draft
from eagle3_fast.train.engine import Engine
from eagle3_fast.train.ranks import Ranks
from eagle3_fast.train.speculators_checkpoint import is_theirs, read_training

ABOUT = ("split", "epoch")
"""Entries of a validation's metrics that are no metrics."""


@dataclass
class Position:
    """Where a run stands, in optimizer steps. `local_step` counts those of the epoch; 0 of epoch E means that E has not begun."""

    epoch: int = 0
    local_step: int = 0
    global_step: int = 0


@contextmanager
def locked(save_path: Path) -> Iterator[None]:
    """Keep other runs out of the folder until the block ends; the lock goes with the process, however that ends."""
    save_path.mkdir(parents=True, exist_ok=True)
    with (save_path / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{save_path}: another run is training into this folder; stop it or give another save_path") from None
        yield


def save_checkpoint(
    save_path: Path, engine: Engine, ranks: Ranks, position: Position, depends_on: dict[str, Any], finished_epoch: bool
) -> Path:
    """Write the checkpoint of the epoch under way (or just finished) and point its link at it; returns its folder.

    Every rank takes part in gathering the state, the first one writes. Raises InputError, on all ranks, where the disk takes no more:
    the checkpoints before are untouched.
    """
    name = str(position.epoch - 1 if finished_epoch else position.epoch)
    state = {"engine": engine.state_dict(), "random": _random_state()}
    about = {
        **asdict(position),
        "epoch": int(name),  # speculators' meaning: the one that was under way or has just ended
        "learning_rates": engine.learning_rates(),
        "ranks": ranks.size,
        "depends_on": depends_on,
    }

    def write() -> None:
        partial = save_path / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            save_draft(draft, partial)
            with written_aside(partial / "engine_state.pt") as path:
                torch.save(state, path)
            write_json(partial / "training_state.json", about)
        except (OSError, RuntimeError, SafetensorError) as error:  # safetensors and torch have errors of their own for a full disk
            shutil.rmtree(partial, ignore_errors=True)
            raise InputError(
                f"{save_path}: checkpoint {name} cannot be written ({error}); earlier ones are untouched. Make room "
                "(engine.keep_last limits how many are kept) and run the same command again"
            ) from None
        _put_in_place(save_path, name, partial, f"epoch{name}_end" if finished_epoch else f"epoch{name}_step{position.local_step}")

    with engine.whole_draft() as draft:
        ranks.on_first(write)
    return save_path / name


def _put_in_place(save_path: Path, name: str, partial: Path, link: str) -> None:
    """Give a whole checkpoint its name; the one that had it goes."""
    folder, old, best = save_path / name, save_path / f".{name}.old", save_path / "checkpoint_best"
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        if best.is_symlink() and best.resolve() == folder.resolve():
            best.unlink()  # what it praised is about to be replaced
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    _drop_links(save_path, name)
    _point(save_path / link, name)


def _drop_links(save_path: Path, name: str) -> None:
    for link in save_path.glob(f"epoch{name}_*"):
        if link.is_symlink():
            link.unlink()


def drop_old(save_path: Path, keep_last: int | None) -> None:
    """Delete checkpoints of this trainer but the newest `keep_last` and the best one; what it did not write stays."""
    if keep_last is None:
        return
    best = (save_path / "checkpoint_best").resolve()
    whole = [folder for _, folder in _numbered(save_path) if is_own(folder)]
    for folder in whole[:-keep_last]:
        if folder != best:
            logger.info("%s: deleted, engine.keep_last is %d", folder, keep_last)
            shutil.rmtree(folder)
            _drop_links(save_path, folder.name)


def record_validation(save_path: Path, folder: Path, metrics: dict[str, Any]) -> None:
    """Keep the metrics beside the checkpoint, and point `checkpoint_best` at it when its loss is the lowest so far."""
    best = _best_loss(save_path)
    write_json(folder / "val_metrics.json", {f"{name}_epoch": value for name, value in metrics.items() if name not in ABOUT})
    if not math.isfinite(metrics["loss"]) or not metrics["supervised_tokens"]:
        logger.warning("%s: its validation says nothing (loss %s); it cannot become the best", folder, metrics["loss"])
    elif best is None or metrics["loss"] < best:
        _point(save_path / "checkpoint_best", folder.name)


def _best_loss(save_path: Path) -> float | None:
    """Validation loss of the linked checkpoint; from the log of metrics where its own file is gone. None: nothing is linked, or known."""
    link, log = save_path / "checkpoint_best", save_path / "metrics.jsonl"
    if not link.exists():
        return None
    if (link / "val_metrics.json").is_file():
        return read_json(link / "val_metrics.json").get("loss_epoch")
    logged = map(json.loads, log.read_text(encoding="utf-8").splitlines()[:-1] if log.is_file() else ())
    return min((row["loss"] for row in logged if row["split"] == "val"), default=None)


def latest_checkpoint(save_path: Path) -> Path | None:
    """The newest whole checkpoint; says which folder it passed over."""
    for old in save_path.glob(".*.old"):
        whole = save_path / old.name[1:].removesuffix(".old")
        if not whole.exists():  # killed between the two renames
            old.rename(whole)
    for partial in save_path.glob(".*.partial"):
        if partial.is_dir():
            logger.warning("%s: a save was cut short, passed over", partial)
    if (save_path / "interrupted").is_dir():
        logger.warning("%s/interrupted: left out; rename it to the number of its epoch to go on after that", save_path)
    for _, folder in reversed(_numbered(save_path)):
        if is_own(folder) or is_theirs(folder):
            return folder
        logger.warning("%s: not a whole checkpoint, passed over", folder)
    return None


def _numbered(save_path: Path) -> list[tuple[int, Path]]:
    """Folders named by an epoch, oldest first."""
    return sorted((int(path.name), path) for path in save_path.resolve().glob("*") if path.name.isdigit() and path.is_dir())


def is_own(folder: Path) -> bool:
    """Whether this trainer wrote a checkpoint last: speculators' trainer, going on from it, replaces `training_state.json`."""
    state = folder / "training_state.json"
    return (folder / "engine_state.pt").is_file() and state.is_file() and "depends_on" in read_json(state)


def servable_checkpoint(save_path: Path) -> Path:
    """The best checkpoint, or the newest where none was validated. Raises InputError where there is none."""
    best = save_path / "checkpoint_best"
    folder = best.resolve() if best.exists() else latest_checkpoint(save_path)
    if folder is None:
        raise InputError(f"{save_path}: holds no checkpoint; run `eagle3-fast train` first")
    return folder


def saved_slots(folder: Path) -> tuple[int, int] | None:
    """Batches of an optimizer step, and the ranks that shared them, of the run that wrote a checkpoint; speculators does not say."""
    if not is_own(folder):
        return None
    state = read_json(folder / "training_state.json")
    return state["depends_on"]["batches of a step"], state["ranks"]


def load_checkpoint(folder: Path, engine: Engine, depends_on: dict[str, Any]) -> Position:
    """Put weights, optimizer, schedule and random state back; refuses a run that depends on something else than the saved one.

    The number of ranks, their ZeRO stage and the learning rate may be others.
    """
    if not is_own(folder):
        with engine.whole_draft() as draft:
            tensors, state = read_training(folder, draft, depends_on["optimizer"])
        engine.load_state_dict(tensors)
        return _position(folder, state)
    state = read_json(folder / "training_state.json")
    saved = state["depends_on"]
    changed = [f"{name} (was {saved.get(name)}, is {value})" for name, value in depends_on.items() if saved.get(name) != value]
    if changed:
        raise InputError(
            f"{folder}: was trained with another {', '.join(changed)}; set it back, or start anew with another train.trainer.save_path"
        )
    try:
        tensors = torch.load(folder / "engine_state.pt", map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise InputError(
            f"{folder}/engine_state.pt: cannot be read ({error}); delete {folder} to resume from the one before"
        ) from None
    engine.load_state_dict(tensors["engine"])
    _restore_random_state(tensors["random"])
    return _position(folder, state)


def _position(folder: Path, state: dict[str, Any]) -> Position:
    """Within the epoch that the folder is named by, or at the beginning of the next."""
    local_step = state["local_step"]
    return Position(int(folder.name) + (local_step == 0), local_step, state["global_step"])


def _point(link: Path, name: str) -> None:
    """Make `link` a symbolic link to `name` beside it, in one rename."""
    fresh = link.with_name(f".{link.name}.partial")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(name)
    os.replace(fresh, link)


def _random_state() -> dict[str, Any]:
    version, keys, position = random.getstate()[0], *random.getstate()[1:]
    name, array, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
        "python": [version, list(keys), position],
        "numpy": [name, torch.from_numpy(np.asarray(array, dtype=np.int64)), *rest],
    }


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    else:
        logger.warning("resumed on another number of GPUs: their random state starts anew")
    version, keys, position = state["python"]
    random.setstate((version, tuple(keys), position))
    name, array, *rest = state["numpy"]
    np.random.set_state((name, array.numpy().astype(np.uint32), *rest))
