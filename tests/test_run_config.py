"""The run file: defaults, overrides, and one clear line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from eagle3_fast.config import RunConfig, known_keys, load_run_config, parse_loss
from eagle3_fast.errors import InputError

ROOT = Path(__file__).parent.parent
MINIMAL = {"train": {"verifier": {"verifier_name_or_path": "verifier"}}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def test_defaults_pass_their_own_validation(file: Path) -> None:
    config = load_run_config(file)
    assert RunConfig.model_validate(config.model_dump()) == config


def test_overrides_win(file: Path) -> None:
    config = load_run_config(file, ["train.optimizer.lr=3e-4", 'train.loss.loss_fn={"ce": 0.1, "tv": 0.9}', "prepare.data=[a, b]"])
    assert config.train.optimizer.lr == 3e-4
    assert config.train.loss.terms == {"ce": 0.1, "tv": 0.9}
    assert config.prepare.data == ["a", "b"]


def test_a_release_may_be_written_as_a_number(file: Path) -> None:
    assert load_run_config(file, ["engine.compat=0.3"]).engine.compat == "0.3"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.optimizer.lrr=1", "unknown key train.optimizer.lrr; did you mean train.optimizer.lr?"),
        ("lr=1", "unknown key lr; did you mean train.optimizer.lr?"),
        ("num_workers=1", "unknown key num_workers; did you mean train.data.num_workers?"),
        ("train.optimizer.lr=-1", "train.optimizer.lr: Input should be greater than 0"),
        ("train.loss.loss_fn=kl", "unknown loss 'kl'"),
        ('train.loss.loss_fn={"tv": true}', "loss_fn"),
        ("train.draft.fc_norm=true", "norm_before_fc and fc_norm exclude each other"),
        ("train.draft.d2t_path=x", "d2t_path and t2d_path go together"),
        ("train.trainer.checkpoint_freq=1.5", "whole number of epochs"),
        ("train.data.train_data_ratio=0", "train_data_ratio"),
        ("train.verifier.verifier_name_or_path.x=1", "is not a section"),
        ("nonsense", "section.key=value"),
        ("prepare.data=[a", "not valid YAML"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(file: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("?", r"\?")) as caught:
        load_run_config(file, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("- a", "mapping"),
        ("{}", "train.verifier.verifier_name_or_path is required"),
        ("train: 5", "train: Input should be"),
    ],
)
def test_files_that_are_no_run_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        load_run_config(tmp_path / "run.yaml")
    with pytest.raises(InputError, match="no such run file"):
        load_run_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "at least one"), ("[1]", "unknown loss"), ('{"ce": "x"}', "must be a number"), ('{"ce": 1', "JSON")],
)
def test_losses_that_mean_nothing(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_loss(text)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_run_files_are_valid(path: Path) -> None:
    load_run_config(path)


def test_a_draft_is_defined_once(file: Path) -> None:
    with pytest.raises(InputError, match="from_pretrained brings its own config, so num_layers cannot"):
        load_run_config(file, ["train.draft.from_pretrained=x", "train.draft.num_layers=2"])
    load_run_config(file, ["train.draft.from_pretrained=x", "train.draft.target_layer_ids=[1, 2]"])
    with pytest.raises(InputError, match="cannot be read"):
        load_run_config(file.parent)


def test_known_keys_are_dotted() -> None:
    assert {"train.optimizer.lr", "engine.divisor", "prepare.data"} <= set(known_keys())
