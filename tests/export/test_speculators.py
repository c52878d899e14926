"""`export`: what the written folder says, what is refused, and that the old folder survives."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3_fast.errors import InputError
from eagle3_fast.export import speculators
from eagle3_fast.export.speculators import export, servable_config, served_flags
from eagle3_fast.model.config import DraftConfig
from eagle3_fast.model.draft import Draft, load_draft, save_draft
from tests.export.drafts import MAP, draft_config, run_config, saved, toy_draft
from tests.export.test_vllm_rules import CASES, edit_config
from tests.export.vllm_rules import ServedDraft
from tests.verifiers import VOCAB, toy_llama, toy_llama_tied


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_llama(tmp_path_factory.mktemp("verifier") / "toy", max_position_embeddings=32768)


@pytest.fixture
def checkpoint(verifier: Path, tmp_path: Path) -> Path:
    return saved(toy_draft(), verifier, tmp_path / "checkpoint")


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_folder_says_everything(verifier: Path, checkpoint: Path, tmp_path: Path) -> None:
    folder = export(run_config(verifier, tmp_path / "out"), checkpoint)
    config, tensors = config_of(folder), load_file(folder / "model.safetensors")
    layer = config["transformer_layer_config"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert config["norm_before_residual"] is True
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert (config["draft_vocab_size"], layer["vocab_size"]) == (len(MAP), VOCAB)
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16, torch.int64, torch.bool}
    assert layer["head_dim"] == 8
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 10000.0
    assert config["tie_word_embeddings"] is layer["tie_word_embeddings"] is False
    assert "model_type" not in config
    assert "quantization_config" not in config
    assert config["speculators_config"]["verifier"] == {"name_or_path": str(verifier), "architectures": ["LlamaForCausalLM"]}
    assert torch.equal(tensors["t2d"].nonzero().flatten(), torch.tensor(MAP))
    assert torch.equal(tensors["d2t"] + torch.arange(len(MAP)), torch.tensor(MAP))


def test_float32_export_keeps_every_bit(verifier: Path, checkpoint: Path, tmp_path: Path) -> None:
    folder = export(run_config(verifier, tmp_path / "out", export={"dtype": "float32"}), checkpoint)
    before, after = load_file(checkpoint / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_draft_is_read_by_the_engine(name: str, verifier: Path, tmp_path: Path) -> None:
    checkpoint = saved(toy_draft(CASES[name]), verifier, tmp_path / "checkpoint")
    ServedDraft(export(run_config(verifier, tmp_path / "out"), checkpoint), VOCAB)


def test_tied_verifier_gives_an_untied_draft(tmp_path: Path) -> None:
    verifier = toy_llama_tied(tmp_path / "tied")
    checkpoint = saved(toy_draft(draft_config({"tie_word_embeddings": True})), verifier, tmp_path / "checkpoint")
    folder = export(run_config(verifier, tmp_path / "out"), checkpoint)
    assert config_of(folder)["transformer_layer_config"]["tie_word_embeddings"] is False
    assert load_file(folder / "model.safetensors")["lm_head.weight"].shape == (len(MAP), 32)


def test_inherited_quantisation_is_dropped(verifier: Path, checkpoint: Path, tmp_path: Path) -> None:
    edit_config(checkpoint, lambda c: c.update(quantization_config={"quant_method": "fp8"}, auto_map={"": "config.X"}))
    edit_config(checkpoint, lambda c: c["transformer_layer_config"].update(quantization_config={"quant_method": "fp8"}))
    config = config_of(export(run_config(verifier, tmp_path / "out"), checkpoint))
    assert "quantization_config" not in config
    assert "auto_map" not in config
    assert "quantization_config" not in config["transformer_layer_config"]


def rotary_table(config: DraftConfig) -> torch.Tensor:
    return torch.stack(Draft(config).rotary(torch.arange(64)))


@pytest.mark.parametrize("kind", ["default", "yarn", "dynamic"])
def test_positions_reach_the_verifier_s_and_rotation_stays(kind: str, verifier: Path, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **({} if kind == "default" else {"factor": 4.0})}
    trained = draft_config({"max_position_embeddings": 2048, "rope_parameters": rope})
    served = servable_config(trained, run_config(verifier, tmp_path))
    assert served.transformer_layer_config.max_position_embeddings == 32768
    assert torch.equal(rotary_table(served), rotary_table(trained))


def test_more_positions_than_the_verifier_s_are_kept(verifier: Path, tmp_path: Path) -> None:
    served = servable_config(draft_config({"max_position_embeddings": 65536}), run_config(verifier, tmp_path))
    assert served.transformer_layer_config.max_position_embeddings == 65536


def test_four_aux_layers_are_counted_where_the_llama_loader_looks(verifier: Path, tmp_path: Path) -> None:
    checkpoint = saved(toy_draft(CASES["four_aux"]), verifier, tmp_path / "checkpoint")
    config = config_of(export(run_config(verifier, tmp_path / "out"), checkpoint))
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 4


def test_layers_come_from_the_run_file_where_the_checkpoint_is_silent(verifier: Path, checkpoint: Path, tmp_path: Path) -> None:
    edit_config(checkpoint, lambda c: c.update(eagle_aux_hidden_state_layer_ids=None))
    with pytest.raises(InputError, match=r"set train.draft.target_layer_ids .*\[3, 4, 4\]"):
        export(run_config(verifier, tmp_path / "out"), checkpoint)
    folder = export(run_config(verifier, tmp_path / "out", train={"draft": {"target_layer_ids": [3, 4, 5]}}), checkpoint)
    assert config_of(folder)["eagle_aux_hidden_state_layer_ids"] == [3, 4, 5]


@pytest.mark.parametrize(
    ("config", "train", "message"),
    [
        (draft_config(), {"draft": {"target_layer_ids": [1, 2, 3]}}, "the checkpoint was trained on"),
        (draft_config(eagle_aux_hidden_state_layer_ids=[1, 2, 7]), {}, "aux layer 7 does not exist: the verifier has 6 layers"),
        (draft_config({"vocab_size": 65}), {}, "verifier of vocabulary 65"),
        (draft_config(target_hidden_size=16), {}, "verifier of hidden size 16"),
    ],
)
def test_refuses_a_draft_of_another_verifier(config: DraftConfig, train: Any, message: str, verifier: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        servable_config(config, run_config(verifier, tmp_path, train=train))


def test_warns_about_cache_shape_and_flags(verifier: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = saved(toy_draft(draft_config({"num_key_value_heads": 4})), verifier, tmp_path / "checkpoint")
    edit_config(checkpoint, lambda c: c.update(fuse_everything=True))
    with caplog.at_level(logging.WARNING, "eagle3_fast"):
        export(run_config(verifier, tmp_path / "out"), checkpoint)
    assert "(4 heads x 8) differs from the verifier's (2 x 8)" in caplog.text
    assert "norm_before_fc, norm_output: followed by vLLM 0.32" in caplog.text
    assert "fuse_everything: no engine is known" in caplog.text
    assert "local folder" in caplog.text
    assert "embedding is not" not in caplog.text


def test_flags_of_each_case() -> None:
    assert served_flags(CASES["plain"]) == []
    assert served_flags(CASES["fc_norm"]) == ["norm_before_residual", "fc_norm", "norm_output"]
    assert "qwen3" in served_flags(CASES["qwen3"])
    assert "sliding_window" in served_flags(CASES["window"])


def test_warns_about_another_embedding(verifier: Path, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rotated residual stream shows in the embedding first."""
    other = toy_llama(tmp_path / "other", seed=1)
    with caplog.at_level(logging.WARNING, "eagle3_fast"):
        export(run_config(other, tmp_path / "out"), checkpoint)
    assert "embedding is not that of" in caplog.text


def test_a_failed_check_leaves_the_old_folder(verifier: Path, checkpoint: Path, tmp_path: Path) -> None:
    run = run_config(verifier, tmp_path / "out")
    folder = export(run, checkpoint)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    draft = load_draft(checkpoint)
    with torch.no_grad():
        draft.fc.weight[0, 0] = torch.nan
    save_draft(draft, checkpoint, torch.float32)
    with pytest.raises(InputError, match=f"export of {checkpoint}: fc.weight has values that are not finite"):
        export(run, checkpoint)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "out"]


def test_an_interrupted_export_leaves_the_old_folder(
    verifier: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_config(verifier, tmp_path / "out")
    before = (export(run, checkpoint) / "model.safetensors").read_bytes()
    save_draft(toy_draft(seed=1), checkpoint, torch.float32)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(speculators, "check", killed)
    with pytest.raises(KeyboardInterrupt):
        export(run, checkpoint)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    monkeypatch.undo()
    assert (export(run, checkpoint) / "model.safetensors").read_bytes() != before


def test_refuses_to_replace_what_it_did_not_write(verifier: Path, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is the checkpoint itself"):
        export(run_config(verifier, checkpoint), checkpoint)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match=r"holds thesis\.tex"):
        export(run_config(verifier, tmp_path / "mine"), checkpoint)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"
