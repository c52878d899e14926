"""Drafts for the toy verifiers of `tests.verifiers`: random weights, every norm away from 1 so that a skipped one shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eagle3_fast.config import RunConfig
from eagle3_fast.model.config import DraftConfig, parse_draft_config
from eagle3_fast.model.draft import Draft, save_draft
from tests.verifiers import VOCAB, stored_weights

MAP = (0, 1, 2, 5, 7, 8, 11, 13, 16, 20, 21, 26, 30, 31, 35, 38, 41, 44, 47, 50, 52, 55, 59, 62)
"""A draft vocabulary of 24 scattered verifier ids."""

LAYER: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def draft_config(layer: dict[str, Any] | None = None, **flags: Any) -> DraftConfig:
    """A config of speculators' default flags; `layer` overrides keys of the layer config, `flags` those of the top."""
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    verifier = {"name_or_path": "verifier", "architectures": ["LlamaForCausalLM"]}
    top = {"draft_vocab_size": len(MAP), "norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    data = {
        **top,
        "speculators_model_type": "eagle3",
        "speculators_config": {"proposal_methods": methods, "verifier": verifier},
        "transformer_layer_config": {**LAYER, **(layer or {})},
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        **flags,
    }
    return parse_draft_config(data, "test")


def toy_draft(config: DraftConfig | None = None, seed: int = 0) -> Draft:
    """A draft with every tensor random; its vocabulary is `MAP`, or the first ids where another size is asked for."""
    draft = Draft(config or draft_config())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            shift = 0.5 if parameter.ndim == 1 else -0.5
            parameter.copy_((torch.rand(parameter.shape, generator=generator) + shift) * (0.4 if parameter.ndim == 2 else 1))
    if draft.config.reduced_vocab:
        map_vocabulary(draft, torch.tensor(MAP))
    return draft


def map_vocabulary(draft: Draft, ids: torch.Tensor) -> None:
    """Give the draft's rows these ascending verifier ids."""
    draft.get_buffer("d2t").copy_(ids - torch.arange(len(ids)))
    draft.get_buffer("t2d").zero_()[ids] = True


def saved(draft: Draft, verifier: Path, folder: Path) -> Path:
    """A float32 checkpoint whose embedding is the verifier's, with a file of the trainer's beside the draft."""
    embed = stored_weights(verifier)["model.embed_tokens.weight"]
    if draft.embed_tokens.weight.shape == embed.shape:
        draft.embed_tokens.weight.data.copy_(embed)
    save_draft(draft, folder, torch.float32)
    (folder / "training_state.json").write_text("{}")
    return folder


def run_config(verifier: Path, output: Path, **sections: Any) -> RunConfig:
    """A run file that names this verifier and export folder."""
    train = {"verifier": {"verifier_name_or_path": str(verifier)}, **sections.pop("train", {})}
    return RunConfig.model_validate({"train": train, "export": {"output": str(output), **sections.pop("export", {})}, **sections})
