"""`convert`: drafts of other trainers, written here by hand in their own layouts, keep their logits; nothing is dropped or guessed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_fast import cli
from eagle3_fast.errors import InputError
from eagle3_fast.export import convert as module
from eagle3_fast.export.check import check
from eagle3_fast.export.convert import convert
from eagle3_fast.model.draft import Draft, load_draft, save_draft
from tests.export.drafts import LAYER, LLAMA3, MAP, draft_config, saved, toy_draft
from tests.export.sglang_rules import ServedDraft as BySGLang
from tests.export.test_vllm_rules import PLAIN, ROWS, edit_config, own_logits
from tests.export.vllm_rules import ServedDraft as ByVLLM
from tests.verifiers import VOCAB, stored_weights, toy_glm5, toy_llama, toy_llama_tied

LAYERS = 8  # of the verifier; its default aux layers are 2, 4, 5
FLAT = {key: value for key, value in LAYER.items() if key not in ("rope_parameters", "head_dim")}
FLAT |= {"draft_vocab_size": len(MAP), "rope_theta": 10000.0, "torch_dtype": "float32", "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_llama(tmp_path_factory.mktemp("verifier") / "toy", num_hidden_layers=LAYERS)


def embedding(verifier: Path) -> Tensor:
    return stored_weights(verifier)["model.embed_tokens.weight"]


def random_tensors(vocab: int = len(MAP), width: int = 3 * 32, seed: int = 0) -> dict[str, Tensor]:
    """Everything that SafeAILab's draft stores, under its names."""
    shapes = {"fc": (32, width), "norm": (32,), "lm_head": (vocab, 32)}
    shapes |= {f"midlayer.self_attn.{part}": shape for part, shape in {"q_proj": (32, 64), "k_proj": (16, 64)}.items()}
    shapes |= {"midlayer.self_attn.v_proj": (16, 64), "midlayer.self_attn.o_proj": (32, 32)}
    shapes |= {"midlayer.mlp.gate_proj": (48, 32), "midlayer.mlp.up_proj": (48, 32), "midlayer.mlp.down_proj": (32, 48)}
    shapes |= {f"midlayer.{norm}": (32,) for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"{name}.weight": torch.rand(shape, generator=generator) - 0.5 * (len(shape) > 1) for name, shape in shapes.items()}
    ids = torch.tensor(MAP)
    return {**tensors, "d2t": ids - torch.arange(len(MAP)), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)}


def write(folder: Path, tensors: dict[str, Tensor], file: str = "model.safetensors", **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**FLAT, "architectures": ["LlamaForCausalLMEagle3"], **config}))
    if file == "pytorch_model.bin":
        torch.save(tensors, folder / file)
    elif file == "shards":
        names = sorted(tensors)
        parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
        for part, own in parts.items():
            save_file({name: tensors[name] for name in own}, folder / part)
        index = {"weight_map": {name: part for part, own in parts.items() for name in own}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(tensors, folder / file)
    return folder


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As newer SGLang spells them."""
    return {name if name in ("d2t", "t2d") else f"model.{name}".replace("midlayer", "layers.0"): t for name, t in tensors.items()}


def reference(tensors: dict[str, Tensor], embed: Tensor, folder: Path, **config: Any) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, aux and what SGLang's rules compute from the source's own tensors."""
    kept = {name: tensor for name, tensor in tensors.items() if "inv_freq" not in name and "embed" not in name}
    source = write(folder, kept, **{"head_dim": 8, "rope_scaling": None, **config})
    engine = BySGLang(source, embed, layers=LAYERS)
    generator = torch.Generator().manual_seed(1)
    tokens, aux = torch.randint(VOCAB, (ROWS,), generator=generator), torch.randn(ROWS, 96, generator=generator)
    return tokens, aux, engine.forward(tokens, engine.combine(aux), torch.arange(ROWS))[0]


STYLES: dict[str, tuple[str, dict[str, Any]]] = {
    "safeailab": ("pytorch_model.bin", {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}),
    "specforge": ("model.safetensors", {}),
    "sglang": (
        "shards",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}, "head_dim": 8},
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_a_draft_of_another_trainer_keeps_its_logits_in_vllm(style: str, verifier: Path, tmp_path: Path) -> None:
    file, config = STYLES[style]
    tensors = random_tensors()
    tokens, aux, expected = reference(tensors, embedding(verifier), tmp_path / "reference")
    stored = {
        "safeailab": {**tensors, "midlayer.self_attn.rotary_emb.inv_freq": 10000.0 ** (-torch.arange(4) / 4)},
        "specforge": {**tensors, "embed_tokens.weight": embedding(verifier)},
        "sglang": renamed(tensors),
    }[style]
    folder = convert(write(tmp_path / "source", stored, file, **config), tmp_path / "out", str(verifier), "speculators")
    engine = ByVLLM(folder, VOCAB)
    assert engine.aux_ids == [2, 4, 5]
    assert engine.residual_is_normed is False
    torch.testing.assert_close(engine.forward(tokens, engine.combine(aux), torch.arange(ROWS))[0], expected)
    assert check(folder).dtype == "float32"
    assert torch.equal(load_file(folder / "model.safetensors")["embed_tokens.weight"], embedding(verifier))


@pytest.mark.parametrize("style", STYLES)
def test_there_and_back_keeps_every_tensor(style: str, verifier: Path, tmp_path: Path) -> None:
    file, config = STYLES[style]
    tensors = {name: t.half() if t.is_floating_point() else t for name, t in random_tensors().items()}
    source = write(tmp_path / "source", renamed(tensors) if style == "sglang" else tensors, file, **config)
    there = convert(source, tmp_path / "there", str(verifier), "speculators")
    back = convert(there, tmp_path / "back", str(verifier), "sglang")
    found = load_file(back / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert BySGLang(back, embedding(verifier), layers=LAYERS).captured == [2, 4, 5]


@pytest.mark.parametrize("to", ["speculators", "sglang"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "type", "rope_parameters", "both"])
def test_rotary_scaling_is_kept_in_every_spelling(spelling: str, to: Any, verifier: Path, tmp_path: Path) -> None:
    old = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    typed = {**{key: value for key, value in old.items() if key != "rope_type"}, "type": "llama3"}
    config: dict[str, Any] = {
        "rope_scaling": {"rope_scaling": old, "rope_theta": 500000.0},
        "type": {"rope_scaling": typed, "rope_theta": 500000.0},
        "rope_parameters": {"rope_parameters": LLAMA3, "rope_theta": None},
        "both": {"rope_parameters": LLAMA3, "rope_scaling": old, "rope_theta": 500000.0},
    }[spelling]
    tensors = random_tensors()
    tokens, aux, expected = reference(tensors, embedding(verifier), tmp_path / "reference", rope_parameters=LLAMA3, rope_theta=None)
    folder = convert(write(tmp_path / "source", tensors, **config), tmp_path / "out", str(verifier), to)
    if to == "sglang":
        engine = BySGLang(folder, embedding(verifier), layers=LAYERS)
        found = engine.forward(tokens, engine.combine(aux), torch.arange(ROWS))[0]
    else:
        draft = load_draft(folder).double()
        with torch.no_grad():
            found = own_logits(draft, tokens, draft.fuse(aux.double()))[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_whole_vocabulary_has_no_mapping(mapped: bool, verifier: Path, tmp_path: Path) -> None:
    tensors = random_tensors(VOCAB)
    del tensors["d2t"], tensors["t2d"]
    trivial = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)} if mapped else {}
    source = write(tmp_path / "source", {**tensors, **trivial}, draft_vocab_size=VOCAB)
    found = load_file(convert(source, tmp_path / "out", str(verifier), "speculators") / "model.safetensors")
    assert not {"d2t", "t2d"} & found.keys()
    assert torch.equal(found["lm_head.weight"], tensors["lm_head.weight"])


def test_t2d_follows_from_d2t_and_narrow_integers_are_widened(verifier: Path, tmp_path: Path) -> None:
    tensors = random_tensors()
    t2d = tensors.pop("t2d")
    source = write(tmp_path / "source", {**tensors, "d2t": tensors["d2t"].int()})
    found = load_file(convert(source, tmp_path / "out", str(verifier), "speculators") / "model.safetensors")
    assert torch.equal(found["t2d"], t2d)
    assert found["d2t"].dtype == torch.int64


@pytest.mark.parametrize(("tied", "size"), [(True, VOCAB), (False, None)])
def test_a_head_that_is_not_stored_is_the_one_the_config_means(tied: bool, size: int | None, tmp_path: Path) -> None:
    verifier = toy_llama(tmp_path / "verifier", num_hidden_layers=LAYERS)
    tensors = {name: t for name, t in random_tensors(VOCAB).items() if name not in ("d2t", "t2d", "lm_head.weight")}
    source = write(tmp_path / "source", tensors, tie_word_embeddings=tied, draft_vocab_size=size)
    folder = convert(source, tmp_path / "out", str(verifier), "speculators")
    expected = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert torch.equal(load_file(folder / "model.safetensors")["lm_head.weight"], stored_weights(verifier)[expected])
    assert json.loads((folder / "config.json").read_text())["transformer_layer_config"]["tie_word_embeddings"] is False


def test_an_inherited_tie_does_not_replace_a_stored_head(tmp_path: Path) -> None:
    verifier = toy_llama_tied(tmp_path / "verifier", num_hidden_layers=LAYERS)
    tensors = random_tensors()
    folder = convert(write(tmp_path / "source", tensors, tie_word_embeddings=True), tmp_path / "out", str(verifier), "sglang")
    assert torch.equal(load_file(folder / "model.safetensors")["lm_head.weight"], tensors["lm_head.weight"])


def test_old_and_new_norm_names(verifier: Path, tmp_path: Path) -> None:
    norms = {f"aux_norm_{level}.weight": torch.rand(32) for level in ("low", "mid", "high")}
    source = write(tmp_path / "source", {**random_tensors(), **norms}, use_aux_norm=True, norm_output=True)
    folder = convert(source, tmp_path / "out", str(verifier), "speculators")
    found = load_file(folder / "model.safetensors")
    assert [torch.equal(found[f"fc_norm.{i}.weight"], norm) for i, norm in enumerate(norms.values())] == [True] * 3
    assert load_draft(folder).config.norm_output is True


def test_speculators_without_an_embedding_is_completed(verifier: Path, tmp_path: Path) -> None:
    draft: Draft = toy_draft(draft_config(**PLAIN))
    source = saved(draft, verifier, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, source / "model.safetensors")
    folder = convert(source, tmp_path / "out", str(verifier), "sglang")
    assert BySGLang(folder, embedding(verifier), layers=LAYERS).captured == [1, 2, 4]


def test_layers_on_which_releases_disagree_are_asked_for(tmp_path: Path) -> None:
    verifier = toy_glm5(tmp_path / "glm5", num_hidden_layers=LAYERS)
    source = write(tmp_path / "source", random_tensors(), eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    with pytest.raises(InputError, match="--aux-layer-ids"):
        convert(source, tmp_path / "out", str(verifier), "speculators")
    folder = convert(source, tmp_path / "out", str(verifier), "speculators", [3, 5, 6])
    assert load_draft(folder).config.eagle_aux_hidden_state_layer_ids == [3, 5, 6]


FAULTS: dict[str, tuple[dict[str, Tensor | None], dict[str, Any], str]] = {
    "unknown tensor": ({"midlayer.extra.weight": torch.ones(1)}, {}, r"midlayer\.extra\.weight: no place in an EAGLE-3 draft"),
    "bias of fc": ({"fc.bias": torch.ones(32)}, {"bias": True}, r"fc\.bias: no place"),
    "quantised": ({"midlayer.self_attn.q_proj.weight_scale": torch.ones(1)}, {}, r"q_proj\.weight_scale: no place"),
    "first layer missing": ({"midlayer.self_attn.q_proj.weight": None}, {}, r"layers\.0\.self_attn\.q_proj\.weight is missing"),
    "shape": ({"fc.weight": torch.ones(32, 64)}, {}, r"fc\.weight is \[32, 64\], the config asks for \[32, 96\]"),
    "two names": ({"layers.0.hidden_norm.weight": torch.ones(32)}, {}, r"are both layers\.0\.hidden_norm\.weight"),
    "no head": ({"lm_head.weight": None}, {}, r"lm_head\.weight is missing"),
    "no mapping": ({"d2t": None, "t2d": None}, {}, "d2t is missing"),
    "other mask": ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, {}, "t2d marks 64 ids"),
    "mapping of a whole vocabulary": ({"lm_head.weight": torch.rand(VOCAB, 32)}, {"draft_vocab_size": VOCAB}, "d2t moves tokens"),
    "rotary table": ({"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}, {}, r"inv_freq is not the rotary table"),
    "two bases": ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta is 10000.0 and 500000.0"),
    "two scalings": ({}, {"rope_parameters": {"factor": 2.0}, "rope_scaling": {"factor": 4.0}}, "rope_parameters and rope_scaling"),
    "eagle 1": ({}, {"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1"),
    "other family": ({}, {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "is not known here"),
    "ids elsewhere": ({}, {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, "--aux-layer-ids"),
    "other verifier": ({}, {"vocab_size": 80}, "verifier of vocabulary 80.*in --verifier"),
    "not finite": ({"norm.weight": torch.full((32,), torch.nan)}, {}, r"norm\.weight has values that are not finite"),
    "integer weights": ({"norm.weight": torch.ones(32, dtype=torch.float64)}, {}, "float64"),
}


@pytest.mark.parametrize("to", ["speculators", "sglang"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line_and_nothing_is_written(name: str, to: Any, verifier: Path, tmp_path: Path) -> None:
    changes, config, message = FAULTS[name]
    tensors = {key: value for key, value in {**random_tensors(), **changes}.items() if value is not None}
    source = write(tmp_path / "source", tensors, **config)
    with pytest.raises(InputError, match=message) as caught:
        convert(source, tmp_path / "out", str(verifier), to)
    assert "\n" not in str(caught.value)
    assert ".partial" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_files_that_are_no_weights(verifier: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "source", random_tensors())
    (source / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"neither \*\.safetensors nor pytorch_model\.bin"):
        convert(source, tmp_path / "out", str(verifier), "sglang")
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Path("/"), protocol=2))  # a pickle that would run code
    with pytest.raises(InputError, match="not a file of plain tensors"):
        convert(source, tmp_path / "out", str(verifier), "sglang")
    torch.save({"epoch": 3}, source / "pytorch_model.bin")
    with pytest.raises(InputError, match="epoch: not tensors by name"):
        convert(source, tmp_path / "out", str(verifier), "sglang")
    (source / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "model-1.safetensors"}}')
    with pytest.raises(InputError, match=r"not there: model-1\.safetensors"):
        convert(source, tmp_path / "out", str(verifier), "sglang")


def test_other_logits_are_not_given_the_name(verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no check of names and shapes sees: two norms exchanged while writing."""

    def exchanged(draft: Draft, folder: Path, dtype: torch.dtype) -> None:
        layer: Any = draft.layers[0]
        layer.hidden_norm, layer.input_layernorm = layer.input_layernorm, layer.hidden_norm
        save_draft(draft, folder, dtype)

    monkeypatch.setattr(module, "save_draft", exchanged)
    source = write(tmp_path / "source", random_tensors())
    with pytest.raises(InputError, match="logits of draft step 0 are not the source's"):
        convert(source, tmp_path / "out", str(verifier), "speculators")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_command_line(verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write(tmp_path / "source", random_tensors()), tmp_path / "out"
    command = ["convert", str(source), str(out), "--verifier", str(verifier)]
    assert cli.main([*command, "--to", "speculators"]) == 0
    assert check(out).aux_layer_ids == (2, 4, 5)
    edit_config(source, lambda config: config.update(vocab_size=VOCAB + 1))
    before = (out / "model.safetensors").read_bytes()
    assert cli.main([*command, "--to", "sglang"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert errors == [line for line in errors if line.startswith("eagle3-fast: error: the draft was trained for a verifier of")]
    assert len(errors) == 1
    assert (out / "model.safetensors").read_bytes() == before
    assert cli.main(["convert", str(source), str(source), "--verifier", str(verifier), "--to", "sglang"]) == 2
