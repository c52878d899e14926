"""Training on hidden states of a server is training on stored ones, bit for bit, whatever happens to the server on the way."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from openai_server import serving
from train.runs import changed, prepared_run
from train.test_trainer import equal, metrics, state
from vllm_stub import VllmStub

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.extract import vllm_states
from eagle3_fast.extract.states import extract
from eagle3_fast.files import read_json
from eagle3_fast.model.config import load_draft_config
from eagle3_fast.prepare.dataset import open_prepared
from eagle3_fast.train.checkpoint import latest_checkpoint
from eagle3_fast.train.loader import PackedRows, training_loader
from eagle3_fast.train.ranks import Ranks
from eagle3_fast.train.trainer import train

LAYERS = [1, 3, 5]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_states, "BACKOFF", 0.01)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> RunConfig:
    """A run whose hidden states were stored through a server, and one training on them in `offline`."""
    folder = tmp_path_factory.mktemp("run")
    run = prepared_run(folder, toy)
    shutil.rmtree(run.hidden_states_path)
    with serving(VllmStub(toy, LAYERS, folder / "exchange")) as url:
        run = changed(run, **{"train.generation": {"vllm_endpoint": url, "max_retries": 2}})
        extract(changed(run, extract={"backend": "vllm"}))
    train(into(run, folder / "offline"))
    return run


@pytest.fixture
def stub(toy: Path, tmp_path: Path) -> VllmStub:
    return VllmStub(toy, LAYERS, tmp_path / "exchange")


@pytest.fixture
def url(stub: VllmStub) -> Iterator[str]:
    with serving(stub) as address:
        yield address


def into(run: RunConfig, folder: Path, **trainer: object) -> RunConfig:
    return changed(run, **{"train.trainer": {"save_path": str(folder), "checkpoint_freq": 0.5, **trainer}})


def asking(run: RunConfig, url: str, folder: Path, **generation: object) -> RunConfig:
    return changed(into(run, folder), **{"train.generation": {"vllm_endpoint": url, **generation}})


def values(folder: Path) -> list[list[float]]:
    return [[value["loss"], value["grad_norm"]] for value in metrics(folder)] + [
        [value["loss"], value["tau"]] for value in metrics(folder, "val")
    ]


def offline(run: RunConfig) -> Path:
    return Path(run.train.data.data_path).parent / "offline"


def assert_the_same_run(folder: Path, run: RunConfig) -> None:
    assert values(folder) == values(offline(run))
    assert equal(state(folder)["engine"], state(offline(run))["engine"])


def saved_step(folder: Path) -> int:
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    return read_json(checkpoint / "training_state.json")["global_step"]


def prompts_of(run: RunConfig, rows: list[int]) -> Counter:
    dataset = open_prepared(run.train.data.data_path)
    return Counter(tuple(dataset[row]["input_ids"]) for row in rows)


def test_online_is_offline(stored: RunConfig, stub: VllmStub, url: str, tmp_path: Path) -> None:
    train(asking(stored, url, tmp_path / "run"), online=True)
    assert_the_same_run(tmp_path / "run", stored)
    everything = prompts_of(stored, list(range(30)))
    assert Counter(map(tuple, stub.prompts)) == Counter({ids: 2 * count for ids, count in everything.items()})  # two epochs
    assert stub.most_at_once > 1
    assert list(stub.folder.iterdir()) == []


def test_what_is_stored_is_not_asked_for(stored: RunConfig, stub: VllmStub, url: str, tmp_path: Path) -> None:
    shutil.copytree(stored.hidden_states_path, tmp_path / "states")
    missing = [1, 4, 29]
    for row in missing:
        (tmp_path / f"states/hs_{row}.safetensors").unlink()
    config = changed(
        asking(stored, url, tmp_path / "run", on_missing="generate"), extract={"hidden_states_path": str(tmp_path / "states")}
    )
    train(config)
    assert_the_same_run(tmp_path / "run", stored)
    assert set(map(tuple, stub.prompts)) == set(prompts_of(stored, missing))
    assert len(stub.prompts) == 6
    assert not any((tmp_path / f"states/hs_{row}.safetensors").exists() for row in missing)  # discarded after use


def test_no_server_is_needed_where_all_is_stored(stored: RunConfig, tmp_path: Path) -> None:
    train(asking(stored, "http://127.0.0.1:9", tmp_path / "run", on_missing="generate"))
    assert_the_same_run(tmp_path / "run", stored)


def test_rows_are_asked_for_so_many_batches_ahead(stored: RunConfig, stub: VllmStub, url: str, tmp_path: Path) -> None:
    config = changed(asking(stored, url, tmp_path), **{"train.data": {"prefetch_factor": 2, "total_seq_len": 64}})
    checkpoint = latest_checkpoint(offline(stored))
    assert checkpoint is not None
    rows = PackedRows(config, load_draft_config(checkpoint), online=True)
    training, _ = rows.splits()
    loader = training_loader(rows, training, config, Ranks(), slots=1)
    batches = [batch for group in loader.groups(0) for batch in group]
    steps = loader.steps(0)
    next(steps)
    ahead = sum(len(batch) for batch in batches[:3])
    assert 0 < len(batches[0]) < ahead < len(training.lengths)
    for _ in range(100):
        if len(stub.prompts) >= ahead:
            break
        time.sleep(0.05)
    time.sleep(0.2)
    assert len(stub.prompts) == ahead
    steps.close()  # type: ignore[attr-defined]


def test_a_server_that_dies_ends_the_run_with_what_it_has_learnt(
    stored: RunConfig, stub: VllmStub, url: str, tmp_path: Path
) -> None:
    config = asking(stored, url, tmp_path / "run")
    stub.refuse = lambda number, payload: None if number >= 20 else False
    config = changed(config, **{"train.data": {"prefetch_factor": 1}})
    with pytest.raises(
        InputError, match=r"step (\d+): .*no answer in 3 tries .*; saved to .*, run the same command to go on"
    ) as caught:
        train(config, online=True)
    assert "\n" not in str(caught.value)
    reached = len(metrics(tmp_path / "run"))
    assert 0 < reached < len(metrics(offline(stored)))
    assert f"step {reached}: " in str(caught.value)
    assert saved_step(tmp_path / "run") == reached
    stub.refuse = lambda number, payload: False
    train(config, online=True)
    assert_the_same_run(tmp_path / "run", stored)


def test_a_server_that_dies_before_anything_is_trained(stored: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="step 0: http://127.0.0.1:9/v1/models: no answer in 3 tries.*; nothing was trained yet"):
        train(asking(stored, "http://127.0.0.1:9", tmp_path / "run"), online=True)
    assert latest_checkpoint(tmp_path / "run") is None


def test_a_server_that_dies_during_validation(stored: RunConfig, stub: VllmStub, url: str, tmp_path: Path) -> None:
    """Of the second epoch, after which no checkpoint is due."""
    longer = {"train.trainer": {"epochs": 3, "checkpoint_freq": 3.0}}
    train(changed(into(stored, tmp_path / "offline"), **longer))
    config = changed(asking(stored, url, tmp_path / "run"), **longer)
    held_back, seen = set(prompts_of(stored, list(range(24, 30)))), []

    def dies(number: int, payload: dict) -> object:
        if tuple(payload["prompt"]) in held_back:
            seen.append(number)
            return None if len(seen) > 6 else False
        return False

    stub.refuse = dies
    with pytest.raises(InputError, match=r"no answer in 3 tries .*; saved to .*run/1, run the same command"):
        train(config, online=True)
    stub.refuse = lambda number, payload: False
    train(config, online=True)
    assert values(tmp_path / "run") == values(tmp_path / "offline")
    assert equal(state(tmp_path / "run")["engine"], state(tmp_path / "offline")["engine"])


def test_a_server_that_comes_back_in_time_is_not_missed(stored: RunConfig, stub: VllmStub, url: str, tmp_path: Path) -> None:
    config = asking(stored, url, tmp_path / "run", max_retries=40)
    down: list[int] = []

    def dies_once(number: int, payload: object) -> object:
        if number >= 20 and len(down) < 24:  # every request in flight meets a closed door several times
            down.append(number)
            return None
        return False

    stub.refuse = dies_once
    train(config, online=True)
    assert len(down) == 24
    assert_the_same_run(tmp_path / "run", stored)


def test_a_sample_that_stays_broken_is_left_out_and_named(
    stored: RunConfig, stub: VllmStub, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (victim,) = prompts_of(stored, [3])
    stub.damage = lambda number, tensors: (
        tensors | {"hidden_states": tensors["hidden_states"] * torch.inf}
        if tuple(tensors["token_ids"].tolist()) == victim
        else tensors
    )
    train(changed(asking(stored, url, tmp_path, on_missing="generate"), extract={"hidden_states_path": str(tmp_path / "none")}))
    assert sum(value["skipped_samples"] for value in metrics(tmp_path)) == 2
    assert sum(tuple(ids) == victim for ids in stub.prompts) == 2 * 3  # three tries in each of two epochs
    assert "skipped row 3: its hidden states are not finite in torch.float32, at try 3 of 3" in caplog.text


def test_a_server_that_gives_nothing_usable_ends_the_run(stored: RunConfig, stub: VllmStub, url: str, tmp_path: Path) -> None:
    stub.damage = lambda number, tensors: tensors | {"hidden_states": tensors["hidden_states"][1:]} if number >= 20 else tensors
    config = asking(
        stored, url, tmp_path / "run", on_missing="generate", max_consecutive_generation_failures=4, generation_validation_retries=0
    )
    config = changed(config, extract={"hidden_states_path": str(tmp_path / "none")})
    with pytest.raises(InputError, match=r"4 samples in a row could not be used; the last: row \d+: .*; saved to "):
        train(config)
    assert latest_checkpoint(tmp_path / "run") is not None


def test_a_run_that_ends_asks_for_nothing_more(stored: RunConfig, stub: VllmStub, url: str, tmp_path: Path) -> None:
    ends = {"train.trainer": {"max_steps": 1}, "train.data": {"prefetch_factor": 100, "train_data_ratio": 1.0}}
    train(changed(asking(stored, url, tmp_path), extract={"concurrency": 1}, **ends), online=True)
    asked = len(stub.prompts)
    assert asked < 30  # all rows stood in line
    time.sleep(0.2)
    assert len(stub.prompts) == asked
