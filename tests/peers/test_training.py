"""Twenty steps of AdamW in float32, by released speculators' own trainer and by ours: same start, same batches, same end.

Environments: `make test-speculators` builds them. `-s` prints the deviations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peers.trainers import batches_of, deviations, largest, losses_here, train_there, write_batches
from train.runs import changed, prepared_run
from verifiers import toy_llama

from eagle3_fast.config import RunConfig
from eagle3_fast.train.start import start_draft
from eagle3_fast.train.trainer import Trainer

STEPS = 20
TOLERANCE = 1e-4
"""Relative, of every parameter's norm and of every loss."""

OLD = {"norm_before_fc": False, "norm_output": False, "full_attention_indices": [0]}
RULES_03 = {"compat": "0.3", "verifier_norm": False, "noise_std": 0.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "defaults": ("0.9", {}),
    "fc_norm": ("0.9", {"train.draft": {"norm_before_fc": False, "fc_norm": True, "norm_output": False}}),
    "qwen3, short window, two layers": (
        "0.9",
        {"train.draft": {"draft_arch": "qwen3", "sliding_window": 16, "num_layers": 2, "norm_before_residual": False}},
    ),
    "compound loss, decay": (
        "0.9",
        {"train.loss": {"loss_fn": '{"kl_div": 0.5, "tv": 0.25, "ce": 0.1}', "ttt_step_loss_decay": 0.8}},
    ),
    "full vocabulary": ("0.9", {"train.draft": {"draft_vocab_size": None}}),
    "on-policy tokens": ("0.3", {"train.draft": OLD, "engine": RULES_03}),
    "off-policy tokens": ("0.3", {"train.draft": OLD, "engine": {**RULES_03, "use_off_policy_tokens": True}}),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("run")
    verifier = toy_llama(folder / "verifier", hidden_size=64, head_dim=16, intermediate_size=96)
    return prepared_run(
        folder,
        verifier,
        chats=80,
        engine={"divisor": "batch"},
        **{
            "train.data": {"total_seq_len": 128},
            "train.trainer": {"epochs": 2, "max_steps": STEPS},
            "train.optimizer": {"optimizer": "adamw", "lr": 1e-3},
            "train.scheduler": {"scheduler_total_steps": STEPS, "scheduler_warmup_steps": 3},
        },
    )


@pytest.mark.parametrize("case", CASES)
def test_both_end_at_the_same_weights(run: RunConfig, tmp_path: Path, case: str) -> None:
    release, changes = CASES[case]
    config = changed(run, **changes, **{"train.trainer": {"save_path": str(tmp_path / "ours")}})
    trainer = Trainer(config)
    batches = [batch for epoch in batches_of(trainer, 2) for batch in epoch][:STEPS]
    trainer.run()
    theirs = train_there(
        release,
        config,
        start_draft(config),
        write_batches(tmp_path / "batches.safetensors", [batches], release),
        tmp_path / "theirs",
        num_epochs=1,
    )
    losses, weights = largest(losses_here(tmp_path / "ours"), theirs), deviations(trainer.engine.draft, tmp_path / "theirs")
    worst = max(weights, key=lambda name: weights[name])
    print(f"\nspeculators {release}, {case}: losses {losses:.1e}, weights {weights[worst]:.1e} ({worst})")
    assert theirs[-1] < 0.95 * theirs[0]
    assert losses < TOLERANCE and weights[worst] < TOLERANCE
