"""Released packages in environments of their own, and what they are given: our start, our batches, our settings in their words."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_fast.config import RunConfig
from eagle3_fast.files import write_json
from eagle3_fast.model.config import save_draft_config
from eagle3_fast.model.draft import Draft
from eagle3_fast.records import PackedBatch
from eagle3_fast.train.trainer import Trainer

ROOT = Path(__file__).parent.parent.parent
PYTHON = {
    "0.9": os.environ.get("PEER_PYTHON", str(ROOT / ".venv-peer" / "bin" / "python")),
    "0.3": os.environ.get("PEER_03_PYTHON", str(ROOT / ".venv-peer-0.3" / "bin" / "python")),
}


def ask(release: str, spec: dict[str, Any], folder: Path) -> Any:
    """What the runner of a release answers to a spec."""
    write_json(folder / "spec.json", spec)
    runner = Path(__file__).with_name(f"train_{release.replace('.', '')}.py")
    done = subprocess.run(
        [PYTHON[release], str(runner), str(folder / "spec.json")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def train_there(release: str, config: RunConfig, start: Draft, batches: Path, folder: Path, **trainer: Any) -> list[float]:
    """Its losses; its trainer, from the weights of `start`, writes its checkpoints into `folder/checkpoints`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_draft_config(start.config, folder, "float32")
    save_file(
        {name: value.float() if value.is_floating_point() else value for name, value in start.state_dict().items()}, folder / "w"
    )
    spec = {
        "config": str(folder),
        "weights": str(folder / "w"),
        "batches": str(batches),
        "call": call_of(release, config),
        "trainer": {**settings_of(release, config), "save_path": str(folder / "checkpoints"), **trainer},
        "parameters": str(folder / "parameters.safetensors"),
    }
    return ask(release, spec, folder)


def call_of(release: str, config: RunConfig) -> dict[str, Any]:
    """Arguments of its draft's forward pass."""
    call: dict[str, Any] = {"ttt_steps": config.train.loss.ttt_steps, "ttt_step_loss_decay": config.train.loss.ttt_step_loss_decay}
    own = {"loss_config": config.train.loss.loss_fn} if release == "0.9" else {}
    if release == "0.3":
        own = {"use_off_policy_tokens": bool(config.engine.use_off_policy_tokens)}
    return call | own


def settings_of(release: str, config: RunConfig) -> dict[str, Any]:
    """The fields of its TrainerConfig that the run file decides."""
    optimizer, scheduler = config.train.optimizer, config.train.scheduler
    settings = {"lr": optimizer.lr, "num_epochs": config.train.trainer.epochs, **scheduler.model_dump()}
    if release == "0.3":
        settings.pop("scheduler_warmup_ratio")
        return settings
    return {**settings, **optimizer.model_dump(), "muon_lr": optimizer.muon_lr or optimizer.lr}


def write_batches(path: Path, epochs: list[list[PackedBatch]], release: str) -> Path:
    """Packed batches as its collate function lays them out."""
    tensors = {}
    for epoch, steps in enumerate(epochs):
        for step, batch in enumerate(steps):
            tensors |= {f"{epoch}.{step}.{name}": value.contiguous() for name, value in _fields(batch, release).items()}
    save_file(tensors, path)
    return path


def _fields(batch: PackedBatch, release: str) -> dict[str, Tensor]:
    fields = {name: getattr(batch, name)[None] for name in ("input_ids", "loss_mask", "position_ids", "document_ids")}
    fields["hidden_states"] = batch.aux_hidden_states[None]
    fields["verifier_last_hidden_states"] = batch.last_hidden_states[None]
    if release == "0.3":
        documents = fields.pop("document_ids")
        fields["lengths"] = documents[documents >= 0].bincount()
    return fields


def batches_of(trainer: Trainer, epochs: int) -> list[list[PackedBatch]]:
    """What a run trains on, by epoch."""
    return [[batch for step in trainer.loader.steps(epoch) for batch in step] for epoch in range(epochs)]


def losses_here(save_path: Path) -> list[float]:
    lines = (save_path / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if row["split"] == "train"]


def deviations(draft: Draft, folder: Path) -> dict[str, float]:
    """Norm of the difference of every trained parameter, relative to theirs in `folder/parameters.safetensors`."""
    theirs = load_file(folder / "parameters.safetensors")
    ours = {name: value.detach() for name, value in draft.named_parameters() if value.requires_grad}
    return {name: float((value - theirs[name]).norm() / theirs[name].norm()) for name, value in ours.items()}


def largest(values: list[float], wanted: list[float]) -> float:
    """Largest relative difference of two lists of losses."""
    assert len(values) == len(wanted), (len(values), len(wanted))
    a, b = torch.tensor(values, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    return float(((a - b) / b).abs().max())
