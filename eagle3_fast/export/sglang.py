"""A draft in the flat layout that SGLang and SafeAILab read, written and read back (contract, sections 9.2 and 9.3).

config.json is a plain Llama config; the first layer is named `midlayer`, the norm before attention of further layers
`hidden_norm`; the residual is always the hidden state before its norm; the embedding is the verifier's where widths agree.
SGLang passes over unknown tensors and leaves missing ones random without a word, so both are errors here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.export.check import file_faults, implied_tensors, mapping_faults, probe_faults, tensor_faults
from eagle3_fast.export.engines import FIRST_RELEASE, REMEDY, engine_ids, layers_of
from eagle3_fast.export.speculators import (
    refuse_foreign,
    refuse_other_verifier,
    same_tensors,
    servable_config,
    served_flags,
    verifier_config,
    warnings_about,
)
from eagle3_fast.extract.verifier import default_layer_ids
from eagle3_fast.extract.weights import verifier_weights
from eagle3_fast.files import folder_written_aside, read_json, write_json, written_aside
from eagle3_fast.log import logger
from eagle3_fast.model.config import DraftConfig, parse_draft_config
from eagle3_fast.model.draft import VERIFIER_PARTS, Draft, load_draft, load_tensors, read_tensors

ARCHITECTURE = "LlamaForCausalLMEagle3"
READ_AS_LLAMA = (ARCHITECTURE, "LlamaForCausalLM", "Eagle3LlamaForCausalLM")
"""Architectures that drafts of this layout name: SGLang and SpecForge, SafeAILab, vLLM."""

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
FULL_ATTENTION = ("layer_types", "sliding_window", "use_sliding_window")
"""Keys of the layer config that say nothing once every layer is known to attend to all."""

OWN_KEYS = (
    *("architectures", "draft_vocab_size", "target_hidden_size", "eagle_config", "num_aux_hidden_states", "dtype", "torch_dtype"),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output"),
)
"""Keys of the flat config that are not of its decoder layers."""

SPECULATIVE_TOKENS = 3
"""Tokens to draft where a layout does not say, as in speculators' own converter."""


def export(config: RunConfig, checkpoint: Path) -> Path:
    """Write the draft of `checkpoint` to `config.export.output` for SGLang, and check what was written.

    Returns:
        The folder. It is replaced as a whole, after its check: an interrupted or failed export leaves the old one.

    Raises:
        InputError: as `speculators.export`, and where the layout or the engine cannot represent the draft.
    """
    output, dtype = Path(config.export.output), getattr(torch, config.export.dtype)
    refuse_foreign(output, checkpoint, "export.output")
    draft = load_draft(checkpoint)
    draft.config = servable_config(draft.config, config)
    for warning in warnings_about(draft.config, config, "SGLang"):
        logger.warning(warning)
    with folder_written_aside(output) as partial:
        save_flat(draft, partial, dtype, config)
        try:
            same_tensors(draft, check_flat(partial, config), dtype)
        except InputError as error:  # name what the user has; the partial folder is gone by the time this is read
            raise InputError(str(error).replace(str(partial), f"export of {checkpoint}")) from None
    logger.info("%s: draft for SGLang, reads layers %s", output, draft.config.eagle_aux_hidden_state_layer_ids)
    return output


def save_flat(draft: Draft, folder: Path, dtype: torch.dtype, run: RunConfig) -> None:
    """Write config.json and model.safetensors of a draft whose config is servable. Raises InputError, see `export`."""
    text = verifier_config(run).get_text_config(decoder=True)
    config = flat_config(draft.config, str(dtype).removeprefix("torch."), text)
    shared = share_embedding(draft, run)
    tensors = {flat_name(own): tensor for own, tensor in draft.exported_tensors(dtype).items() if not (shared and own == EMBED)}
    with written_aside(folder / "model.safetensors") as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
    write_json(folder / "config.json", config)


@torch.no_grad()
def share_embedding(draft: Draft, run: RunConfig) -> bool:
    """Put the verifier's embedding into a draft of its width, as SGLang does; False where the draft keeps one of its own.

    Raises InputError where they do not agree up to bfloat16, in which a checkpoint may hold it.
    """
    own = draft.embed_tokens.weight
    if own.shape[1] != verifier_config(run).get_text_config(decoder=True).hidden_size:
        return False
    verifiers = verifier_embedding(run)
    if own.shape != verifiers.shape or not torch.allclose(own.float(), verifiers.float(), rtol=2**-7, atol=1e-6):
        raise InputError(
            "the draft's embedding is not the verifier's, which SGLang puts in its place: name the verifier that the draft was "
            "trained with, or export for vLLM"
        )
    own.copy_(verifiers)
    return True


def check_flat(folder: Path, run: RunConfig) -> Draft:
    """Read a written folder back as the engine does. Raises InputError with every fault found."""
    raw, tensors = read_json(folder / "config.json"), read_tensors(folder / "model.safetensors")
    draft = read_flat(raw, tensors, run, str(folder))
    faults = file_faults(folder) + tensor_faults(draft.config, draft.exported_tensors(torch.float32), "float32")
    stored = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()}
    if stored != {raw["dtype"]}:
        faults.append(f"tensors are {', '.join(sorted(stored))}, config.json says {raw['dtype']}")
    faults = faults or mapping_faults(draft.config, draft.state_dict()) + probe_faults(draft)
    if faults:
        raise InputError(f"{folder}: " + "; ".join(faults))
    return draft


# --- writing -----------------------------------------------------------------------------------------------------------


def flat_config(config: DraftConfig, dtype: str, text: PreTrainedConfig) -> dict[str, Any]:
    """config.json of a draft for a verifier with text config `text`. Raises InputError naming what to change in the run file."""
    _refuse_flags(config)
    layer = config.transformer_layer_config
    if config.num_aux * config.verifier_hidden_size == layer.hidden_size:
        raise InputError(
            f"the draft's aux states are together as wide as itself ({layer.hidden_size}), where SGLang leaves out fc: set another "
            "number of train.draft.target_layer_ids, extract and train again"
        )
    ids = engine_ids(config.eagle_aux_hidden_state_layer_ids or (), text.num_hidden_layers, "SGLang", text.model_type)
    flat = {key: value for key, value in layer.model_dump(mode="json").items() if key not in FULL_ATTENTION}
    rope = flat["rope_parameters"]
    flat |= {
        "architectures": [ARCHITECTURE],
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
        "tie_word_embeddings": False,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" and "mrope_section" not in rope else _old_spelling(rope),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if config.norm_before_fc:
        flat["eagle_config"]["norm_before_fc"] = flat["norm_before_fc"] = True
    flat |= {flag: True for flag in ("fc_norm", "norm_output") if getattr(config, flag)}
    if config.num_aux != 3:
        flat["num_aux_hidden_states"] = config.num_aux
    if config.verifier_hidden_size != layer.hidden_size:  # its presence makes SGLang read the draft's own embedding
        flat["target_hidden_size"] = config.verifier_hidden_size
    return flat


def flat_name(name: str) -> str:
    """A tensor of ours under its name in the flat layout."""
    if name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    return re.sub(r"^(layers\.\d+)\.input_layernorm\.", r"\1.hidden_norm.", name)


def _old_spelling(rope: dict[str, Any]) -> dict[str, Any]:
    """`rope_scaling` as readers before transformers 5 know it: both names of the type, no base."""
    return {**{key: value for key, value in rope.items() if key != "rope_theta"}, "type": rope["rope_type"]}


def _refuse_flags(config: DraftConfig) -> None:
    unknown = [flag for flag in served_flags(config) if "SGLang" not in FIRST_RELEASE[flag]]
    if unknown:
        remedies = ", ".join(REMEDY[flag] for flag in unknown)
        raise InputError(f"SGLang does not follow {', '.join(unknown)}: train with {remedies}, or export for vLLM")


# --- reading -----------------------------------------------------------------------------------------------------------


def read_flat(
    raw: dict[str, Any], tensors: dict[str, Tensor], run: RunConfig, where: str, layers: list[int] | None = None
) -> Draft:
    """A draft from the config and all tensors of a flat folder, of whichever trainer or release.

    What the layout leaves out comes from the run's verifier: its embedding, its head where the draft says that it shares it, the
    default aux layers. `layers` (decoder layers applied) overrides those that the folder names.

    Raises:
        InputError: names every tensor and key that has no place in a draft.
    """
    text = verifier_config(run).get_text_config(decoder=True)
    config = _draft_config(raw, text, run.train.verifier.verifier_name_or_path, layers, where)
    refuse_other_verifier(config, text, run.train.verifier.verifier_name_or_path)
    implied, named = implied_tensors(config), _named(tensors, where)
    draft = Draft(config)
    _settle_rotary(named, draft, where)
    _settle_mapping(named, config, where)
    _settle_head(named, raw, config, run, where)
    if EMBED not in named and config.transformer_layer_config.hidden_size == text.hidden_size:
        named[EMBED] = (EMBED, verifier_embedding(run))
    unknown = sorted(source for name, (source, _) in named.items() if name not in implied)
    if unknown:
        raise InputError(f"{where}: {', '.join(unknown)}: no place in an EAGLE-3 draft of this config; nothing is dropped silently")
    load_tensors(draft, {name: tensor for name, (_, tensor) in named.items()}, where, missing_ok=VERIFIER_PARTS)
    return draft


def verifier_embedding(run: RunConfig) -> Tensor:
    """[verifier vocabulary, G], as stored."""
    section = run.train.verifier
    return verifier_weights(section.verifier_name_or_path, names=["embed"], trust_remote_code=section.trust_remote_code).embed


def own_name(name: str) -> str:
    """A tensor of a flat folder under our name; those that it does not know keep theirs."""
    rules: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
        (r"^model\.", ""),
        (r"^midlayer\.", "layers.0."),
        (r"^additional_layers\.(\d+)\.", lambda match: f"layers.{int(match[1]) + 1}."),
        (r"^(layers\.[1-9]\d*)\.hidden_norm\.", r"\1.input_layernorm."),
        *((rf"^aux_norm_{level}\.", f"fc_norm.{index}.") for index, level in enumerate(("low", "mid", "high"))),
    ]
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


Named = dict[str, tuple[str, Tensor]]
"""Tensors by our name, each with its name in the folder that is read."""


def _named(tensors: dict[str, Tensor], where: str) -> Named:
    named: Named = {}
    for source, tensor in tensors.items():
        name = own_name(source)
        if name in named:
            raise InputError(f"{where}: {named[name][0]} and {source} are both {name}; delete one")
        named[name] = (source, tensor)
    return named


def _draft_config(raw: dict[str, Any], text: PreTrainedConfig, verifier: str, layers: list[int] | None, where: str) -> DraftConfig:
    architectures = raw.get("architectures") or [ARCHITECTURE]
    if raw.get("model_type", "llama") != "llama" or architectures[0] not in READ_AS_LLAMA:
        kind = f"{architectures[0]} of type {raw.get('model_type')}"
        raise InputError(f"{where}: {kind} is not known here; drafts of {', '.join(READ_AS_LLAMA)} and type llama are")
    _refuse_contradiction(raw, where)
    eagle = raw.get("eagle_config") or {}
    served = {"name_or_path": verifier, "architectures": []}
    data = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": raw.get("draft_vocab_size") or raw.get("vocab_size"),
        "norm_before_residual": bool(raw.get("norm_before_residual")),
        "norm_before_fc": bool(eagle.get("norm_before_fc", raw.get("norm_before_fc"))),
        "fc_norm": bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
        "norm_output": bool(raw.get("norm_output")),
        "target_hidden_size": raw.get("target_hidden_size"),
        "eagle_aux_hidden_state_layer_ids": layers or _aux_layers(raw, text, where),
        "speculators_config": {"proposal_methods": [{"speculative_tokens": SPECULATIVE_TOKENS}], "verifier": served},
        "transformer_layer_config": {key: value for key, value in raw.items() if key not in OWN_KEYS},
    }
    return parse_draft_config(data, f"{where}/config.json")


def _aux_layers(raw: dict[str, Any], text: PreTrainedConfig, where: str) -> list[int]:
    eagle = raw.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        raise InputError(f"{where}/config.json: use_aux_hidden_state is false: an EAGLE-1 draft, which is not known here")
    if ids := eagle.get("eagle_aux_hidden_state_layer_ids"):
        return layers_of(ids, "SGLang", text.model_type)
    elsewhere = sorted(key for key in raw if "aux" in key and key.endswith("layer_ids"))
    if elsewhere or raw.get("num_aux_hidden_states", 3) != 3:
        what = ", ".join(elsewhere) or f"num_aux_hidden_states {raw['num_aux_hidden_states']} without layers"
        raise InputError(f"{where}/config.json: {what}, which readers number differently: say which layers with --aux-layer-ids")
    layers = default_layer_ids(text.num_hidden_layers)
    logger.info("%s: names no aux layers, so those that SGLang and SafeAILab read by default are taken, %s", where, layers)
    return layers


def _refuse_contradiction(raw: dict[str, Any], where: str) -> None:
    """Rotary parameters may stand in an old and a new place; readers differ in which they take."""
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    base = {value["rope_theta"] for value in (raw, new, old) if value.get("rope_theta") is not None}
    if len(base) > 1:
        raise InputError(f"{where}/config.json: rope_theta is {' and '.join(map(str, sorted(base)))}; correct it")
    inert = ("type", "rope_type", "rope_theta")
    if new and old and {k: v for k, v in new.items() if k not in inert} != {k: v for k, v in old.items() if k not in inert}:
        raise InputError(f"{where}/config.json: rope_parameters and rope_scaling differ; delete the wrong one")


def _settle_rotary(named: Named, draft: Draft, where: str) -> None:
    """Old files carry the rotary table, which follows from the config; another one would be lost, so it is refused."""
    for name in [name for name in named if name.endswith("rotary_emb.inv_freq")]:
        source, table = named.pop(name)
        own = draft.rotary.get_buffer("inv_freq")
        if table.shape != own.shape or not torch.allclose(table.float(), own, rtol=1e-2):
            raise InputError(f"{where}: {source} is not the rotary table of config.json; correct rope_theta or rope_scaling there")


def _settle_mapping(named: Named, config: DraftConfig, where: str) -> None:
    """d2t as int64, t2d as bool, t2d from d2t where it is missing; none where the vocabulary is whole."""
    if "d2t" in named:
        source, d2t = named["d2t"]
        named["d2t"] = (source, d2t.to(torch.int64))
    elif config.reduced_vocab:
        raise InputError(
            f"{where}: d2t is missing: which verifier tokens the {config.draft_vocab_size} rows of the head mean is unknown"
        )
    if "t2d" in named:
        source, t2d = named["t2d"]
        named["t2d"] = (source, t2d.to(torch.bool))
    if not config.reduced_vocab:
        if "d2t" in named and named["d2t"][1].any():
            raise InputError(f"{where}: d2t moves tokens although draft_vocab_size is vocab_size; correct draft_vocab_size")
        named.pop("d2t", None)
        named.pop("t2d", None)
    elif "t2d" not in named:
        ids = named["d2t"][1] + torch.arange(len(named["d2t"][1]))
        if not 0 <= int(ids.min()) <= int(ids.max()) < config.verifier_vocab_size:
            raise InputError(f"{where}: d2t maps to ids {int(ids.min())}..{int(ids.max())} of {config.verifier_vocab_size}")
        named["t2d"] = ("t2d", torch.zeros(config.verifier_vocab_size, dtype=torch.bool).index_fill(0, ids, True))


def _settle_head(named: Named, raw: dict[str, Any], config: DraftConfig, run: RunConfig, where: str) -> None:
    """A stored head counts; without one it is the draft's embedding where tied, the verifier's head where the config shares it."""
    tied = bool(raw.get("tie_word_embeddings"))
    if HEAD in named:
        embed = named.get(EMBED)
        if tied and not config.reduced_vocab and embed is not None and not torch.equal(named[HEAD][1], embed[1]):
            raise InputError(f"{where}: config.json ties the head to the embedding, yet {named[HEAD][0]} is another; correct it")
        return
    if config.reduced_vocab or not (tied or raw.get("draft_vocab_size") is None):
        raise InputError(f"{where}: {HEAD} is missing: SGLang would leave it random")
    if tied:
        named[HEAD] = (EMBED, named[EMBED][1] if EMBED in named else verifier_embedding(run))
        return
    section = run.train.verifier
    weights = verifier_weights(section.verifier_name_or_path, names=["head"], trust_remote_code=section.trust_remote_code)
    named[HEAD] = (HEAD, weights.head)
