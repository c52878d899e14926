"""The whole line on a tiny verifier, through the command that users run: chats in, a servable draft and a report out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from train.runs import run_config, write_chats
from verifiers import toy_glm5, toy_llama, toy_qwen3

from eagle3_fast.cli import EXIT_BAD_INPUT, main


def write_run(folder: Path, verifier: Path, **changes: dict) -> Path:
    """Chats, prompts and a run file in `folder`."""
    write_chats(folder / "chats.jsonl", 24)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the dog ran", "a red house")))
    config = run_config(folder, verifier, evaluate={"prompts": [str(folder / "prompts.jsonl")]}, **changes)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    return path


@pytest.mark.parametrize("verifier", [toy_llama, toy_qwen3, toy_glm5])
def test_run_makes_everything_and_again_makes_nothing_new(
    tmp_path: Path, verifier: object, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = verifier(tmp_path / "verifier")
    path = write_run(tmp_path, folder)
    assert main(["run", "--config", str(path)]) == 0, capsys.readouterr().err
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert evaluation["prompt_sets"][0]["identical"] == 2
    assert main(["check", str(tmp_path / "draft")]) == 0
    assert "<html" in (tmp_path / "report.html").read_text()
    trained = (tmp_path / "checkpoints" / "1" / "engine_state.pt").stat().st_mtime_ns
    capsys.readouterr()
    assert main(["run", "--config", str(path)]) == 0
    assert (tmp_path / "checkpoints" / "1" / "engine_state.pt").stat().st_mtime_ns == trained
    said = capsys.readouterr().err
    assert "nothing to do" in said


@pytest.mark.parametrize(
    ("verb", "change", "message"),
    [
        ("prepare", "prepare.data=[absent.jsonl]", "absent.jsonl"),
        ("vocab", "train.draft.draft_vocab_size=65", "draft_vocab_size"),
        ("extract", "train.verifier.verifier_name_or_path=/absent", "/absent"),
        ("train", "train.data.data_path=/absent", "/absent"),
        ("export", "train.trainer.save_path=/absent", "holds no checkpoint"),
        ("evaluate", "export.output=/absent", "/absent"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, toy: Path, verb: str, change: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, toy)
    if verb in ("vocab", "extract"):
        assert main(["prepare", "--config", str(path)]) == 0
        capsys.readouterr()
    assert main([verb, "--config", str(path), change]) == EXIT_BAD_INPUT
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("eagle3-fast: error: ")
    assert message in error


SGLANG = {"norm_before_residual": False, "full_attention_indices": [0]}


def test_a_run_for_sglang_evaluates_its_checkpoint(tmp_path: Path, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, toy, **{"export": {"format": "sglang"}, "train.draft": SGLANG})
    assert main(["run", "--config", str(path)]) == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    assert json.loads((tmp_path / "evaluation.json").read_text())["prompt_sets"][0]["identical"] == 2
    command = f"--speculative-draft-model-path {tmp_path / 'draft'} --speculative-num-steps 3"
    assert command in capsys.readouterr().err
    assert command in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("verb", ["run", "train"])
def test_what_sglang_does_not_follow_is_refused_before_training(
    tmp_path: Path, toy: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, toy, export={"format": "sglang"})
    assert main([verb, "--config", str(path)]) == EXIT_BAD_INPUT
    assert "SGLang does not follow norm_before_residual" in capsys.readouterr().err
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "data").exists()


def test_every_verb_has_help() -> None:
    for verb in (
        "regenerate",
        "prepare",
        "vocab",
        "extract",
        "train",
        "export",
        "evaluate",
        "report",
        "run",
        "check",
        "show-mask",
        "doctor",
    ):
        done = subprocess.run([sys.executable, "-m", "eagle3_fast", verb, "--help"], capture_output=True, text=True)
        assert done.returncode == 0
        assert "usage: eagle3-fast" in done.stdout


def test_show_mask_marks_what_is_supervised(tmp_path: Path, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, toy)
    assert main(["prepare", "--config", str(path)]) == 0
    capsys.readouterr()
    assert main(["show-mask", "--config", str(path), "--row", "1"]) == 0
    assert "supervised" in capsys.readouterr().out
