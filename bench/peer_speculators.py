"""Real speculators 0.9.0 on a draft and a batch from files. Runs in an environment of its own, which has no eagle3_fast.

    .venv-peer/bin/python bench/peer_speculators.py SPEC.json [--steps N]

SPEC: `folder` with config.json, draft.safetensors and batch.safetensors (layout of the golden cases), `dtype`, `device`, `ttt_steps`,
and optionally `check`: such a spec of a small case with `gradients`, a path to write its gradients to; they are also written in
float32 beside it. With --steps prints the median seconds of a training step (forward and backward) and its peak memory above
weights and batch as JSON; without, answers the bench that started it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from measure import Local, serve, spread
from safetensors.torch import load_file, save_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

FASTEST = {"cpu": ("sdpa", "eager"), "cuda": ("simple_flex_attention", "fused")}
"""Attention and loss implementation: on a CPU flex attention has no backward pass and the fused loss no kernel."""


class Step:
    """One training step of a spec: the gradients of all trainable parameters. Weights in `dtype`, which spares every cast."""

    def __init__(self, spec: dict[str, Any], dtype: str) -> None:
        folder, device, kind = Path(spec["folder"]), spec["device"], getattr(torch, dtype)
        attention, self.loss = FASTEST[device]
        config = Eagle3SpeculatorConfig.from_dict(json.loads((folder / "config.json").read_text()))
        config.transformer_layer_config._attn_implementation = attention
        model = Eagle3DraftModel(config)
        model.load_state_dict(load_file(folder / "draft.safetensors"), strict=True)
        self.model = model.to(device).train()
        for value in self.model.parameters():  # buffers stay: rotary frequencies would not survive bfloat16
            value.data = value.data.to(kind)
        self.parameters = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        batch = {name: value.to(device) for name, value in load_file(folder / "batch.safetensors").items()}
        self.batch = {name: value.to(kind) if value.is_floating_point() else value for name, value in batch.items()}
        self.call = {"ttt_steps": spec["ttt_steps"], "ttt_step_loss_decay": 1.0}

    def __call__(self) -> tuple[torch.Tensor, ...]:
        loss = self.model(**self.batch, **self.call, loss_config=resolve_loss_config("kl_div", self.loss))[1]
        return torch.autograd.grad(loss, list(self.parameters.values()))


def write_gradients(spec: dict[str, Any]) -> None:
    path = Path(spec["gradients"])
    for dtype, target in ((spec["dtype"], path), ("float32", path.with_name(f"{path.stem}-float32{path.suffix}"))):
        step = Step(spec, dtype)
        save_file({name: value.float().cpu() for name, value in zip(step.parameters, step(), strict=True)}, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    spec = json.loads(arguments.spec.read_text())

    def start() -> Local:
        if "check" in spec:
            write_gradients(spec["check"])
        return Local(Step(spec, spec["dtype"]), spec["device"])

    if arguments.steps is None:
        serve(start)
        return
    measured = start()
    peak = measured.peak_mib()
    seconds = [value for _ in range(arguments.steps) for value in measured.seconds()]
    print(json.dumps({**spread(seconds), "peak_mib": peak}))


if __name__ == "__main__":
    main()
