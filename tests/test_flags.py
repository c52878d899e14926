"""`eagle3-fast train` with speculators' flags: every one of them, their precedence, and `--dump-config`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from eagle3_fast.cli import _parser, _place, main
from eagle3_fast.config import RunConfig, load_run_config
from eagle3_fast.flags import given
from eagle3_fast.spellings import KEYS, Key


def parsed(*words: str) -> RunConfig:
    options, rest = _parser(with_flags=True).parse_known_args(["train", *words])
    _place(options, rest)
    return load_run_config(options.config, options.overrides, given(options))


def value_of(key: Key) -> list[str]:
    """Words behind a flag that its key takes: its own default, or something like it."""
    if key.form == "switch":
        return ["--no-norm-before-fc"] if key.name == "fc_norm" else []
    if key.form == "list":
        return ["0"]
    default = key.effective if key.effective not in (None, "") else "1"
    return {"d2t_path": ["a", "--t2d-path", "b"], "t2d_path": ["b", "--d2t-path", "a"]}.get(key.name, [str(default)])


@pytest.mark.parametrize("key", [key for key in KEYS if key.name != "logger"], ids=lambda key: key.flag)
def test_every_flag_is_taken(key: Key) -> None:
    value = ["--verifier-name-or-path", "x"] if key.name != "verifier_name_or_path" else []
    flag = f"--no-{key.flag[2:]}" if key.takes == (False,) else key.flag
    parsed(*value, flag, *value_of(key))


def test_the_example_of_the_manual(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("verifier: {verifier_name_or_path: v}\noptimizer: {lr: 3.0e-4, weight_decay: 0.5}\nloss: {ttt_steps: 2}\n")
    config = parsed(
        "--config", str(file), "--lr", "1e-4", "--ttt-steps", "5", "--no-norm-before-fc", "--target-layer-ids", "1", "3"
    )
    assert (config.train.optimizer.lr, config.train.loss.ttt_steps, config.train.draft.norm_before_fc) == (1e-4, 5, False)
    assert (config.train.optimizer.weight_decay, config.train.draft.target_layer_ids) == (0.5, [1, 3])


def test_flag_over_override_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {verifier: {verifier_name_or_path: v}, trainer: {epochs: 2}}\n")
    asked = ["--config", str(file)]
    assert parsed(*asked).train.trainer.epochs == 2
    assert parsed(*asked, "train.trainer.epochs=3").train.trainer.epochs == 3
    assert parsed(*asked, "train.trainer.epochs=3", "--epochs", "4").train.trainer.epochs == 4
    assert parsed("--verifier-name-or-path", "v").train.trainer.epochs == 20
    file.write_text(
        "train: {verifier: {verifier_name_or_path: v}, trainer: {gradient_checkpointing: true}, data: {hidden_states_path: a}}\n"
    )
    config = parsed(*asked, "--no-gradient-checkpointing", "--hidden-states-path", "b")
    assert (config.engine.recompute, config.extract.hidden_states_path) == (False, "b")


def test_a_command_of_0_3_needs_no_file() -> None:
    config = parsed(
        *shlex.split(
            "--verifier-name-or-path v --data-path d --save-path s --epochs 1 --lr 1e-4 --total-seq-len 64 --logger tensorboard "
            "--run-name r --log-dir l --num-layers 1 --d2t-path d2t.npy --t2d-path t2d.npy --ttt-steps 4 "
            "--ttt-step-loss-decay 0.9 --data-format-version 1 --no-resume-from-checkpoint"
        )
    )
    assert config.train.trainer.no_resume_from_checkpoint and config.train.draft.d2t_path == "d2t.npy"
    assert (config.train.logging.run_name, config.train.loss.ttt_step_loss_decay) == ("r", 0.9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lrr", "1"], "unknown argument --lrr; did you mean --lr?"),
        (["--lrr=1"], "unknown argument --lrr; did you mean --lr?"),
        (["--train-data", "1"], "unknown argument --train-data; did you mean --train-data-ratio?"),
        (["--lr", "1", "stray"], "override 'stray' is not of the form section.key=value"),
        (["--lr", "fast", "--verifier-name-or-path", "v"], "train.optimizer.lr: Input should be a valid number"),
        (["--lr", "1"], "train.verifier.verifier_name_or_path is required (flag --verifier-name-or-path)"),
        (["--hidden-states-backend", "mooncake"], "command line: train.data.hidden_states_backend mooncake is not supported"),
    ],
)
def test_a_wrong_command_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_override_may_follow_a_flag_of_several_values(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--verifier-name-or-path", "v", "--target-layer-ids", "1", "3", "5", "engine.accumulation=2", "train.optimizer.lr=0.5"]
    assert main(["train", *words, "--dump-config"]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert document["train"]["draft"]["target_layer_ids"] == [1, 3, 5]
    assert (document["engine"]["accumulation"], document["train"]["optimizer"]["lr"]) == (2, 0.5)


def test_dump_config_prints_what_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--verifier-name-or-path", "v", "engine.accumulation=2", "--lr", "1e-4", "--save-best", "ops.impl=reference"]
    assert main(["train", *words, "--dump-config"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "run.yaml").write_text(text)
    assert load_run_config(tmp_path / "run.yaml") == parsed(*words)
    document = yaml.safe_load(text)
    assert document["train"]["trainer"]["epochs"] == 20
    assert document["engine"] == {"accumulation": 2, "keep_last": 1}
    assert document["ops"] == {"impl": "reference"}


def test_the_other_verbs_know_no_such_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--config", "x", "--lr", "1"]) == 2
    assert "unknown argument --lr" in capsys.readouterr().err
