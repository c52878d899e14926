"""Error of dL/dh by storage of the logits, on a real verifier: `python bench/logit_precision.py --config RUN.yaml CHECKPOINT...`.

Takes validation rows of a run, the hidden states that each checkpoint's draft gives for them, and compares the gradient of forward KL in
those states with float64. Rows are grouped by their KL, because the error grows as draft and verifier come together.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from eagle3_fast.config import load_run_config
from eagle3_fast.model import ttt
from eagle3_fast.model.draft import Draft, load_tensors, read_tensors
from eagle3_fast.ops import linear_divergence, select
from eagle3_fast.precision import training_dtype
from eagle3_fast.reference import linear_divergence as reference
from eagle3_fast.train.loader import PackedRows, validation_loader
from eagle3_fast.train.ranks import Ranks
from eagle3_fast.train.start import objective, start_draft

STORAGES = ("centred", "bfloat16", "float32")
EDGES = (0.0, 0.05, 0.2, 1.0, float("inf"))
ROWS = 512


@torch.no_grad()
def op_inputs(draft: Draft, config) -> dict[str, Tensor]:
    """What `score` hands to the op for one validation batch, in bfloat16; the first ROWS rows."""
    rows = PackedRows(config, draft.config, online=False)
    (batch,) = next(validation_loader(rows, rows.splits()[1], config, Ranks()).steps(0))
    caught: dict[str, Tensor] = {}

    def catch(h, w, t, u, target_row, row_weight, kinds, softcap, anchor):
        order = torch.randperm(len(h), generator=torch.Generator().manual_seed(0))[:ROWS]
        caught.update(h_MH=h[order], w_VH=w, t_RG=t, u_VG=u, target_row_M=target_row[order], anchor_R=anchor)
        return linear_divergence(h, w, t, u, target_row, row_weight, kinds, softcap, anchor)

    dtype = training_dtype(config.train.data.hidden_states_dtype)
    with patch.object(ttt, "linear_divergence", catch), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        ttt.run_ttt(draft, batch, objective(config))
    return {name: value.bfloat16() if value.is_floating_point() else value for name, value in caught.items()}


def errors(inputs: dict[str, Tensor]) -> list[dict[str, float]]:
    """Per KL band: its rows, mean KL, and the relative error of each storage."""
    wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items() if name != "anchor_R"}
    weight = torch.ones(len(inputs["h_MH"]), dtype=torch.float64)
    exact = wide["h_MH"].requires_grad_()
    loss, rows = reference.linear_divergence(*wide.values(), weight, ["kl_div"], [1.0])
    loss.backward()
    kl, gradients = rows.terms_ME[:, 0].detach(), {storage: gradient(inputs, storage) for storage in STORAGES}
    bands = []
    for low, high in pairwise(EDGES):
        at = (kl >= low) & (kl < high)
        if at.any():
            size = exact.grad[at].norm()
            found = {storage: float((value[at].double() - exact.grad[at]).norm() / size) for storage, value in gradients.items()}
            bands.append({"rows": int(at.sum()), "kl": float(kl[at].mean()), **found})
    return bands


def gradient(inputs: dict[str, Tensor], storage: str) -> Tensor:
    """dL/dh of the fused op; the products run in bfloat16 as on a CPU or GPU that has it, emulated where this CPU has not."""
    h = inputs["h_MH"].detach().clone().requires_grad_()
    select("fused", storage)
    with patch("eagle3_fast.precision.cpu_multiplies_bfloat16", lambda: True):
        linear_divergence(**{**inputs, "h_MH": h}, row_weight_M=torch.ones(len(h)), kinds={"kl_div": 1.0}).loss.backward()
    return h.grad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("checkpoints", nargs="+")
    arguments = parser.parse_args()
    config = load_run_config(arguments.config)
    result = {}
    for checkpoint in arguments.checkpoints:
        draft = start_draft(config)
        path = Path(checkpoint) / "model.safetensors"
        frozen = tuple(name for name in draft.state_dict() if name.startswith("verifier_"))
        load_tensors(draft, read_tensors(path), str(path), missing_ok=frozen)
        result[checkpoint] = errors(op_inputs(draft, config))
        print(f"{checkpoint}\n| KL of the rows | rows | " + " | ".join(STORAGES) + " |\n|---|---|" + "---|" * len(STORAGES))
        for band in result[checkpoint]:
            print(f"| {band['kl']:.3f} | {band['rows']} | " + " | ".join(f"{band[name]:.2%}" for name in STORAGES) + " |")
    output = Path("build/logit_precision.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
