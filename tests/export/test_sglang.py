"""The folder for SGLang under SGLang's own reading rules gives what the trainer's draft gives; the rest is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from eagle3_fast import cli
from eagle3_fast.errors import InputError
from eagle3_fast.export.engines import engine_ids
from eagle3_fast.export.sglang import check_flat, export, flat_name, own_name
from eagle3_fast.extract.verifier import Verifier
from eagle3_fast.model.config import DraftConfig
from eagle3_fast.model.draft import Draft, load_draft, save_draft
from eagle3_fast.train.start import start_draft
from tests.export.drafts import LAYER, LLAMA3, MAP, draft_config, run_config, saved, toy_draft
from tests.export.sglang_rules import ServedDraft
from tests.export.test_vllm_rules import PLAIN, ROWS, assert_computes_as, edit_config, edit_tensors, inputs, own_logits
from tests.verifiers import VOCAB, stored_weights, toy_glm5, toy_llama


def plain(layer: dict[str, Any] | None = None, **flags: Any) -> DraftConfig:
    return draft_config(layer, **{**PLAIN, **flags})


CASES: dict[str, DraftConfig] = {
    "plain": plain(),
    "norm_before_fc": plain(norm_before_fc=True),
    "fc_norm": plain(fc_norm=True),
    "norm_output": plain(norm_output=True),
    "two_layers": plain({"num_hidden_layers": 2}),
    "no_groups": plain({"num_key_value_heads": 4}),
    "full_vocabulary": plain(draft_vocab_size=VOCAB),
    "four_aux": plain(eagle_aux_hidden_state_layer_ids=[1, 2, 4, 5]),
    "narrow_draft": plain({"hidden_size": 16}, target_hidden_size=32),
    "llama3_rope": plain({"rope_parameters": LLAMA3}),
}


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_llama(tmp_path_factory.mktemp("verifier") / "toy", max_position_embeddings=32768)


def exported(draft: Draft, verifier: Path, folder: Path) -> Path:
    run = run_config(verifier, folder / "out", export={"dtype": "float32", "format": "sglang"})
    return export(run, saved(draft, verifier, folder / "checkpoint"))


def served(folder: Path, verifier: Path, **about: Any) -> ServedDraft:
    return ServedDraft(folder, stored_weights(verifier)["model.embed_tokens.weight"], **about)


@pytest.mark.parametrize("name", CASES)
def test_engine_computes_what_the_trainer_computes(name: str, verifier: Path, tmp_path: Path) -> None:
    draft = toy_draft(CASES[name])
    assert_computes_as(served(exported(draft, verifier, tmp_path), verifier), draft)


def test_folder_says_everything(verifier: Path, tmp_path: Path) -> None:
    folder = exported(toy_draft(plain({"rope_parameters": LLAMA3})), verifier, tmp_path)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert "embed_tokens.weight" not in tensors
    assert {name.partition(".")[0] for name in tensors} == {"midlayer", "fc", "norm", "lm_head", "d2t", "t2d"}
    assert torch.equal(tensors["d2t"] + torch.arange(len(MAP)), torch.tensor(MAP))
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCAB, len(MAP))
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "use_aux_hidden_state": True}
    assert config["rope_scaling"]["type"] == config["rope_scaling"]["rope_type"] == "llama3"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500000.0
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["max_position_embeddings"] == 32768
    assert not {"target_hidden_size", "layer_types", "num_aux_hidden_states", "norm_output"} & config.keys()
    read = AutoConfig.from_pretrained(folder)
    assert {key: read.rope_parameters[key] for key in LLAMA3} == LLAMA3
    assert read.draft_vocab_size == len(MAP)


def test_chain_of_drafts_is_the_trainer_s(verifier: Path, tmp_path: Path) -> None:
    """Behind its cache, token by token, as the engine decodes."""
    draft = toy_draft(plain())
    engine = served(exported(draft, verifier, tmp_path), verifier)
    tokens, aux = inputs(draft)
    drafted = engine.draft(torch.cat((torch.tensor([0]), tokens)), aux, 4)
    with torch.no_grad():
        hidden = draft.double().fuse(aux)
    expected = []
    for _ in drafted:  # the trainer's draft in one pass over all rows: those of drafts read the state that the row before gave
        logits, after = own_logits(draft, tokens, hidden)
        expected.append(int(logits[-1].argmax()))
        tokens, hidden = torch.cat((tokens, torch.tensor(expected[-1:]))), torch.cat((hidden, after[-1:]))
    assert drafted == expected
    assert set(drafted) <= set(MAP)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (plain(norm_before_residual=True), r"norm_before_residual: train with train\.draft\.norm_before_residual=false"),
        (draft_config(), r"train\.draft\.norm_before_residual=false"),
        (plain({"layer_types": ["sliding_attention"], "sliding_window": 4}), r"train\.draft\.full_attention_indices"),
        (plain({"model_type": "qwen3"}), r"train\.draft\.draft_arch=llama"),
        (plain({"attention_bias": True}), "attention_bias"),
        (plain({"mlp_bias": True}), "mlp_bias"),
        (plain({"rope_parameters": {**LAYER["rope_parameters"], "partial_rotary_factor": 0.5}}), "partial_rotary_factor"),
        (plain(eagle_aux_hidden_state_layer_ids=[0, 1, 4]), r"train\.draft\.target_layer_ids"),
        (plain(eagle_aux_hidden_state_layer_ids=[1, 2, 6]), r"train\.draft\.target_layer_ids"),
        (plain(eagle_aux_hidden_state_layer_ids=[3]), r"SGLang leaves out fc: .*train\.draft\.target_layer_ids"),
    ],
)
def test_refuses_what_the_engine_would_compute_otherwise(config: DraftConfig, message: str, verifier: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        exported(toy_draft(config), verifier, tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_refuses_an_embedding_that_the_engine_would_replace(verifier: Path, tmp_path: Path) -> None:
    save_draft(toy_draft(plain()), tmp_path / "checkpoint", torch.float32)
    with pytest.raises(InputError, match="embedding is not the verifier's"):
        export(run_config(verifier, tmp_path / "out"), tmp_path / "checkpoint")


def test_says_since_when_flags_are_followed(verifier: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "eagle3_fast"):
        exported(toy_draft(plain(norm_before_fc=True, norm_output=True)), verifier, tmp_path)
    assert "norm_before_fc: followed by SGLang 0.5.18" in caplog.text
    assert "norm_output: followed by SGLang 0.5.12" in caplog.text


@pytest.mark.parametrize("change", ["lm_head.weight", "midlayer.hidden_norm.weight", "fc.weight", "d2t", "layers.1.x.weight"])
def test_reader_and_check_refuse_missing_and_extra_tensors(change: str, verifier: Path, tmp_path: Path) -> None:
    folder = exported(toy_draft(plain()), verifier, tmp_path)
    edit_tensors(folder, lambda tensors: tensors.pop(change, None) is None and tensors.update({change: torch.ones(1)}))
    with pytest.raises(ValueError, match=change.replace("midlayer", "(midlayer|layers.0)")):
        served(folder, verifier)
    with pytest.raises(InputError, match=change.replace("midlayer", "(midlayer|layers.0)")):
        check_flat(folder, run_config(verifier, folder))


def test_check_refuses_another_dtype_and_values_that_are_not_finite(verifier: Path, tmp_path: Path) -> None:
    folder = exported(toy_draft(plain()), verifier, tmp_path)
    edit_config(folder, lambda config: config.update(dtype="bfloat16"))
    edit_tensors(folder, lambda tensors: tensors["fc.weight"].fill_(torch.nan))
    with pytest.raises(InputError, match=r"fc\.weight has values.*tensors are float32, config\.json says bfloat16"):
        check_flat(folder, run_config(verifier, folder))


def test_failed_export_leaves_the_old_folder(verifier: Path, tmp_path: Path) -> None:
    before = (exported(toy_draft(plain()), verifier, tmp_path) / "model.safetensors").read_bytes()
    broken = toy_draft(plain(), seed=1)
    broken.fc.weight.data[0, 0] = torch.nan
    with pytest.raises(InputError, match=f"export of {tmp_path / 'checkpoint'}: fc.weight has values that are not finite"):
        exported(broken, verifier, tmp_path)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "out"]


def test_names_go_there_and_back() -> None:
    draft = toy_draft(plain({"num_hidden_layers": 2}, fc_norm=True))
    for name in draft.exported_tensors(torch.float32):
        assert own_name(flat_name(name)) == own_name("model." + flat_name(name)) == name
    assert flat_name("layers.1.input_layernorm.weight") == "layers.1.hidden_norm.weight"
    assert flat_name("layers.0.input_layernorm.weight") == "midlayer.input_layernorm.weight"


def test_format_is_chosen_by_flag_and_by_run_file(
    verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("eagle3_fast.train.checkpoint.servable_checkpoint", lambda _: tmp_path / "checkpoint")
    saved(toy_draft(plain()), verifier, tmp_path / "checkpoint")
    text = f"train: {{verifier: {{verifier_name_or_path: {verifier}}}}}\nexport: {{output: {tmp_path / 'out'}}}\n"
    (tmp_path / "run.yaml").write_text(text)
    command = ["export", "--config", str(tmp_path / "run.yaml")]
    for extra, architecture in ((["--format", "sglang"], "LlamaForCausalLMEagle3"), ([], "Eagle3DraftModel")):
        assert cli.main([*command, *extra]) == 0
        assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [architecture]
    assert cli.main([*command, "export.format=sglangg"]) == 2
    assert "export.format" in capsys.readouterr().err


# --- the whole chain ---------------------------------------------------------------------------------------------------


def captured_by_engine(verifier: Verifier, tokens: Tensor, layers: list[int]) -> Tensor:
    """SGLang's rule: what enters each of these layers. [T, len(layers) * G]."""
    entering: dict[int, Tensor] = {}
    handles = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, i=i: entering.update({i: (args or tuple(kwargs.values()))[0][0]}), with_kwargs=True
        )
        for i, layer in enumerate(verifier.model.model.layers)
    ]
    with torch.no_grad():
        verifier.model(input_ids=tokens[None])
    for handle in handles:
        handle.remove()
    return torch.cat([entering[i] for i in layers], -1)


@pytest.mark.parametrize(("write", "kind"), [(toy_llama, "llama"), (toy_glm5, "glm_moe_dsa")])
def test_from_the_verifier_to_served_drafts(write: Any, kind: str, tmp_path: Path) -> None:
    """Draft started on the verifier, saved, exported, and served on the states that the engine itself captures."""
    path = write(tmp_path / "verifier")
    shape = {"target_layer_ids": [2, 3, 5], "norm_before_residual": False, "full_attention_indices": [0]}
    train = {"draft": shape, "data": {"hidden_states_dtype": "float32"}}
    run = run_config(path, tmp_path / "out", train=train, export={"dtype": "float32", "format": "sglang"})
    save_draft(start_draft(run), tmp_path / "checkpoint", torch.float32)
    folder = export(run, tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == engine_ids([2, 3, 5], 6, "SGLang", kind) == [1, 2, 4]
    engine = served(folder, path, verifier_type=kind)

    verifier = Verifier(path, [2, 3, 5], torch.float32)
    tokens = torch.arange(3, 3 + ROWS + 1)
    aux = captured_by_engine(verifier, tokens, engine.captured)[:-1]
    torch.testing.assert_close(aux, verifier.hidden_states([tokens])[0][:-1, :-1].flatten(1), rtol=0, atol=1e-6)
    draft = load_draft(tmp_path / "checkpoint").double()
    with torch.no_grad():
        hidden = draft.fuse(aux.double())
    logits, _ = engine.forward(tokens[1:], engine.combine(aux), torch.arange(ROWS))
    torch.testing.assert_close(logits, own_logits(draft, tokens[1:], hidden)[0], rtol=1e-5, atol=1e-5)
    assert len(engine.draft(tokens, aux, 3)) == 3


def test_reader_notices_another_computation(verifier: Path, tmp_path: Path) -> None:
    """A draft whose flag the engine ignores gives other logits: what the refusals are for."""
    draft = toy_draft(plain(norm_before_fc=True))
    folder = exported(draft, verifier, tmp_path)
    edit_config(folder, lambda config: (config["eagle_config"].pop("norm_before_fc"), config.pop("norm_before_fc")))
    edit_tensors(folder, lambda tensors: tensors.pop("input_norm.weight"))
    _, aux = inputs(draft)
    with torch.no_grad():
        assert not torch.allclose(served(folder, verifier).combine(aux), draft.double().fuse(aux), atol=1e-2)


def test_sglang_takes_no_other_verifier(verifier: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="verifier of vocabulary 65"):
        exported(toy_draft(plain({"vocab_size": 65})), verifier, tmp_path)
