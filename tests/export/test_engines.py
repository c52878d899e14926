"""The numbering table: what each engine calls a layer, stated in numbers, and what none of its releases captures alike."""

from __future__ import annotations

import pytest

from eagle3_fast.errors import InputError
from eagle3_fast.export.engines import FIRST_RELEASE, LATENT_ATTENTION, REMEDY, engine_ids, layers_of
from tests.export.sglang_rules import captured_layers

GLM5 = "glm_moe_dsa"


@pytest.mark.parametrize(
    ("engine", "verifier_type", "count", "layers", "ids"),
    [
        ("vLLM", "llama", 32, [2, 16, 29], [2, 16, 29]),
        ("vLLM", "llama", 32, [0, 16, 32], [0, 16, 32]),
        ("vLLM", GLM5, 78, [3, 40, 76], [3, 40, 76]),
        ("SGLang", "llama", 32, [2, 16, 29], [1, 15, 28]),
        ("SGLang", "qwen3", 36, [1, 18, 35], [0, 17, 34]),
        ("SGLang", GLM5, 78, [2, 39, 75], [1, 38, 74]),
    ],
)
def test_ids_of_each_engine(engine: str, verifier_type: str, count: int, layers: list[int], ids: list[int]) -> None:
    assert engine_ids(layers, count, engine, verifier_type) == ids
    assert layers_of(ids, engine, verifier_type) == layers


@pytest.mark.parametrize("verifier_type", ["llama", *LATENT_ATTENTION])
@pytest.mark.parametrize("release", [(0, 5, 12), (0, 5, 23)])
def test_every_release_captures_the_layers_that_were_meant(verifier_type: str, release: tuple[int, ...]) -> None:
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": engine_ids([2, 3, 5], 6, "SGLang", verifier_type)}}
    assert captured_layers(config, 6, verifier_type, release) == [2, 3, 5]


@pytest.mark.parametrize(
    ("verifier_type", "layers", "message"),
    [
        ("llama", [0, 3, 5], r"can capture 1\.\.5"),
        ("llama", [2, 3, 6], r"can capture 1\.\.5.*train\.draft\.target_layer_ids"),
        (GLM5, [1, 3, 5], "disagree.*unless the first is 2.*train.draft.target_layer_ids"),
        (GLM5, [3, 4, 5], "disagree"),
    ],
)
def test_layers_that_sglang_would_not_capture(verifier_type: str, layers: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine_ids(layers, 6, "SGLang", verifier_type)


def test_ids_on_which_releases_disagree_are_not_guessed() -> None:
    with pytest.raises(InputError, match="--aux-layer-ids"):
        layers_of([2, 38, 74], "SGLang", GLM5)


def test_what_sglang_does_not_follow_has_a_remedy() -> None:
    assert {flag for flag, engines in FIRST_RELEASE.items() if "SGLang" not in engines} == REMEDY.keys()
