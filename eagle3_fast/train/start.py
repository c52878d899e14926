"""The draft that a run starts from: its config from the verifier and the run file, its frozen parts from the verifier's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eagle3_fast.config import DraftSection, RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.extract.pt_folder import sample_layer_ids
from eagle3_fast.extract.pt_samples import holds_pt_samples
from eagle3_fast.extract.verifier import checked_layer_ids
from eagle3_fast.extract.weights import VerifierShape, VerifierWeights, verifier_shape, verifier_weights
from eagle3_fast.log import logger
from eagle3_fast.model.config import DraftConfig, flat_rope_parameters, load_draft_config, parse_draft_config
from eagle3_fast.model.draft import Draft, load_tensors, read_tensors
from eagle3_fast.model.ttt import Objective
from eagle3_fast.precision import training_dtype
from eagle3_fast.prepare.vocab import VocabMapping, checked_mapping, load_mapping
from eagle3_fast.train.layer_config import read_layer_config

MLA_KEY = "kv_lora_rank"
MLA_QUERY_GROUP = 8
"""Query heads per key-value head of a draft whose verifier compresses keys (MLA) and so has no such number itself."""


def start_draft(config: RunConfig) -> Draft:
    """A new draft, or the one in `train.draft.from_pretrained`, with the verifier's frozen parts in place."""
    section = config.train.draft
    shape = verifier_shape(config.train.verifier.verifier_name_or_path, config.train.verifier.trust_remote_code)
    mapping = load_mapping(config, shape.vocab_size)
    draft_config = planned_config(config, shape, mapping)
    draft = Draft(draft_config, train_head=trains_head(config))
    draft.initialise(config.train.seed)
    draft.recompute(config.engine.recompute)
    warm = Path(section.from_pretrained) / "model.safetensors" if section.from_pretrained else None
    tensors = read_tensors(warm) if warm is not None and warm.is_file() else {}
    mapping = _agreed_mapping(draft_config, mapping, tensors)
    _check_fit(draft_config, shape)
    rows = mapping.verifier_ids if mapping is not None else None
    weights = verifier_weights(shape.path, rows, trust_remote_code=config.train.verifier.trust_remote_code)
    place_verifier_parts(draft, weights, mapping, config)
    if tensors:
        absent_ok = ("embed_tokens.weight", "d2t", "t2d")  # already in place, from the verifier and the agreed mapping
        load_tensors(draft, tensors, str(warm), missing_ok=(*_verifier_names(draft), *absent_ok))
        logger.info("draft: weights of %s", warm)
    return draft


def trains_head(config: RunConfig) -> bool:
    """Whether the draft's head is trained, as speculators 0.3 does, or stays the verifier's."""
    return config.engine.compat == "0.3"


def objective(config: RunConfig) -> Objective:
    """What is trained, from the run file; `engine.compat` decides what it leaves open."""
    current, section = config.engine.compat == "0.9", config.engine
    forced = current if section.use_off_policy_tokens is None else section.use_off_policy_tokens
    normed_by_us = current and section.data_format_version == 1
    return Objective(
        ttt_steps=config.train.loss.ttt_steps,
        terms=config.train.loss.terms,
        step_loss_decay=config.train.loss.ttt_step_loss_decay,
        teacher_forced=forced,
        verifier_norm=normed_by_us if section.verifier_norm is None else section.verifier_norm,
        label_mask=section.mask_rule == "label",
    )


def planned_config(config: RunConfig, shape: VerifierShape, mapping: VocabMapping | None) -> DraftConfig:
    """The config that a run's draft will have."""
    section = config.train.draft
    if section.from_pretrained:
        return with_aux_layers(load_draft_config(section.from_pretrained), config, shape)
    return new_draft_config(config, shape, mapping)


def new_draft_config(config: RunConfig, shape: VerifierShape, mapping: VocabMapping | None) -> DraftConfig:
    """A draft config with the verifier's sizes and rotary base, and the shape that `train.draft` asks for."""
    section = config.train.draft
    data = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": mapping.draft_vocab_size if mapping else shape.vocab_size,
        "norm_before_residual": section.norm_before_residual,
        "norm_before_fc": section.norm_before_fc,
        "fc_norm": section.fc_norm,
        "norm_output": section.norm_output,
        "eagle_aux_hidden_state_layer_ids": _aux_layers(config, shape),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.train.loss.ttt_steps}],
            "verifier": {
                "name_or_path": config.train.verifier.verifier_name_or_path,
                "architectures": list(shape.architectures),
            },
        },
        "transformer_layer_config": read_layer_config(section.draft_config, shape)
        if section.draft_config
        else _layer_config(section, shape),
    }
    return parse_draft_config(data, "draft config")


def _layer_config(section: DraftSection, shape: VerifierShape) -> dict[str, Any]:
    full = set(section.full_attention_indices)
    if full - set(range(section.num_layers)):
        raise InputError(f"train.draft.full_attention_indices {sorted(full)}: the draft has layers 0..{section.num_layers - 1}")
    types = ["full_attention" if index in full else "sliding_attention" for index in range(section.num_layers)]
    sliding = "sliding_attention" in types
    rope = flat_rope_parameters({"rope_parameters": shape.rope_parameters, "head_dim": _heads(shape)["head_dim"]})
    if "mrope_section" not in rope:
        rope.pop("partial_rotary_factor", None)  # the draft turns its whole head: every engine agrees on what that means
    return {
        "model_type": section.draft_arch,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.config["intermediate_size"],
        "num_hidden_layers": section.num_layers,
        **_heads(shape),
        "hidden_act": section.draft_hidden_act,
        "max_position_embeddings": shape.config["max_position_embeddings"],
        "rms_norm_eps": shape.rms_norm_eps,
        "layer_types": types,
        "sliding_window": section.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "rope_parameters": rope,
    }


def _heads(shape: VerifierShape) -> dict[str, int]:
    """The verifier's attention heads; an MLA verifier gives its value width and grouped keys instead of its compressed ones."""
    config = shape.config
    heads = config["num_attention_heads"]
    if config.get(MLA_KEY):
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // MLA_QUERY_GROUP),
            "head_dim": config["v_head_dim"],
        }
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or shape.hidden_size // heads,
    }


def with_aux_layers(draft: DraftConfig, config: RunConfig, shape: VerifierShape) -> DraftConfig:
    """Configs of speculators 0.3 do not say which layers they read: then the data or the run file does, or the default."""
    if draft.eagle_aux_hidden_state_layer_ids is not None:
        return draft
    ids = _aux_layers(config, shape)
    logger.info("draft: its config names no aux layers, taking %s (train.draft.target_layer_ids)", ids)
    return draft.model_copy(update={"eagle_aux_hidden_state_layer_ids": ids})


def _aux_layers(config: RunConfig, shape: VerifierShape) -> list[int]:
    """The aux layers of a new draft. `.pt` samples bring theirs, prepared rows get those that the run file asks for."""
    folder, asked = config.train.data.data_path, config.train.draft.target_layer_ids
    if holds_pt_samples(folder):
        return sample_layer_ids(folder, asked, shape.num_hidden_layers)
    return checked_layer_ids(asked, shape.num_hidden_layers)


def _agreed_mapping(config: DraftConfig, mapping: VocabMapping | None, tensors: dict[str, torch.Tensor]) -> VocabMapping | None:
    """A warm start keeps its own mapping; a reduced vocabulary without any mapping is refused."""
    if not config.reduced_vocab:
        return None
    if {"d2t", "t2d"} <= tensors.keys():
        size, whole = config.draft_vocab_size, config.verifier_vocab_size
        return checked_mapping(tensors["d2t"], tensors["t2d"], size, whole, "train.draft.from_pretrained")
    if mapping is None or mapping.draft_vocab_size != config.draft_vocab_size:
        found = "none" if mapping is None else str(mapping.draft_vocab_size)
        raise InputError(
            f"the draft has a vocabulary of {config.draft_vocab_size} but the mapping found has {found}; set train.draft.draft_vocab_size "
            "to it and run `eagle3-fast vocab`, or give d2t_path and t2d_path"
        )
    return mapping


def _check_fit(config: DraftConfig, shape: VerifierShape) -> None:
    """Sizes of draft and verifier that must agree."""
    for name, own, theirs in (
        ("vocab_size", config.verifier_vocab_size, shape.vocab_size),
        ("hidden size", config.verifier_hidden_size, shape.hidden_size),
        ("hidden size of the embedding", config.transformer_layer_config.hidden_size, shape.hidden_size),
    ):
        if own != theirs:
            raise InputError(f"the draft expects a verifier with {name} {own}, {shape.path} has {theirs}")


def place_verifier_parts(draft: Draft, weights: VerifierWeights, mapping: VocabMapping | None, config: RunConfig) -> None:
    """Embedding, heads, norm and mapping into the draft, frozen parts in the run's dtype.

    The verifier's norm is folded to one plain gain: (1 + w) where its family adds 1, times its logit scale, which is linear.
    """
    dtype, shape = training_dtype(config.train.data.hidden_states_dtype), weights.shape
    if not objective(config).verifier_norm and shape.logit_scale != 1:
        raise InputError(
            f"without the verifier's norm nothing carries the logit scale {shape.logit_scale} of {shape.path}; set engine.compat to "
            "0.9 or engine.verifier_norm to true, with states from before that norm"
        )
    head = weights.head.to(dtype)
    draft.embed_tokens.weight.data = weights.embed.to(dtype)
    draft.verifier_lm_head.weight.data = head
    draft.lm_head.weight.data = (head.float() if draft.lm_head.weight.requires_grad else head).clone()
    draft.verifier_norm.weight.data = weights.norm * shape.logit_scale
    draft.verifier_norm.eps = shape.rms_norm_eps
    draft.verifier_softcap = shape.logit_softcap or 0.0
    if mapping is not None:
        draft.d2t.copy_(mapping.d2t)
        draft.t2d.copy_(mapping.t2d)


def _verifier_names(draft: Draft) -> tuple[str, ...]:
    return tuple(name for name in draft.state_dict() if name.startswith("verifier_"))
