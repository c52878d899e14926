"""A complete tiny run: prepared rows, hidden states of a toy verifier, and the run file that trains on them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from eagle3_fast.config import RunConfig
from eagle3_fast.extract.states import extract
from eagle3_fast.prepare.shards import prepare

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "the",
    "dog",
    "ran",
    "to",
    "its",
    "red",
    "house",
    "by",
    "a",
    "tree",
    "near",
    "town",
    "with",
    "four",
    "old",
    "men",
    "in",
    "hats",
]


def write_chats(path: Path, count: int, seed: int = 0) -> Path:
    """`count` two-message chats of random words, as JSONL."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        prompt, reply = (" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(2))
        lines.append(json.dumps({"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run_config(folder: Path, verifier: Path, **changes: dict[str, Any]) -> RunConfig:
    """A run file in memory; `changes` are merged into its sections by dotted name (`"train.trainer": {...}`)."""
    data: dict[str, Any] = {
        "train": {
            "verifier": {"verifier_name_or_path": str(verifier)},
            "draft": {"draft_vocab_size": 24, "target_layer_ids": [1, 3, 5]},
            "data": {
                "data_path": str(folder / "data"),
                "total_seq_len": 160,
                "train_data_ratio": 0.8,
                "hidden_states_dtype": "float32",
            },
            "trainer": {"epochs": 2, "save_path": str(folder / "checkpoints")},
            "scheduler": {"scheduler_total_steps": 20},
        },
        "prepare": {"data": [str(folder / "chats.jsonl")], "seq_length": 128, "num_workers": 1},
        "export": {"output": str(folder / "draft"), "dtype": "float32"},
        "evaluate": {"output": str(folder / "evaluation.json"), "max_new_tokens": 24},
    }
    return _merged(data, changes)


def prepared_run(folder: Path, verifier: Path, chats: int = 30, **changes: dict[str, Any]) -> RunConfig:
    """`run_config` with its data prepared and extracted."""
    write_chats(folder / "chats.jsonl", chats)
    config = run_config(folder, verifier, **changes)
    prepare(config)
    extract(config)
    return config


def changed(config: RunConfig, **changes: dict[str, Any]) -> RunConfig:
    """The same run with other values, by dotted section name."""
    data = config.model_dump(exclude_unset=True)
    return _merged(data, changes)


def _merged(data: dict[str, Any], changes: dict[str, dict[str, Any]]) -> RunConfig:
    """`data` with the values of `changes`, whose keys are dotted section names."""
    for dotted, values in changes.items():
        section = data
        for name in dotted.split("."):
            section = section.setdefault(name, {})
        section.update(values)
    return RunConfig.model_validate(data)
