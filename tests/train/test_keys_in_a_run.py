"""Keys of speculators in a whole run: `save_best`, `dry_run`, `draft_config`, and what is left beside the checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from train.runs import changed, prepared_run

from eagle3_fast.cli import main
from eagle3_fast.config import load_run_config, run_file
from eagle3_fast.train.trainer import train


def numbered(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.isdigit())


def test_save_best_keeps_the_best_and_the_newest_and_what_is_not_ours(tmp_path: Path, toy: Path) -> None:
    config = prepared_run(tmp_path, toy, **{"train.trainer": {"epochs": 4}})
    (tmp_path / "run.yaml").write_text(run_file(config))
    save_path = tmp_path / "checkpoints"
    save_path.mkdir()
    (save_path / "notes.txt").write_text("mine")
    (save_path / "7").mkdir()
    assert main(["train", "--config", str(tmp_path / "run.yaml"), "--save-best"]) == 0
    best = (save_path / "checkpoint_best").resolve().name
    losses = [json.loads(line) for line in (save_path / "metrics.jsonl").read_text().splitlines()]
    by_epoch = [row["loss"] for row in losses if row["split"] == "val"]
    assert best == str(by_epoch.index(min(by_epoch)))
    assert numbered(save_path) == sorted({best, "3", "7"})
    assert (save_path / "notes.txt").is_file()
    recorded = load_run_config(save_path / "run.yaml")
    assert recorded.engine.keep_last == 1 and recorded == load_run_config(tmp_path / "run.yaml", ["engine.keep_last=1"])
    assert (save_path / "train_command.txt").is_file()


def test_dry_run_trains_nothing_and_its_draft_starts_a_run(tmp_path: Path, toy: Path) -> None:
    config = prepared_run(tmp_path, toy)
    (tmp_path / "run.yaml").write_text(run_file(config))
    words = ["train", "--config", str(tmp_path / "run.yaml")]
    assert main([*words, "--dry-run"]) == 0
    save_path = tmp_path / "checkpoints"
    assert numbered(save_path) == [] and (save_path / "model.safetensors").is_file()
    assert main([*words, "--from-pretrained", str(save_path), "--save-path", str(tmp_path / "second"), "--epochs", "1"]) == 0
    assert numbered(tmp_path / "second") == ["0"]


def test_a_decoder_config_of_the_users_is_trained(tmp_path: Path, toy: Path) -> None:
    shape = {"num_hidden_layers": 2, "intermediate_size": 40, "model_type": "qwen3"}
    decoder = json.loads((toy / "config.json").read_text()) | shape
    (tmp_path / "decoder.json").write_text(json.dumps(decoder))
    config = prepared_run(tmp_path, toy, **{"train.draft": {"draft_config": str(tmp_path / "decoder.json")}})
    train(changed(config, **{"train.trainer": {"epochs": 1}}))
    layer = json.loads((tmp_path / "checkpoints" / "0" / "config.json").read_text())["transformer_layer_config"]
    assert {name: layer[name] for name in shape} == shape
    assert load_run_config(tmp_path / "checkpoints" / "run.yaml").train.draft == config.train.draft
