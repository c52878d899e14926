"""The recipes of configs/: each parses, and each of the two commands in its header fits the cards that it is written for.

Nothing is downloaded. The verifiers are the config.json files of `verifier_configs/`, written from public architecture values:
Llama-3.1-8B-Instruct's and Qwen3-32B's own configs; for GLM-5 the defaults of transformers' `GlmMoeDsaConfig` (5.24), with which
test_glm5_is_the_librarys_own compares them.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from transformers import GlmMoeDsaConfig

from eagle3_fast.config import RunConfig, load_run_config
from eagle3_fast.files import read_json
from eagle3_fast.train.plan import Plan, plan, recommendation

ROOT = Path(__file__).parents[2]
VERIFIERS = Path(__file__).parent / "verifier_configs"
RECIPES = ["llama3-8b", "qwen3-32b", "glm5"]
GPUS = {"eagle3-fast": 1, "deepspeed": 8}


def recipe(name: str, *overrides: str) -> RunConfig:
    """A recipe whose verifier is its small config.json."""
    path = f"train.verifier.verifier_name_or_path={VERIFIERS / name}"
    return load_run_config(ROOT / "configs" / f"{name}.yaml", [path, *overrides])


def commands(name: str) -> dict[int, list[str]]:
    """Overrides of the header's training commands, by number of GPUs."""
    found = {}
    for line in (ROOT / "configs" / f"{name}.yaml").read_text().splitlines():
        if line.startswith("#") and " train --config " in line:
            words = shlex.split(line.partition(":")[2])
            assert words[words.index("--config") + 1] == f"configs/{name}.yaml"
            if words[0] == "deepspeed":
                assert words[:5] == ["deepspeed", "--num_gpus", "8", "--module", "eagle3_fast"]
            found[GPUS[words[0]]] = words[words.index("--config") + 2 :]
    return found


def planned(name: str, gpus: int, *overrides: str) -> Plan:
    return plan(recipe(name, *overrides), gpus, "96GiB")


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("name", RECIPES)
def test_the_command_in_the_header_is_what_plan_recommends(name: str, gpus: int) -> None:
    overrides = commands(name)[gpus]
    config, result = recipe(name, *overrides), planned(name, gpus, *overrides)
    stage = config.deepspeed.stage if gpus > 1 else 0
    chosen = result.fitting
    assert chosen is not None
    setting = chosen.setting
    assert (setting.stage, setting.recompute, setting.accumulation) == (stage, config.engine.recompute, config.engine.accumulation)
    assert chosen.total < result.usable
    assert "8 packed batches a step" in recommendation(result)


@pytest.mark.parametrize("name", RECIPES)
def test_every_stage_of_a_recipe_fits_eight_cards(name: str) -> None:
    result = planned(name, 8)
    assert all(x.total <= result.usable for x in result.footprints)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_keeps_its_files_together_and_the_default_layers(name: str) -> None:
    config = recipe(name)
    assert config.train.draft.target_layer_ids is None
    assert config.train.draft.draft_vocab_size == 32000
    assert config.train.logging.logger == "tensorboard"
    assert config.hidden_states_path == Path(f"output/{name}/data/hidden_states")


@pytest.mark.parametrize(
    ("name", "layers", "heads"),
    [("llama3-8b", [2, 16, 29], (32, 8, 128)), ("qwen3-32b", [2, 32, 61], (64, 8, 128)), ("glm5", [2, 39, 75], (64, 8, 256))],
)
def test_what_the_recipe_says_of_its_draft(name: str, layers: list[int], heads: tuple[int, int, int]) -> None:
    """The comment beside `draft` in the recipe, and the sizes that it stands for."""
    draft = planned(name, 1).estimate.draft
    assert draft.eagle_aux_hidden_state_layer_ids == layers
    layer = draft.transformer_layer_config
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == heads
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    assert f"aux layers {', '.join(map(str, layers))}" in text
    assert f"{planned(name, 1).token_bytes * 10**6 / 1e9:.0f} GB a million tokens" in text


def test_glm5_is_the_librarys_own() -> None:
    own = GlmMoeDsaConfig().to_dict()
    stated = read_json(VERIFIERS / "glm5" / "config.json")
    besides = {"architectures", "torch_dtype", "rope_parameters"}
    assert {key: own[key] for key in stated.keys() - besides} == {key: stated[key] for key in stated.keys() - besides}
    assert (own["hidden_size"], own["vocab_size"], own["num_hidden_layers"]) == (6144, 154880, 78)
