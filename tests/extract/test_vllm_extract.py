"""`extract` through a vLLM server: the same files as from this process, many requests in flight, and nothing lost when it dies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from extract.test_states import LAYERS, LENGTHS, Usage, prepare
from openai_server import serving
from vllm_stub import VllmStub

from eagle3_fast.cli import main
from eagle3_fast.config import RunConfig
from eagle3_fast.endpoint import EndpointError
from eagle3_fast.errors import InputError
from eagle3_fast.extract import states as states_module
from eagle3_fast.extract import vllm_states
from eagle3_fast.extract.sources import token_ids
from eagle3_fast.extract.states import extract
from eagle3_fast.extract.store import read_manifest, read_sample, sample_path
from eagle3_fast.prepare.dataset import open_prepared

CHECKS = len(LENGTHS)  # requests of the self-check, one for each of its rows


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_states, "BACKOFF", 0.01)


@pytest.fixture
def stub(toy: Path, tmp_path: Path) -> VllmStub:
    prepare(tmp_path / "data")
    return VllmStub(toy, LAYERS, tmp_path / "exchange")


@pytest.fixture
def url(stub: VllmStub) -> Iterator[str]:
    with serving(stub) as address:
        yield address


def document(stub: VllmStub, url: str, folder: str = "states", **section: object) -> dict[str, dict]:
    root = stub.folder.parent
    train = {
        "verifier": {"verifier_name_or_path": stub.name},
        "draft": {"target_layer_ids": LAYERS},
        "data": {"data_path": str(root / "data"), "hidden_states_dtype": "float32"},
        "generation": {"vllm_endpoint": url, "max_retries": 1},
    }
    return {"train": train, "extract": {"backend": "vllm", "hidden_states_path": str(root / folder), "concurrency": 4, **section}}


def run_config(stub: VllmStub, url: str, folder: str = "states", **section: object) -> RunConfig:
    return RunConfig.model_validate(document(stub, url, folder, **section))


def written(stub: VllmStub) -> set[int]:
    names = (stub.folder.parent / "states").glob("hs_*")
    return {int(re.findall(r"\d+", path.name)[0]) for path in names}


def test_the_same_files_as_from_this_process(stub: VllmStub, url: str) -> None:
    summary = extract(run_config(stub, url))
    assert (summary.rows, summary.written, summary.tokens_written, summary.agreement) == (8, 8, sum(LENGTHS), 1.0)
    extract(run_config(stub, url, "own", backend="transformers"))
    root = stub.folder.parent
    dataset = open_prepared(root / "data")
    for row in range(8):
        served, own = (read_sample(root / folder, row, token_ids(dataset, row), 3).states for folder in ("states", "own"))
        torch.testing.assert_close(served, own, rtol=0, atol=1e-4)
    assert read_manifest(root / "states") == read_manifest(root / "own")
    assert list(stub.folder.iterdir()) == []
    asked = len(stub.prompts)
    assert extract(run_config(stub, url)).written == 0
    assert len(stub.prompts) == asked


def test_as_many_requests_are_in_flight_as_asked_for(stub: VllmStub, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.held = 0.2
    extract(run_config(stub, url))
    assert 1 < stub.most_at_once <= 4


def test_a_server_that_dies_loses_nothing(stub: VllmStub, url: str) -> None:
    stub.refuse = lambda number, payload: None if number >= CHECKS + 3 else False
    with pytest.raises(EndpointError, match=r"no answer in 2 tries"):
        extract(run_config(stub, url))
    assert len(written(stub)) == 3
    stub.refuse = lambda number, payload: False
    stub.prompts.clear()
    assert extract(run_config(stub, url)).written == 5
    assert len(stub.prompts) == CHECKS + 5
    assert written(stub) == set(range(8))


def test_a_dead_server_is_one_line_and_exit_code_2(
    stub: VllmStub, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(stub) as gone:
        pass
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document(stub, gone)))
    assert main(["extract", "--config", str(tmp_path / "run.yaml")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"eagle3-fast: error: {gone}/v1/models: no answer in 2 tries")


def test_rows_that_the_server_cannot_give_are_left_out_and_named(stub: VllmStub, url: str) -> None:
    def refuse(number: int, payload: dict) -> object:
        return (400, {"error": {"message": "too long"}}) if len(payload["prompt"]) == 40 and number >= CHECKS else False

    stub.refuse = refuse
    with pytest.raises(InputError, match=r"1 of 8 rows have no hidden states, the first: row 1: .*too long.*run extract again"):
        extract(run_config(stub, url))
    assert written(stub) == set(range(8)) - {1}
    stub.refuse = lambda number, payload: False
    summary = extract(run_config(stub, url))
    assert (summary.written, summary.agreement) == (1, 1.0)


def test_states_of_one_layer_early_stop_before_the_first_file(stub: VllmStub, url: str) -> None:
    early = VllmStub(Path(stub.name), [1, 3, 4, 5], stub.folder)
    stub.verifier = early.verifier
    stub.damage = lambda number, tensors: tensors | {"hidden_states": tensors["hidden_states"][:, :4].contiguous()}
    with pytest.raises(InputError, match=r"computed hidden states give the verifier's own token at [0-9.]+% of positions"):
        extract(run_config(stub, url))
    assert written(stub) == set()


def test_a_logit_scale_that_is_not_known_stops(stub: VllmStub, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = stub.verifier.logits
    monkeypatch.setattr(stub.verifier, "logits", lambda ids: own(ids) / 4)
    with pytest.raises(InputError, match="scales or caps logits in a way that is not known here"):
        extract(run_config(stub, url))


def test_a_server_without_prompt_logprobs_is_named(stub: VllmStub, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub, "_logprobs", lambda ids, count: None)
    with pytest.raises(EndpointError, match="gives no prompt_logprobs, by which its hidden states are checked"):
        extract(run_config(stub, url))


def test_a_disk_that_fills_up_stops_the_run_cleanly(stub: VllmStub, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(path: object) -> Usage:
        return Usage(10**9, 10**8, 9 * 10**8) if len(written(stub)) < 3 else Usage(10**9, 96 * 10**7, 4 * 10**7)

    monkeypatch.setattr(states_module.shutil, "disk_usage", usage)
    with pytest.raises(InputError, match=r"95% full after [34] of 8 rows; make room and run extract again"):
        extract(run_config(stub, url, concurrency=2))
    assert len(stub.prompts) <= CHECKS + 4 + 2  # what was in flight, and nothing after it
    monkeypatch.undo()
    monkeypatch.setattr(vllm_states, "BACKOFF", 0.01)
    extract(run_config(stub, url))
    assert written(stub) == set(range(8))


def test_files_damaged_while_written_are_found_afterwards(stub: VllmStub, url: str) -> None:
    extract(run_config(stub, url))
    root = stub.folder.parent
    sample_path(root / "states", 1).write_bytes(sample_path(root / "states", 1).read_bytes()[:-8])
    stub.damage = lambda number, tensors: (
        tensors | {"hidden_states": tensors["hidden_states"].flip(0)} if number >= 2 * CHECKS + 8 else tensors
    )
    with pytest.raises(InputError, match="stored hidden states give the verifier's own token at"):
        extract(run_config(stub, url))
