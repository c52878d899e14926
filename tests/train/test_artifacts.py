"""What a run leaves beside its checkpoints reads back to the identical config, whatever the config."""

from __future__ import annotations

import random
import types
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from eagle3_fast.config import NORM_KEYS, SHAPING_KEYS, RunConfig, load_run_config, run_file
from eagle3_fast.spellings import KEYS
from eagle3_fast.train.artifacts import record_run

TEXTS = [
    "",
    "a",
    "1",
    "0x1f",
    "null",
    "yes",
    "~",
    "a: b",
    "# no",
    "{time}",
    "été",
    "1e-4",
    " padded ",
    "- a",
    "'\"",
    "2026-01-01",
    "x\ny",
]


def drawn(draw: random.Random, kind: Any, field: FieldInfo) -> Any:
    """A value of a type, within the field's bounds."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        chosen = draw.choice(inner)
        return None if chosen is type(None) else drawn(draw, chosen, field)
    if origin is Literal:
        return draw.choice(inner)
    if origin is list:
        return [drawn(draw, inner[0], field) for _ in range(draw.randint(0, 3))]
    if origin is tuple:
        return tuple(drawn(draw, part, field) for part in inner)
    if kind is bool:
        return draw.random() < 0.5
    if kind is str:
        return draw.choice(TEXTS)
    low = next((m.ge if isinstance(m, Ge) else m.gt for m in field.metadata if isinstance(m, Ge | Gt)), 0)
    high = next((m.le if isinstance(m, Le) else m.lt for m in field.metadata if isinstance(m, Le | Lt)), low + 10_000)
    return draw.randint(int(low) + 1, int(high)) if kind is int else low + (high - low) * draw.random() ** 8 * 0.999 + 1e-12


def some(draw: random.Random, section: type[BaseModel]) -> dict[str, Any]:
    """About a third of a section's keys, drawn."""
    values: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            values[name] = some(draw, field.annotation)
        elif draw.random() < 0.3:
            values[name] = drawn(draw, field.annotation, field)
    return values


def random_config(draw: random.Random) -> RunConfig:
    """A config that its own schema takes, drawn until it does."""
    while True:
        document = some(draw, RunConfig)
        train = document["train"]
        train["verifier"]["verifier_name_or_path"] = draw.choice(TEXTS)
        train.pop("speculator_type", None)
        train["logging"]["logger"] = draw.choice(["", "tensorboard"])
        train["loss"]["loss_fn"] = draw.choice(["kl_div", '{"ce": 0.25, "tv": -2}'])
        if draw.random() < 0.5:
            train["draft"] = {name: value for name, value in train["draft"].items() if name not in (*SHAPING_KEYS, *NORM_KEYS)}
        for names in (("d2t_path", "t2d_path"), ("draft_hidden_act",)):
            for name in names:
                train["draft"].pop(name, None)
        train["trainer"].pop("checkpoint_freq", None)
        try:
            return RunConfig.model_validate(document)
        except ValidationError:
            continue


@pytest.mark.parametrize("whole", [False, True])
def test_a_run_file_reads_back_to_the_identical_config(tmp_path: Path, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("eagle3_fast.config.say_once", said.append)
    draw = random.Random(7)
    path = tmp_path / "run.yaml"
    for _ in range(150):
        config = random_config(draw)
        said.clear()
        path.write_text(run_file(config, whole), encoding="utf-8")
        assert load_run_config(path) == config
        assert not said


def test_it_holds_what_differs_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "in.yaml").write_text(
        "train: {verifier: {verifier_name_or_path: v}, optimizer: {lr: 1.0e-3}, trainer: {epochs: 3}}"
    )
    document = yaml.safe_load(run_file(load_run_config(tmp_path / "in.yaml")))
    differing = {"data": {"num_workers": 0}, "generation": {"on_missing": "raise", "vllm_endpoint": ""}}
    assert document == {"train": {"verifier": {"verifier_name_or_path": "v"}, "trainer": {"epochs": 3}, **differing}}
    named = {key.name for key in KEYS if key.why and key.place == "own"}
    assert {name for group in differing.values() for name in group} <= named


def test_a_run_is_recorded(tmp_path: Path) -> None:
    config = random_config(random.Random(1))
    (tmp_path / "notes.txt").write_text("mine")
    record_run(config, ["eagle3-fast", "train", "--run-name", "two words"], tmp_path)
    assert load_run_config(tmp_path / "run.yaml") == config
    command, about = (tmp_path / "train_command.txt").read_text().splitlines()
    assert command == "eagle3-fast train --run-name 'two words'"
    assert "torch 2" in about and about.endswith("ranks 1")
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "run.yaml", "train_command.txt"}
