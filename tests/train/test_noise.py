"""Noise on hidden states: how much, on which, in which release, and that nothing but seed, epoch and row decides it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from train.runs import changed, prepared_run, run_config

from eagle3_fast.config import RunConfig, load_run_config
from eagle3_fast.errors import InputError
from eagle3_fast.records import PackedBatch
from eagle3_fast.train.loader import training_loader
from eagle3_fast.train.noise import Noise, noise_of
from eagle3_fast.train.trainer import Trainer, train


def drawn(noise: Noise, epoch: int = 0, row: int = 0) -> torch.Tensor:
    return noise.added(epoch, torch.zeros(400, 4, 50), row)


def test_uniform_noise_fills_its_width() -> None:
    values = drawn(Noise(0.05, "uniform", aux=True, last=True, seed=1))
    assert values.dtype == torch.float32
    assert 0.0499 < values.max() <= 0.05 and -0.05 <= values.min() < -0.0499
    assert abs(values.mean()) < 3e-4 and values.std() == pytest.approx(0.05 / 3**0.5, rel=0.01)


def test_gaussian_noise_has_its_deviation() -> None:
    values = drawn(Noise(0.05, "gaussian", aux=True, last=True, seed=1))
    assert values.std() == pytest.approx(0.05, rel=0.01) and abs(values.mean()) < 6e-4
    assert (values.abs() > 0.15).float().mean() == pytest.approx(0.0027, rel=0.3)


@pytest.mark.parametrize(("aux", "last"), [(True, False), (False, True), (True, True)])
def test_only_the_chosen_states_change(aux: bool, last: bool) -> None:
    values = drawn(Noise(0.1, "uniform", aux, last, seed=1))
    assert bool(values[:, :3].count_nonzero()) == aux and bool(values[:, 3].count_nonzero()) == last
    assert (values != 0).float().mean() > 0.999 * (0.75 * aux + 0.25 * last)


def test_noise_is_absolute_and_leaves_its_input_alone() -> None:
    noise, states = Noise(0.05, "uniform", aux=True, last=True, seed=1), torch.full((400, 4, 50), 1000.0)
    assert torch.allclose(noise.added(0, states, 0) - 1000, drawn(noise), atol=1e-4)
    assert (states == 1000).all()


def test_seed_epoch_and_row_decide_it() -> None:
    first = drawn(Noise(0.05, "uniform", aux=True, last=True, seed=1), 2, 3)
    assert torch.equal(first, drawn(Noise(0.05, "uniform", aux=True, last=True, seed=1), 2, 3))
    for seed, epoch, row in ((0, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2)):
        other = drawn(Noise(0.05, "uniform", aux=True, last=True, seed=seed), epoch, row)
        assert abs(torch.corrcoef(torch.stack((first.flatten(), other.flatten())))[0, 1]) < 0.02
    before = torch.get_rng_state()
    drawn(Noise(0.05, "uniform", aux=True, last=True, seed=1))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("engine", "wanted"),
    [
        ({}, None),
        ({"noise_std": 0.0}, None),
        ({"compat": "0.3", "noise_std": 0}, None),
        ({"compat": "0.3"}, (0.05, "uniform", True, True)),
        ({"noise_std": 0.1}, (0.1, "uniform", True, False)),
        ({"compat": "0.3", "noise_kind": "gaussian", "noise_tensors": ["hidden_states"]}, (0.05, "gaussian", True, False)),
        ({"noise_std": 0.1, "noise_tensors": ["verifier_last_hidden_states"]}, (0.1, "uniform", False, True)),
    ],
)
def test_what_each_release_adds(tmp_path: Path, toy: Path, engine: dict, wanted: tuple | None) -> None:
    noise = noise_of(run_config(tmp_path, toy, engine=engine))
    assert noise == (None if wanted is None else Noise(*wanted, seed=42))


def test_the_flag_of_the_releases() -> None:
    verifier = {"train.verifier.verifier_name_or_path": "v"}
    assert load_run_config(None, flags={**verifier, "train.data.noise_std": "0.02"}).engine.noise_std == 0.02
    for text in ("-0.1", "lots"):
        with pytest.raises(InputError, match="engine.noise_std"):
            load_run_config(None, flags={**verifier, "train.data.noise_std": text})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> RunConfig:
    both = ["hidden_states", "verifier_last_hidden_states"]
    return prepared_run(tmp_path_factory.mktemp("run"), toy, engine={"noise_std": 0.5, "noise_tensors": both})


def into(run: RunConfig, folder: Path, **trainer: object) -> RunConfig:
    return changed(run, **{"train.trainer": {"save_path": str(folder), **trainer}})


def batches(config: RunConfig, epoch: int = 0) -> list[PackedBatch]:
    return [batch for step in Trainer(config).loader.steps(epoch) for batch in step]


def test_noise_comes_before_the_shift_and_only_in_training(run: RunConfig, tmp_path: Path) -> None:
    config = into(run, tmp_path)
    plain = Trainer(changed(config, engine={"noise_std": 0.0}))
    noisy = Trainer(config)
    for one, other in zip(noisy.loader.steps(0), plain.loader.steps(0), strict=True):
        for name in ("aux_hidden_states", "last_hidden_states"):
            difference = (getattr(one[0], name) - getattr(other[0], name)).abs()
            filled = other[0].document_ids >= 0
            assert 0.49 < difference[filled].max() <= 0.5001 and not difference[~filled].any()
        assert torch.equal(one[0].input_ids, other[0].input_ids)
    group = plain.loader.groups(0)[0][0]
    row = plain.loader.split.first + group[0]
    states = noisy.loader.noise.added(0, plain.loader.rows.load(row).states, row)
    length = len(states) - 1
    batch = next(noisy.loader.steps(0))[0]
    assert torch.equal(batch.aux_hidden_states[:length], states[:-1, :-1].flatten(1))
    assert torch.equal(batch.last_hidden_states[:length], states[1:, -1])
    validated = [next(trainer.validation.steps(0))[0] for trainer in (noisy, plain)]
    assert torch.equal(validated[0].aux_hidden_states, validated[1].aux_hidden_states)


def test_workers_and_epochs(run: RunConfig, tmp_path: Path) -> None:
    alone = batches(into(run, tmp_path))
    worked = batches(changed(into(run, tmp_path), **{"train.data": {"num_workers": 2}}))
    assert all(torch.equal(a.aux_hidden_states, b.aux_hidden_states) for a, b in zip(alone, worked, strict=True))
    trainer = Trainer(into(run, tmp_path))
    row = trainer.loader.split.first
    states = trainer.loader.rows.load(row).states
    assert not torch.equal(trainer.loader.noise.added(0, states, row), trainer.loader.noise.added(1, states, row))


def test_ranks_share_the_noise_of_one(run: RunConfig, tmp_path: Path) -> None:
    trainer = Trainer(changed(into(run, tmp_path), engine={"accumulation": 2}))
    rows, split = trainer.loader.rows, trainer.loader.split
    ranks: list[Any] = [SimpleNamespace(rank=rank, size=2) for rank in range(2)]
    parts = [list(training_loader(rows, split, trainer.config, rank, 2).steps(1)) for rank in ranks]
    for whole, *halves in zip(trainer.loader.steps(1), *parts, strict=True):
        for batch, (half,) in zip(whole, halves, strict=False):
            assert torch.equal(batch.aux_hidden_states, half.aux_hidden_states)


def test_a_resumed_run_has_the_noise_of_an_undisturbed_one(run: RunConfig, tmp_path: Path) -> None:
    from train.test_trainer import equal, state

    config = into(run, tmp_path, epochs=20, max_steps=8)
    train(into(config, tmp_path / "whole"))
    train(into(config, tmp_path / "parts", max_steps=3))
    train(into(config, tmp_path / "parts"))
    assert equal(state(tmp_path / "whole"), state(tmp_path / "parts"))
    with pytest.raises(InputError, match="another noise"):
        train(changed(into(config, tmp_path / "parts", max_steps=9), engine={"noise_std": 0.1}))
