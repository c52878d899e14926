"""Run by the peer's own Python: released speculators 0.9 trains, or scores, as a spec says; on a CPU, which its trainer does not expect.

    .venv-peer/bin/python tests/peers/train_09.py SPEC.json

SPEC: `batches` (see `trainer_parts`), `call` (keyword arguments of the draft's forward pass) and either
- `draft`: a folder to load with `from_pretrained`; answers its loss on the first batch,
- or `config` (folder with config.json), `weights` (safetensors, all of the draft's), `trainer` (fields of its TrainerConfig): trains,
  writes its parameters to `parameters` and answers the loss of every step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import speculators.train.checkpointer as checkpointer
import speculators.train.trainer as trainer
import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from trainer_parts import Batches, Losses

torch.set_num_threads(1)
torch.accelerator.synchronize = lambda *_: None
trainer.get_local_rank = lambda: "cpu"
checkpointer.get_current_device = lambda: "cpu"


def call_of(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec["call"], "loss_config": resolve_loss_config(spec["call"]["loss_config"], "eager")}


def score(spec: dict[str, Any]) -> float:
    model = SpeculatorModel.from_pretrained(spec["draft"], dtype=torch.float32, attn_implementation="eager")
    model.load_verifier_weights()
    batch = Batches(spec["batches"]).epochs[0][0]
    with torch.no_grad():
        return float(model(**batch, **call_of(spec))[1])


def train(spec: dict[str, Any]) -> list[float]:
    config = Eagle3SpeculatorConfig.from_dict(json.loads((Path(spec["config"]) / "config.json").read_text()))
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = Eagle3DraftModel(config)
    model.load_state_dict(load_file(spec["weights"]), strict=True)
    settings = trainer.TrainerConfig(**spec["trainer"], train_call_kwargs=call_of(spec), hidden_states_dtype=torch.float32)
    losses = Losses(trainer.metric_logger)
    trainer.Trainer(model, settings, Batches(spec["batches"])).run_training()
    save_file({name: value.detach().contiguous() for name, value in model.named_parameters()}, spec["parameters"])
    return losses.values


if __name__ == "__main__":
    spec = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps(score(spec) if "draft" in spec else train(spec)))
