"""The training loop: it learns, it stops and goes on bit for bit, and it names everything that goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from train.runs import changed, prepared_run

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError, Interrupted
from eagle3_fast.ops import select
from eagle3_fast.train.checkpoint import latest_checkpoint
from eagle3_fast.train.engine import LocalEngine
from eagle3_fast.train.trainer import Trainer, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> RunConfig:
    """Prepared data shared by this module; every test trains into a folder of its own."""
    return prepared_run(tmp_path_factory.mktemp("run"), toy)


def into(run: RunConfig, folder: Path, **trainer: object) -> RunConfig:
    return changed(run, **{"train.trainer": {"save_path": str(folder), **trainer}})


def metrics(folder: Path, split: str = "train") -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [value for value in map(json.loads, lines) if value["split"] == split]


def state(folder: Path) -> dict:
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    return torch.load(checkpoint / "engine_state.pt", weights_only=True)


def equal(a: object, b: object) -> bool:
    """Bitwise equality of nested states."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("compat", ["0.9", "0.3"])
def test_it_learns_and_leaves_a_servable_checkpoint(run: RunConfig, tmp_path: Path, compat: str) -> None:
    engine = {"compat": compat, "verifier_norm": compat == "0.9"}
    config = changed(into(run, tmp_path, epochs=6), engine=engine, **{"train.scheduler": {"scheduler_type": "none"}})
    train(config)
    losses = [value["loss"] for value in metrics(tmp_path)]
    validation = [value["loss"] for value in metrics(tmp_path, "val")]
    assert losses[-1] < 0.8 * losses[0]
    assert len(validation) == 6
    assert validation[-1] < validation[0]
    assert {path.name for path in (tmp_path / "5").iterdir()} == {
        "config.json",
        "model.safetensors",
        "engine_state.pt",
        "training_state.json",
        "val_metrics.json",
    }
    assert (tmp_path / "epoch5_end").resolve() == tmp_path / "5"
    best = min(range(6), key=lambda epoch: validation[epoch])
    assert (tmp_path / "checkpoint_best").resolve() == tmp_path / str(best)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_five_steps_and_five_more_are_ten(run: RunConfig, tmp_path: Path, optimizer: str) -> None:
    config = changed(run, **{"train.optimizer": {"optimizer": optimizer}}, engine={"accumulation": 2})
    config = changed(config, **{"train.trainer": {"epochs": 20, "max_steps": 10}})
    train(into(config, tmp_path / "whole"))
    train(into(config, tmp_path / "parts", max_steps=5))
    train(into(config, tmp_path / "parts"))
    assert equal(state(tmp_path / "whole"), state(tmp_path / "parts"))
    assert [v["loss"] for v in metrics(tmp_path / "whole")] == [v["loss"] for v in metrics(tmp_path / "parts")]


def test_a_killed_run_goes_on_bit_for_bit(run: RunConfig, tmp_path: Path) -> None:
    """SIGTERM in the middle of an epoch: exit code 75, a checkpoint, and the same end as the undisturbed run."""
    import yaml

    config = into(run, tmp_path / "whole", epochs=3)
    train(config)
    disturbed = into(run, tmp_path / "parts", epochs=3)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(disturbed.model_dump()))
    script = (
        "import os, signal, sys, torch; torch.set_num_threads(1)\n"
        "from eagle3_fast.train import trainer\n"
        "report = trainer.Trainer._report\n"
        "def stop(self, *a):\n"
        "    report(self, *a)\n"
        "    if self.position.global_step == 4: os.kill(os.getpid(), signal.SIGTERM)\n"
        "trainer.Trainer._report = stop\n"
        "from eagle3_fast.cli import main\n"
        f"sys.exit(main(['train', '--config', {str(tmp_path / 'run.yaml')!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 75, done.stderr
    assert "interrupted at step 4; saved to" in done.stderr
    train(disturbed)
    assert equal(state(tmp_path / "whole"), state(tmp_path / "parts"))
    assert [v["global_step"] for v in metrics(tmp_path / "parts")] == list(range(1, len(metrics(tmp_path / "whole")) + 1))


def test_every_sample_is_seen_once_around_a_stop(run: RunConfig, tmp_path: Path) -> None:
    config = into(run, tmp_path, epochs=1)
    seen: list[list[int]] = []
    for limit in (3, None):
        trainer = Trainer(changed(config, **{"train.trainer": {"max_steps": limit}}))
        batch = trainer.loader.rows.batch
        trainer.loader.rows.batch = lambda rows, batch=batch: seen.append(rows) or batch(rows)
        trainer.run()
    training = [rows for rows in seen if max(rows) < len(trainer.loader.split.lengths)]
    assert [sorted(rows) for rows in training] == [sorted(rows) for step in trainer.loader.groups(0) for rows in step]


def test_masters_keep_full_precision(run: RunConfig, tmp_path: Path) -> None:
    """Norm weights move by less than a bf16 step; after a resume they are what they were, not their rounding."""
    config = changed(into(run, tmp_path, epochs=1), **{"train.data": {"hidden_states_dtype": "bfloat16"}})
    config = changed(config, extract={"hidden_states_path": str(tmp_path / "hs")})
    from eagle3_fast.extract.states import extract

    extract(config)
    train(config)
    saved = state(tmp_path)["engine"]["masters"]["norm.weight"]
    assert saved.dtype == torch.float32
    assert not torch.equal(saved, saved.bfloat16().float())
    trainer = Trainer(config)
    trainer._resume()
    assert torch.equal(dict(trainer.engine.draft.named_parameters())["norm.weight"], saved)


def test_only_trainable_parameters_are_optimised(run: RunConfig, tmp_path: Path) -> None:
    trainer = Trainer(into(run, tmp_path))
    optimised = [value for o in trainer.engine.updates.optimizers for group in o.param_groups for value in group["params"]]
    trainable = [value for value in trainer.engine.draft.parameters() if value.requires_grad]
    assert {id(value) for value in optimised} == {id(value) for value in trainable}
    frozen = {name for name, value in trainer.engine.draft.named_parameters() if not value.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}


def test_accumulated_batches_weigh_their_tokens(run: RunConfig, tmp_path: Path) -> None:
    """One step over a window equals one step over the same documents in one long batch."""
    window = Trainer(changed(into(run, tmp_path / "a"), engine={"accumulation": 100}))
    (batches,) = window.loader.steps(0)
    assert len(batches) > 1
    long = changed(into(run, tmp_path / "b"), **{"train.data": {"total_seq_len": 160 * len(batches)}})
    single = Trainer(long)
    rows = [row for group in window.loader.groups(0) for batch in group for row in batch]
    for trainer, group in ((window, batches), (single, [single.loader.rows.batch(rows)])):
        trainer.bar, trainer.metrics, trainer.tracer = _Silent(), _Silent(), _Silent()
        trainer.engine.max_grad_norm = 1e9
        trainer._step(group)
    for (name, a), b in zip(window.engine.draft.named_parameters(), single.engine.draft.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5), name


class _Silent:
    def __getattr__(self, name: str) -> object:
        return lambda *args, **kwargs: None


def test_schedule_counts_optimizer_steps(run: RunConfig, tmp_path: Path) -> None:
    """The last, short window of an epoch is a step of its own, and the rate ends at its minimum."""
    config = changed(into(run, tmp_path, epochs=2), engine={"accumulation": 6})
    config = changed(config, **{"train.scheduler": {"scheduler_total_steps": None, "scheduler_warmup_steps": 0}})
    trainer = Trainer(config)
    groups = [group for epoch in range(2) for group in trainer.loader.groups(epoch)]
    assert min(map(len, groups)) < 6 == max(map(len, groups))
    trainer.run()
    rows = metrics(tmp_path)
    assert len(rows) == len(groups) == trainer.position.global_step
    assert rows[-1]["lr/AdamW"] == 0


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_step_that_is_not_finite(run: RunConfig, tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(changed(into(run, tmp_path, max_steps=2), engine={"on_nan": policy}))
    with torch.no_grad():
        trainer.engine.draft.fc.weight[0, 0] = torch.nan
    before = trainer.engine.draft.norm.weight.clone()
    if policy == "stop":
        with pytest.raises(InputError, match="step 1: loss or gradient is not finite"):
            trainer.run()
    else:
        trainer.run()
        assert [value["skipped_step"] for value in metrics(tmp_path)] == [True, True]
    assert torch.equal(trainer.engine.draft.norm.weight, before)


@pytest.mark.parametrize("fault", ["missing", "truncated", "not finite"])
def test_an_unusable_sample(run: RunConfig, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import load_file, save_file

    states = tmp_path / "hs"
    shutil.copytree(run.hidden_states_path, states)
    victim = states / "hs_0.safetensors"
    if fault == "missing":
        victim.unlink()
    elif fault == "truncated":
        victim.write_bytes(victim.read_bytes()[:-40])
    else:
        tensors = load_file(victim)
        tensors["hidden_states"][1, 0, 0] = torch.inf
        save_file(tensors, victim)
    config = changed(into(run, tmp_path, epochs=1), extract={"hidden_states_path": str(states)})
    with pytest.raises(InputError, match="hs_0"):
        train(config)
    shutil.rmtree(tmp_path / "0", ignore_errors=True)
    config = changed(config, **{"train.generation": {"on_missing": "skip"}})
    train(config)
    assert sum(value["skipped_samples"] for value in metrics(tmp_path)) == 1


def test_missing_states_can_be_computed(run: RunConfig, tmp_path: Path) -> None:
    """Stored, partly computed and wholly online training are the same training."""
    states = tmp_path / "hs"
    shutil.copytree(run.hidden_states_path, states)
    (states / "hs_0.safetensors").unlink()
    partly = changed(into(run, tmp_path / "partly", epochs=1), extract={"hidden_states_path": str(states)})
    partly = changed(partly, **{"train.generation": {"on_missing": "generate"}})
    train(into(run, tmp_path / "stored", epochs=1))
    train(partly)
    train(into(run, tmp_path / "online", epochs=1), online=True)
    losses = [[value["loss"] for value in metrics(tmp_path / name)] for name in ("stored", "partly", "online")]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[2] == pytest.approx(losses[0], rel=2e-3)  # the verifier rounds differently by batch shape, and 8 steps amplify it


def test_a_batch_with_nothing_to_use_changes_nothing(run: RunConfig, tmp_path: Path) -> None:
    states = tmp_path / "hs"
    shutil.copytree(run.hidden_states_path, states)
    for path in states.glob("hs_*"):
        path.unlink()
    config = changed(into(run, tmp_path, max_steps=1), extract={"hidden_states_path": str(states)})
    trainer = Trainer(changed(config, **{"train.generation": {"on_missing": "skip"}}))
    before = trainer.engine.draft.fc.weight.clone()
    trainer.run()
    row = metrics(tmp_path)[0]
    assert (row["loss"], row["skipped_step"]) == (0, True)
    assert row["skipped_samples"] > 0
    assert torch.equal(trainer.engine.draft.fc.weight, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train.data": {"total_seq_len": 128}}, "total_seq_len"),
        ({"train": {"seed": 7}}, "seed"),
        ({"engine": {"accumulation": 2}}, "batches of a step"),
        ({"engine": {"mask_rule": "label"}}, "objective"),
        ({"engine": {"compat": "0.3"}}, "compat"),
        ({"train.loss": {"ttt_steps": 2}}, "objective"),
        ({"train.draft": {"norm_output": False}}, "draft"),
        ({"train.optimizer": {"optimizer": "adamw"}}, "optimizer"),
    ],
)
def test_another_run_is_not_taken_for_this_one(run: RunConfig, tmp_path: Path, change: dict, message: str) -> None:
    train(into(run, tmp_path, max_steps=1))
    with pytest.raises(InputError, match=message):
        train(changed(into(run, tmp_path, max_steps=2), **change))


def test_a_half_written_checkpoint_is_passed_over(run: RunConfig, tmp_path: Path) -> None:
    train(into(run, tmp_path, epochs=2))
    (tmp_path / "1" / "training_state.json").unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "0"
    shutil.copytree(tmp_path / "0", tmp_path / ".3.partial")
    assert latest_checkpoint(tmp_path) == tmp_path / "0"
    (tmp_path / "0").rename(tmp_path / ".0.old")
    assert latest_checkpoint(tmp_path) == tmp_path / "0"


def test_a_full_disk_during_a_save_keeps_the_last_checkpoint(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(into(run, tmp_path, epochs=1))
    before = (tmp_path / "0" / "engine_state.pt").read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(InputError, match="No space.*earlier ones are untouched"):
        train(into(run, tmp_path, epochs=2))
    assert latest_checkpoint(tmp_path) == tmp_path / "0"
    assert (tmp_path / "0" / "engine_state.pt").read_bytes() == before


def test_the_checkpoint_exists_when_validation_fails(run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: Trainer, folder: Path) -> None:
        raise RuntimeError("validation broke")

    monkeypatch.setattr(Trainer, "_validate", crash)
    with pytest.raises(RuntimeError, match="validation broke"):
        train(into(run, tmp_path, epochs=1))
    assert latest_checkpoint(tmp_path) == tmp_path / "0"


@pytest.mark.parametrize("side_file", ["val_metrics.json kept", "val_metrics.json lost"])
def test_the_best_link_survives_a_resume(run: RunConfig, tmp_path: Path, side_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train(into(run, tmp_path, epochs=1))
    if side_file.endswith("lost"):
        (tmp_path / "0" / "val_metrics.json").unlink()
    monkeypatch.setattr("eagle3_fast.train.engine.LocalEngine.step", _ruin)
    train(into(run, tmp_path, epochs=2))
    assert metrics(tmp_path, "val")[-1]["loss"] > metrics(tmp_path, "val")[0]["loss"]
    assert (tmp_path / "checkpoint_best").resolve() == tmp_path / "0"


def _ruin(engine: LocalEngine) -> float:
    with torch.no_grad():
        engine.draft.norm.weight.fill_(-3.0)
    engine.skip()
    return 1.0


def test_warm_start_keeps_weights_and_mapping(run: RunConfig, tmp_path: Path) -> None:
    train(into(run, tmp_path / "first", epochs=1))
    checkpoint = tmp_path / "first" / "0"
    warm = changed(into(run, tmp_path / "second"), **{"train.draft": {"from_pretrained": str(checkpoint)}})
    draft = Trainer(warm).engine.draft
    from safetensors.torch import load_file

    saved = load_file(checkpoint / "model.safetensors")
    assert torch.equal(draft.fc.weight, saved["fc.weight"].float())
    assert draft.fc.weight.dtype == torch.float32
    assert torch.equal(draft.d2t, saved["d2t"])


def test_interruption_raises_after_saving(run: RunConfig, tmp_path: Path) -> None:
    trainer = Trainer(into(run, tmp_path))
    step = trainer._step
    trainer._step = lambda window: (step(window), signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted, match="run the same command to go on"):
        trainer.run()
    assert latest_checkpoint(tmp_path) == tmp_path / "0"
    assert (tmp_path / "epoch0_step1").is_symlink()


def test_a_resumed_run_takes_its_rates_from_the_run_file(run: RunConfig, tmp_path: Path) -> None:
    train(into(run, tmp_path, max_steps=2))
    slower = changed(into(run, tmp_path, max_steps=3), **{"train.optimizer": {"lr": 1e-5, "muon_lr": 1e-6, "weight_decay": 0.5}})
    trainer = Trainer(slower)
    trainer._resume()
    muon, adamw = (optimizer.param_groups[0] for optimizer in trainer.engine.updates.optimizers)
    assert (adamw["lr"], muon["lr"]) == (pytest.approx(1e-5 * 18 / 20), pytest.approx(1e-6 * 18 / 20))
    assert adamw["weight_decay"] == 0.5


def test_old_checkpoints_are_not_mixed_with_a_new_run(run: RunConfig, tmp_path: Path) -> None:
    train(into(run, tmp_path, max_steps=1))
    with pytest.raises(InputError, match="not to be resumed"):
        train(into(run, tmp_path, max_steps=2, no_resume_from_checkpoint=True))


@pytest.mark.parametrize("divisor", ["step", "batch"])
def test_each_term_of_a_compound_loss_is_told(run: RunConfig, tmp_path: Path, divisor: str) -> None:
    weights = {"kl_div": 0.75, "tv": 2.0}
    config = changed(
        into(run, tmp_path, max_steps=3),
        engine={"divisor": divisor, "accumulation": 2},
        **{"train.loss": {"loss_fn": json.dumps(weights), "ttt_steps": 2}},
    )
    train(config)
    for line in (*metrics(tmp_path), *metrics(tmp_path, "val")):
        for k in range(2):
            whole = sum(weight * line[f"{kind}_loss_{k}"] for kind, weight in weights.items())
            assert whole == pytest.approx(line[f"loss_{k}"], rel=1e-5)


def test_a_step_tells_the_times_of_its_phases(run: RunConfig, tmp_path: Path) -> None:
    train(into(run, tmp_path, max_steps=3))
    for line in metrics(tmp_path):
        phases = [line[f"profile/{name}_ms"] for name in ("fwd", "bwd", "opt")]
        assert min(phases) > 0
        assert sum(phases) <= line["profile/step_ms"]
        assert line["profile/fetch_ms"] > 0
        assert "kl_div_loss_0" not in line


def test_the_divisor_of_each_batch_reports_a_mean(run: RunConfig, tmp_path: Path) -> None:
    losses = []
    for accumulation in (1, 4):
        folder = tmp_path / str(accumulation)
        train(changed(into(run, folder, max_steps=1), engine={"divisor": "batch", "accumulation": accumulation}))
        losses.append(metrics(folder)[0]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.2)


def test_an_epoch_whose_validation_was_missed_is_validated_on_resume(run: RunConfig, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_validate", lambda self, folder: None)
        train(into(run, tmp_path, epochs=1))
    assert not (tmp_path / "checkpoint_best").exists()
    train(into(run, tmp_path, epochs=1))
    assert (tmp_path / "checkpoint_best").resolve() == tmp_path / "0"


def test_a_validation_that_says_nothing_is_no_best(tmp_path: Path) -> None:
    from eagle3_fast.train.checkpoint import record_validation

    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    record_validation(tmp_path, tmp_path / "0", {"loss": float("nan"), "supervised_tokens": 5})
    assert not (tmp_path / "checkpoint_best").exists()
    record_validation(tmp_path, tmp_path / "1", {"loss": 3.0, "supervised_tokens": 5})
    record_validation(tmp_path, tmp_path / "0", {"loss": 0.0, "supervised_tokens": 0})
    assert (tmp_path / "checkpoint_best").resolve() == tmp_path / "1"


def test_states_of_another_verifier_are_refused(run: RunConfig, tmp_path: Path) -> None:
    from verifiers import toy_llama

    other = toy_llama(tmp_path / "other", seed=1)
    with pytest.raises(InputError, match="verifier"):
        train(changed(into(run, tmp_path / "c"), **{"train.verifier": {"verifier_name_or_path": str(other)}}))


def test_fused_ops_train_along_the_curve_of_the_reference(run: RunConfig, tmp_path: Path) -> None:
    """Far closer to it than another seed is."""
    curves = {}
    for name, impl, seed in (("reference", "reference", 1), ("fused", "fused", 1), ("seed", "reference", 2)):
        config = changed(into(run, tmp_path / name, epochs=4), ops={"impl": impl})
        train(config.model_copy(update={"train": config.train.model_copy(update={"seed": seed})}))
        curves[name] = torch.tensor([value["loss"] for value in metrics(tmp_path / name)])
    select("auto")
    steps = min(map(len, curves.values()))  # another seed packs into another number of batches
    curves = {name: curve[:steps] for name, curve in curves.items()}
    spread = (curves["seed"] - curves["reference"]).abs().max()
    assert (curves["fused"] - curves["reference"]).abs().max() < 0.01 * spread


def test_a_window_of_steps_is_traced(run: RunConfig, tmp_path: Path) -> None:
    train(changed(into(run, tmp_path, max_steps=4), engine={"profile_steps": [2, 3]}))
    (trace,) = (tmp_path / "profile").glob("rank0*.json")
    assert "traceEvents" in json.loads(trace.read_text())
    with pytest.raises(InputError, match=r"profile_steps \[3, 2\]"):
        train(changed(into(run, tmp_path / "other", max_steps=4), engine={"profile_steps": [3, 2]}))
