"""What serving engines call a verifier's layer, and since when each follows a choice that changes the draft's computation.

Everywhere else in this package layer id j means "after j decoder layers" (0 = embedding, n = after the last layer, before the
final norm). vLLM: contract of speculators, section 9.1. SGLang: releases 0.4.5 to 0.5.23. docs/serve.md repeats both tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3_fast.errors import InputError


@dataclass(frozen=True)
class Numbering:
    """An engine's id of the state after j decoder layers is j - `offset`.

    `lowest`: the smallest j that the engine can capture. `last`: whether j = n can be. `first`: where set, releases of the engine
    agree on the ids only if the smallest j is this one.
    """

    offset: int
    lowest: int
    last: bool
    first: int | None = None


NUMBERING = {
    "vLLM": Numbering(offset=0, lowest=0, last=True),
    "SGLang": Numbering(offset=1, lowest=1, last=False),
    "SGLang, latent attention": Numbering(offset=1, lowest=1, last=False, first=2),
}
"""SGLang captures what enters a layer and adds 1 to the ids of the draft's config. For verifiers with latent attention, releases
from 0.5.13 add it only where the first id is 1, earlier ones always; both capture the same layers where the smallest j is 2."""

LATENT_ATTENTION = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm_moe_dsa", "glm4_moe_lite")
"""Verifier types that SGLang serves with the last row of `NUMBERING`; GLM-5 is glm_moe_dsa."""

FIRST_RELEASE: dict[str, dict[str, str]] = {
    "norm_before_residual": {"vLLM": "0.32"},
    "norm_before_fc": {"vLLM": "0.32", "SGLang": "0.5.18"},
    "fc_norm": {"vLLM": "0.32", "SGLang": "0.5.12"},
    "norm_output": {"vLLM": "0.32", "SGLang": "0.5.12"},
    "num_layers": {"vLLM": "0.32", "SGLang": "0.5.12"},
    "target_layer_ids": {"vLLM": "0.32", "SGLang": "0.5.12"},
    "sliding_window": {"vLLM": "0.32"},
    "qwen3": {"vLLM": "0.32"},
    "attention_bias": {"vLLM": "0.32"},
    "mlp_bias": {"vLLM": "0.32"},
    "partial_rotary_factor": {},
}
"""For every choice beyond the plain draft: the first release of an engine seen to follow it; no entry, none was.
`num_layers`: more than one layer. `target_layer_ids`: other than three aux layers."""

REMEDY = {
    "norm_before_residual": "train.draft.norm_before_residual=false",
    "sliding_window": "train.draft.full_attention_indices naming every draft layer",
    "qwen3": "train.draft.draft_arch=llama",
    "attention_bias": "a train.draft.from_pretrained without attention_bias",
    "mlp_bias": "a train.draft.from_pretrained without mlp_bias",
    "partial_rotary_factor": "a train.draft.from_pretrained without partial_rotary_factor",
}
"""What to change in the run file, and train again, where an engine does not follow a choice."""


def numbering(engine: str, verifier_type: str) -> Numbering:
    """The row of `NUMBERING` that holds for a verifier's model_type."""
    latent = engine == "SGLang" and verifier_type in LATENT_ATTENTION
    return NUMBERING["SGLang, latent attention" if latent else engine]


def engine_ids(layers: Sequence[int], count: int, engine: str, verifier_type: str) -> list[int]:
    """Ascending layers j (of `count`) as the engine's own ids. Raises InputError where it would capture others."""
    rule = numbering(engine, verifier_type)
    highest = count if rule.last else count - 1
    if layers[0] < rule.lowest or layers[-1] > highest:
        raise InputError(
            f"the draft reads verifier layers {list(layers)}, {engine} can capture {rule.lowest}..{highest}: set "
            "train.draft.target_layer_ids within these, extract and train again, or export for vLLM"
        )
    if rule.first is not None and layers[0] != rule.first:
        raise InputError(
            f"the draft reads verifier layers {list(layers)}: releases of {engine} disagree on them for {verifier_type} unless the "
            f"first is {rule.first}: set train.draft.target_layer_ids so, extract and train again, or export for vLLM"
        )
    return [layer - rule.offset for layer in layers]


def layers_of(ids: Sequence[int], engine: str, verifier_type: str) -> list[int]:
    """The layers j that an engine captures for the ids of a draft's config. Raises InputError where its releases disagree."""
    rule = numbering(engine, verifier_type)
    layers = sorted({number + rule.offset for number in ids})
    if rule.first is not None and layers[0] != rule.first:
        raise InputError(
            f"the draft's config names layers {list(ids)}, on which releases of {engine} disagree for {verifier_type}: say with "
            "--aux-layer-ids after how many decoder layers its states are taken"
        )
    return layers


def serve_command(layout: str, folder: str, verifier: str, tokens: int) -> str:
    """The command that serves an exported draft and its verifier, `tokens` drafted in a chain before each verifier pass."""
    if layout == "speculators":
        return f"vllm serve {folder}"
    return (
        f"python -m sglang.launch_server --model-path {verifier} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {folder} --speculative-num-steps {tokens} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {tokens + 1}"
    )
