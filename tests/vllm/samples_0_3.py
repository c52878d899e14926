"""Prepared rows as speculators 0.3 stores samples: `data_{row}.pt` of format 0, of the layers that release reads (contract, 5.1, 8.1).

Run by `make test-vllm-short`, which trains a draft on them by 0.3's rules and serves it:

    python tests/vllm/samples_0_3.py VERIFIER PREPARED OUTPUT
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from eagle3_fast.extract.verifier import Verifier
from eagle3_fast.prepare.dataset import open_prepared


def main(path: str, prepared: Path, output: Path) -> None:
    layers = Verifier(path).num_layers
    verifier, rows = Verifier(path, [3, layers // 2 + 1, layers - 2]), open_prepared(prepared)
    output.mkdir(parents=True, exist_ok=True)
    shutil.copy(prepared / "token_freq.pt", output)
    for row, columns in enumerate(rows):
        tokens = torch.tensor(columns["input_ids"])
        (states,) = verifier.hidden_states([tokens])
        sample = {
            "input_ids": tokens,
            "loss_mask": torch.tensor(columns["loss_mask"]),
            "hidden_state": states[:, :-1].flatten(1).clone(),
            "target": verifier.model.model.norm(states[:, -1]).detach().clone(),
        }
        torch.save(sample, output / f"data_{row}.pt")
    print(f"{output}: {len(rows)} samples of layers {verifier.layer_ids}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
