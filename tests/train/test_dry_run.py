"""`train.dry_run`: the untrained draft, servable, and nothing that a later run would take for a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train.runs import run_config, write_chats

from eagle3_fast.model.draft import load_draft
from eagle3_fast.prepare.shards import prepare
from eagle3_fast.train.checkpoint import latest_checkpoint
from eagle3_fast.train.dry_run import dry_run
from eagle3_fast.train.start import start_draft


def test_the_draft_that_training_would_begin_with_is_written(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_chats(tmp_path / "chats.jsonl", 20)
    config = run_config(tmp_path, toy)
    prepare(config)
    monkeypatch.setenv("RANK", "1")
    assert not dry_run(config).exists()
    monkeypatch.delenv("RANK")
    folder = dry_run(config)
    assert folder == Path(config.train.trainer.save_path)
    assert latest_checkpoint(folder) is None
    first, saved = start_draft(config).state_dict(), load_draft(folder).state_dict()
    for name in ("layers.0.self_attn.q_proj.weight", "fc.weight", "embed_tokens.weight", "norm.weight"):
        assert torch.equal(saved[name], first[name].bfloat16().float()), name
    assert torch.equal(saved["d2t"], first["d2t"])
