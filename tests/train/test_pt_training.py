"""Training on a folder of `.pt` samples of speculators 0.3 to 0.7, as it lies: the same training as on prepared rows."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from extract.pt_files import fields
from safetensors.torch import load_file
from train.runs import changed, prepared_run
from train.test_norm_rule import normed

from eagle3_fast.cli import main
from eagle3_fast.config import RunConfig, run_file
from eagle3_fast.errors import InputError
from eagle3_fast.prepare.dataset import open_prepared
from eagle3_fast.prepare.vocab import load_mapping
from eagle3_fast.records import HiddenStates
from eagle3_fast.train.loader import PackedRows
from eagle3_fast.train.trainer import Trainer, train

ROWS = 30


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> RunConfig:
    """Prepared rows; 0.3's samples of them lie in v0/ and v1/ beside."""
    folder = tmp_path_factory.mktemp("run")
    config = prepared_run(folder, toy, chats=ROWS)
    rows = open_prepared(config.train.data.data_path)
    for row in range(len(rows)):
        tensors, mask = load_file(config.hidden_states_path / f"hs_{row}.safetensors"), torch.tensor(rows[row]["loss_mask"])
        for version in (0, 1):
            states = tensors["hidden_states"] if version else normed(tensors["hidden_states"], toy)
            (folder / f"v{version}").mkdir(exist_ok=True)
            torch.save(fields(HiddenStates(tensors["token_ids"], states), mask, version), folder / f"v{version}" / f"data_{row}.pt")
    for version in (0, 1):
        shutil.copy(folder / "data" / "token_freq.pt", folder / f"v{version}")
    return config


def on_samples(run: RunConfig, folder: Path, version: int = 1, **engine: object) -> RunConfig:
    """The run on a copy of its `.pt` samples, into folder/checkpoints."""
    shutil.copytree(Path(run.train.data.data_path).parent / f"v{version}", folder / "samples")
    config = changed(run, engine={"data_format_version": version, **engine})
    return changed(
        config,
        **{"train.data": {"data_path": str(folder / "samples")}, "train.trainer": {"save_path": str(folder / "checkpoints")}},
    )


def losses(folder: Path) -> list[float]:
    return [value["loss"] for value in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


@pytest.mark.parametrize("version", [0, 1])
def test_it_is_the_training_on_prepared_rows(run: RunConfig, tmp_path: Path, version: int) -> None:
    """Format 1 to the bit. Format 0 norms before it stores instead of in the step; either way the verifier's distribution is one."""
    train(changed(run, **{"train.trainer": {"save_path": str(tmp_path / "prepared")}}))
    train(on_samples(run, tmp_path, version))
    expected, found = losses(tmp_path / "prepared"), losses(tmp_path / "checkpoints")
    assert found == (expected if version else pytest.approx(expected, rel=1e-3))
    assert len(found) > 8


def test_the_command_of_0_3_goes_on(run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its flags, its two mapping files, its data; only the release and, for so shallow a verifier, the layers are said besides."""
    mapping = load_mapping(on_samples(run, tmp_path, 0), 64)
    assert mapping is not None
    np.save(tmp_path / "d2t.npy", mapping.d2t.numpy())
    np.save(tmp_path / "t2d.npy", mapping.t2d.numpy())
    words = ["--verifier-name-or-path", run.train.verifier.verifier_name_or_path, "--data-path", str(tmp_path / "samples")]
    words += ["--save-path", str(tmp_path / "checkpoints"), "--epochs", "1", "--total-seq-len", "160"]
    words += ["--d2t-path", str(tmp_path / "d2t.npy"), "--t2d-path", str(tmp_path / "t2d.npy"), "--target-layer-ids", "1", "3", "5"]
    command = ["train", 'engine.compat="0.3"', *words]
    assert main([*command, "--data-format-version", "0"]) == 0
    written = json.loads((tmp_path / "checkpoints" / "0" / "config.json").read_text())
    assert written["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5] and written["draft_vocab_size"] == 24
    assert main(command) == 2
    assert "--data-format-version 0" in capsys.readouterr().err


def test_the_draft_says_which_layers_the_data_holds(run: RunConfig, tmp_path: Path) -> None:
    config = on_samples(run, tmp_path)
    config = changed(config, **{"train.draft": {"target_layer_ids": None}, "train.trainer": {"max_steps": 1}})
    with pytest.raises(InputError, match=r"would be \[3, 4, 4\] by default"):
        Trainer(config)
    description = tmp_path / "samples" / "data_config.json"
    description.write_text(json.dumps({"version": "2.0", "hidden_states": {"layer_ids": [0, 2, 4, 5]}}))
    train(config)
    written = json.loads((tmp_path / "checkpoints" / "0" / "config.json").read_text())
    assert written["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    with pytest.raises(InputError, match=r"the states are those after layers \[1, 3, 5\]"):
        Trainer(changed(config, **{"train.draft": {"target_layer_ids": [2, 3, 5]}}))
    pretrained = changed(run, **{"train.draft": {"from_pretrained": str(tmp_path / "checkpoints" / "0"), "target_layer_ids": None}})
    config = changed(pretrained, **{"train.data": {"data_path": str(tmp_path / "samples")}})
    Trainer(changed(config, **{"train.trainer": {"save_path": str(tmp_path / "third")}}))
    description.write_text(json.dumps({"version": "2.0", "hidden_states": {"layer_ids": [0, 1, 4, 5]}}))
    with pytest.raises(InputError, match=r"after layers \[1, 2, 5\], the draft reads layers \[1, 3, 5\]"):
        Trainer(changed(config, **{"train.trainer": {"save_path": str(tmp_path / "third")}}))


def test_a_config_of_0_3_gets_the_layers_of_its_data(run: RunConfig, tmp_path: Path) -> None:
    config = on_samples(run, tmp_path)
    train(changed(config, **{"train.trainer": {"max_steps": 1}}))
    old = tmp_path / "checkpoints" / "0" / "config.json"
    old.write_text(json.dumps(json.loads(old.read_text()) | {"eagle_aux_hidden_state_layer_ids": None}))
    (tmp_path / "samples" / "data_config.json").write_text(json.dumps({"hidden_states": {"layer_ids": [0, 2, 4, 5]}}))
    warm = {"from_pretrained": str(old.parent), "target_layer_ids": None}
    trainer = Trainer(changed(config, **{"train.draft": warm, "train.trainer": {"save_path": str(tmp_path / "second")}}))
    assert trainer.engine.draft.config.eagle_aux_hidden_state_layer_ids == [1, 3, 5]


def test_a_format_that_the_files_do_not_have(run: RunConfig, tmp_path: Path) -> None:
    for version in (0, 1):
        config = changed(on_samples(run, tmp_path / str(version), version), engine={"data_format_version": 1 - version})
        with pytest.raises(InputError, match=rf"is of format {version}, engine.data_format_version is {1 - version}"):
            Trainer(config)


@pytest.mark.parametrize("fault", ["cut", "not finite", "width", "layers", "token", "code"])
def test_one_unusable_file(run: RunConfig, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    from extract.test_pt_samples import Harmful

    config = changed(on_samples(run, tmp_path), **{"train.trainer": {"epochs": 1}})
    victim = tmp_path / "samples" / "data_5.pt"
    content = torch.load(victim)
    if fault == "cut":
        victim.write_bytes(victim.read_bytes()[:-100])
    else:
        content["hidden_states"][1][2, 3] = torch.nan if fault == "not finite" else 1.0
        if fault == "width":
            content["hidden_states"] = [layer[:, :16].clone() for layer in content["hidden_states"]]
        if fault == "layers":
            content["hidden_states"] = content["hidden_states"][1:]
        if fault == "token":
            content["input_ids"][2] = 64
        torch.save(content | ({"more": Harmful(tmp_path / "ran")} if fault == "code" else {}), victim)
    named = "row 5" if fault in ("width", "token") else "data_5.pt"
    with pytest.raises(InputError, match=named) as caught:
        train(config)
    assert "\n" not in str(caught.value)
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    config = changed(config, **{"train.generation": {"on_missing": "skip"}})
    if fault == "code":
        with pytest.raises(InputError, match="would run code"):
            train(config)
        assert not (tmp_path / "ran").exists()
        return
    train(config)
    lines = [json.loads(line) for line in (tmp_path / "checkpoints" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["skipped_samples"] for line in lines if line["split"] == "train") == 1
    assert named in caplog.text


def test_who_validates(run: RunConfig, tmp_path: Path) -> None:
    """Under 0.3 its shuffled list, otherwise the last files by name."""

    def names(config: RunConfig) -> list[str]:
        trainer = Trainer(config)
        rows: PackedRows = trainer.loader.rows
        return [path.name for path in rows.rows.files[trainer.validation.split.first :]]

    config = on_samples(run, tmp_path)
    assert names(config) == [f"data_{row}.pt" for row in range(24, ROWS)]
    old = names(changed(config, engine={"compat": "0.3", "verifier_norm": True}))
    files = [f"data_{row}.pt" for row in range(ROWS)]
    random.Random(0).shuffle(files)
    assert old == files[24:] != names(config)


def test_its_tokens_can_be_trained_on_fresh_states(run: RunConfig, tmp_path: Path) -> None:
    """States of format 0 are of no use for a norm that is wanted; the tokens are."""
    config = changed(on_samples(run, tmp_path, 0), engine={"verifier_norm": True}, **{"train.trainer": {"epochs": 1}})
    train(config, online=True)
    train(changed(run, **{"train.trainer": {"epochs": 1, "save_path": str(tmp_path / "stored")}}))
    assert losses(tmp_path / "checkpoints") == pytest.approx(losses(tmp_path / "stored"), rel=2e-3)


def test_other_verbs(run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = on_samples(run, tmp_path)
    (tmp_path / "run.yaml").write_text(run_file(config))
    (tmp_path / "prepared.yaml").write_text(run_file(run))
    for name in ("prepared", "run"):
        assert main(["show-mask", "--config", str(tmp_path / f"{name}.yaml"), "--row", "7"]) == 0
    shown = capsys.readouterr().out
    assert shown[: len(shown) // 2] == shown[len(shown) // 2 :]
    assert main(["extract", "--config", str(tmp_path / "run.yaml")]) == 2
    assert "holds .pt samples of speculators" in capsys.readouterr().err
