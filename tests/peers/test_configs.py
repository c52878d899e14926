"""Our run files in released speculators 0.9, and its configs here: both resolve to the same values.

Needs an environment of its own with the real package (`make bench-peer-venv`; another one in PEER_PYTHON), so `make test` leaves it
out: `python -m pytest tests/peers`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3_fast.cli import _parser, _place
from eagle3_fast.config import RunConfig, load_run_config, run_file
from eagle3_fast.flags import given
from eagle3_fast.spellings import KEYS

ROOT = Path(__file__).parent.parent.parent
PEER = os.environ.get("PEER_PYTHON", str(ROOT / ".venv-peer" / "bin" / "python"))
RUNNER = Path(__file__).with_name("resolve_config.py")


Peer = Callable[[list[str] | None], dict[str, Any]]


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """Its answer to the words of a training command; one process answers all, since it loads for ten seconds."""
    with subprocess.Popen([PEER, str(RUNNER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def ask(words: list[str] | None) -> dict[str, Any]:
            process.stdin.write(json.dumps(words) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def same_values(ours: RunConfig, theirs: dict[str, Any]) -> None:
    """Every key that both configs hold in the same place has the same value."""
    own = ours.model_dump(mode="json")
    for key in KEYS:
        if key.place != "own" or key.retired:
            continue
        value: Any = own
        for name in key.path.split("."):
            value = value[name]
        if key.name == "muon_lr" and value is None:
            value = ours.train.optimizer.lr
        assert theirs[key.name] == value, key.path


def test_the_table_holds_every_key_of_the_release_with_its_default(peer: Peer) -> None:
    table = {key.path: key.default for key in KEYS if not key.retired}
    null = {"train.verifier.verifier_name_or_path": "", "train.dflash.sample_from_anchor": None}
    assert {**table, **null} == peer(None)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_our_run_files_mean_there_what_they_mean_here(peer: Peer, path: Path, tmp_path: Path) -> None:
    """As `--dump-config` and `run.yaml` write them: in those, defaults that differ are said."""
    config = load_run_config(path)
    for whole in (False, True):
        (tmp_path / "run.yaml").write_text(run_file(config, whole))
        answer = peer(["--config", str(tmp_path / "run.yaml")])
        assert answer["warnings"] == []
        same_values(config, answer["values"])


def test_the_shipped_file_itself_is_taken(peer: Peer) -> None:
    answer = peer(["--config", str(ROOT / "configs" / "demo.yaml")])
    assert answer["warnings"] == []
    assert answer["values"]["draft_vocab_size"] == 8192 and answer["values"]["lr"] == 1e-2


def test_its_config_and_flags_mean_here_what_they_mean_there(peer: Peer, tmp_path: Path) -> None:
    document = {
        "verifier": {"verifier_name_or_path": "v"},
        "draft": {"num_layers": None, "draft_vocab_size": 32000, "full_attention_indices": [0], "norm_output": False},
        "generation": {"on_missing": "raise", "vllm_endpoint": "http://host:1/v1"},
        "data": {"num_workers": 3},
        "loss": {"loss_fn": '{"kl_div": 0.5, "tv": 0.5}', "ttt_steps": 4},
        "trainer": {"epochs": 3, "save_best": True},
        "backend": {"hidden_states_path": "states"},
        "mtp": {"step_weight_beta": 0.5},
    }
    path = tmp_path / "theirs.yaml"
    words = ["--lr", "1e-4", "--ttt-steps", "5", "--no-norm-before-fc", "--target-layer-ids", "1", "3", "5", "--muon-lr", "2e-3"]
    for shape in (document, {"train": document, "launch": None}):
        path.write_text(yaml.safe_dump({name: value for name, value in shape.items() if value is not None}))
        answer = peer(["--config", str(path), *words])
        options, rest = _parser(with_flags=True).parse_known_args(["train", "--config", str(path), *words])
        _place(options, rest)
        config = load_run_config(options.config, options.overrides, given(options))
        same_values(config, answer["values"])
        assert config.extract.hidden_states_path == answer["values"]["hidden_states_path"] == "states"
        assert any("mtp" in line for line in answer["warnings"])
    pretrained = tmp_path / "pretrained.yaml"
    pretrained.write_text(yaml.safe_dump({**document, "draft": {"from_pretrained": "x"}}))
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(run_file(load_run_config(pretrained), whole=True))
    assert peer(["--config", str(dumped)])["values"]["from_pretrained"] == "x"
