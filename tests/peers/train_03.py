"""Run by the peer's own Python: released speculators 0.3 trains as a spec says; on a CPU, which its trainer does not expect.

    .venv-peer-0.3/bin/python tests/peers/train_03.py SPEC.json

SPEC: `batches` (see `trainer_parts`), `call` (keyword arguments of the draft's forward pass), `config` (folder with config.json),
`weights` (safetensors, all of the draft's), `trainer` (fields of its TrainerConfig). Trains, writes its parameters to `parameters` and
answers the loss of every step.
"""

from __future__ import annotations

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its forward pass is compiled, for a GPU

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.train import checkpointer, trainer
from trainer_parts import Batches, Losses
from transformers.modeling_utils import AttentionInterface

torch.set_num_threads(1)
checkpointer.load_safetensors_state_dict = lambda path, device: load_file(path)
_load = torch.load
torch.load = lambda *arguments, **options: _load(*arguments, **{**options, "map_location": "cpu"})


def dense_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Its attention under its own mask, entry by entry: flex attention has no backward pass on a CPU."""
    zero, rows, keys = torch.tensor(0), torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
    mask = block_mask.mask_mod(zero, zero, rows, keys)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


ATTENTION = "simple_flex_attention"  # the name by which its model asks for it
AttentionInterface.register(ATTENTION, dense_attention)


def train(spec: dict[str, Any]) -> list[float]:
    config = Eagle3SpeculatorConfig.from_dict(json.loads((Path(spec["config"]) / "config.json").read_text()))
    config.transformer_layer_config._attn_implementation = ATTENTION
    weights = {name: value for name, value in load_file(spec["weights"]).items() if name != "verifier_norm.weight"}
    model = Eagle3DraftModel(config, weights["t2d"], weights["d2t"])
    model.load_state_dict(weights, strict=True)
    settings = trainer.TrainerConfig(**spec["trainer"], local_rank="cpu", train_call_kwargs=spec["call"])  # type: ignore[arg-type]
    losses = Losses(trainer.metric_logger)
    run = trainer.Trainer(model, settings, Batches(spec["batches"]))
    for group, rate in zip(run.opt.param_groups, run.scheduler.get_last_lr(), strict=True):
        group["lr"] = rate  # resuming, it would take its first step at the rate of the run's second
    run.run_training()
    save_file({name: value.detach().contiguous() for name, value in model.named_parameters()}, spec["parameters"])
    return losses.values


if __name__ == "__main__":
    print(json.dumps(train(json.loads(Path(sys.argv[1]).read_text()))))
