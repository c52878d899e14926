"""Checkpoints over the border, both ways: released speculators' trainer stops, ours goes on as it would have, and the reverse.

Both sides start from the same file, whose weights and optimizer states are in bfloat16, so the ends must agree as in `test_training`.
Environments: `make test-speculators` builds them. `-s` prints the deviations.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peers.trainers import ask, batches_of, call_of, deviations, largest, losses_here, train_there, write_batches
from safetensors.torch import load_file, save_file
from train.runs import changed, prepared_run
from verifiers import toy_llama

from eagle3_fast.config import RunConfig
from eagle3_fast.model.ttt import run_ttt
from eagle3_fast.pipeline import export_draft, export_training_state
from eagle3_fast.records import PackedBatch
from eagle3_fast.train.start import objective, start_draft
from eagle3_fast.train.trainer import Trainer

TOLERANCE = {"adamw": 1e-4, "muon": 2**-7}
"""Muon orthogonalises in bfloat16, where one more or less in the last bit of a gradient is one in the last bit of an update."""
OLD = {
    "train.draft": {"norm_before_fc": False, "norm_output": False, "full_attention_indices": [0]},
    "engine": {"compat": "0.3", "verifier_norm": False, "noise_std": 0.0},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.9 AdamW": ("0.9", {}),
    "0.9 Muon": ("0.9", {"train.optimizer": {"optimizer": "muon", "muon_lr": 5e-3}}),
    "0.9 AdamW without a schedule": ("0.9", {"train.scheduler": {"scheduler_type": "none"}}),
    "0.3 AdamW": ("0.3", OLD),
}
CURRENT = [case for case, (release, _) in CASES.items() if release == "0.9"]

Case = Callable[[str], tuple[str, RunConfig, list[list[PackedBatch]]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("run")
    verifier = toy_llama(folder / "verifier", hidden_size=64, head_dim=16, intermediate_size=96)
    weights = load_file(verifier / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in weights.items()}, verifier / "model.safetensors", {"format": "pt"})
    return prepared_run(
        folder,
        verifier,
        chats=60,
        engine={"divisor": "batch"},
        **{
            "train.data": {"total_seq_len": 128, "train_data_ratio": 1.0},
            "train.optimizer": {"optimizer": "adamw", "lr": 1e-3},
            "train.scheduler": {"scheduler_total_steps": 40, "scheduler_warmup_steps": 3},
        },
    )


@pytest.fixture
def case(run: RunConfig, tmp_path: Path) -> Case:
    """Release, run file with its checkpoints in `here`, and what it trains on in two epochs."""

    def of(name: str) -> tuple[str, RunConfig, list[list[PackedBatch]]]:
        release, changes = CASES[name]
        config = changed(run, **changes, **{"train.trainer": {"save_path": str(tmp_path / "here")}})
        return release, config, batches_of(Trainer(config), 2)

    return of


@pytest.mark.parametrize("name", CASES)
def test_theirs_goes_on_here(case: Case, tmp_path: Path, name: str) -> None:
    release, config, epochs = case(name)
    batches = write_batches(tmp_path / "batches.safetensors", epochs, release)
    start = start_draft(config)
    train_there(release, config, start, batches, tmp_path / "there", num_epochs=1)
    shutil.copytree(tmp_path / "there" / "checkpoints", tmp_path / "here", symlinks=True)
    theirs = train_there(release, config, start, batches, tmp_path / "there", num_epochs=2, resume_from_checkpoint=True)
    trainer = Trainer(config)
    trainer.run()
    _same_end(name, trainer, tmp_path / "there", losses_here(tmp_path / "here"), theirs, len(epochs[1]))
    assert trainer.position.global_step == len(epochs[0]) + len(epochs[1])


@pytest.mark.parametrize("name", CURRENT)
def test_ours_goes_on_there(case: Case, tmp_path: Path, name: str) -> None:
    release, config, epochs = case(name)
    Trainer(changed(config, **{"train.trainer": {"epochs": 1}})).run()
    export_training_state(config)
    shutil.copytree(tmp_path / "here", tmp_path / "there" / "checkpoints", symlinks=True)
    batches = write_batches(tmp_path / "batches.safetensors", epochs, release)
    theirs = train_there(
        release, config, start_draft(config), batches, tmp_path / "there", num_epochs=2, resume_from_checkpoint=True
    )
    (tmp_path / "here" / "0" / "engine_state.pt").unlink()  # go on from bfloat16, as they must
    trainer = Trainer(config)
    trainer.run()
    _same_end(name, trainer, tmp_path / "there", losses_here(tmp_path / "here")[-len(epochs[1]) :], theirs, len(epochs[1]))
    assert json.loads((tmp_path / "there" / "checkpoints" / "1" / "training_state.json").read_text()) == {
        "epoch": 1,
        "local_step": 0,
        "global_step": len(epochs[0]) + len(epochs[1]),
    }


@pytest.mark.parametrize("name", ["0.9 AdamW"])
def test_they_load_our_draft_and_score_it_alike(case: Case, tmp_path: Path, name: str) -> None:
    release, config, epochs = case(name)
    Trainer(changed(config, **{"train.trainer": {"epochs": 1}})).run()
    folder = export_draft(config)
    batches = write_batches(tmp_path / "batches.safetensors", epochs, release)
    theirs = ask(release, {"draft": str(folder), "batches": str(batches), "call": call_of(release, config)}, tmp_path)
    draft = start_draft(changed(config, **{"train.draft": {"from_pretrained": str(folder)}}))
    ours = run_ttt(draft, epochs[0][0], objective(config)).loss.item()
    print(f"\nspeculators {release}: loss {theirs:.7f}, ours {ours:.7f}")
    assert abs(ours - theirs) < 1e-5 * abs(theirs)


def _same_end(name: str, trainer: Trainer, there: Path, ours: list[float], theirs: list[float], steps: int) -> None:
    losses, weights = largest(ours, theirs[-steps:]), deviations(trainer.engine.draft, there)
    worst = max(weights, key=lambda weight: weights[weight])
    print(f"\nspeculators {name}, second epoch: losses {losses:.1e}, weights {weights[worst]:.1e} ({worst})")
    assert len(theirs) == steps
    assert max(losses, weights[worst]) < TOLERANCE[trainer.config.train.optimizer.optimizer]
