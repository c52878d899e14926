"""A training checkpoint as a folder that vLLM serves: speculators' layout, every fact that an engine would guess stated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.export.check import check
from eagle3_fast.export.engines import FIRST_RELEASE
from eagle3_fast.extract.shape import load_config, local_folder
from eagle3_fast.extract.weights import verifier_weights
from eagle3_fast.files import folder_written_aside
from eagle3_fast.log import logger
from eagle3_fast.model.config import DraftConfig, parse_draft_config
from eagle3_fast.model.draft import Draft, load_draft, save_draft

FILES = {"config.json", "model.safetensors"}
"""What an exported folder holds, and nothing else: engines load every weight file that they find."""

DROPPED = ("quantization_config", "compression_config", "auto_map")
"""Keys of an inherited config that would be false here: the draft's weights are plain, and no Python file lies beside them."""

INERT = {"dtype", "torch_dtype", "transformers_version", "base_model_ep_plan", "has_no_defaults_at_init"}


def export(config: RunConfig, checkpoint: Path) -> Path:
    """Write the draft of `checkpoint` to `config.export.output` in `config.export.dtype`, and check what was written.

    Args:
        checkpoint: folder with config.json and model.safetensors as training saves them (float32 or bfloat16).

    Returns:
        The folder. It is replaced as a whole, after its check: an interrupted or failed export leaves the old one.

    Raises:
        InputError: the checkpoint does not fit its own config or the run's verifier, does not say which layers it reads, or the
            output folder holds files of another origin.
    """
    output, dtype = Path(config.export.output), getattr(torch, config.export.dtype)
    refuse_foreign(output, checkpoint, "export.output")
    draft = load_draft(checkpoint)
    draft.config = servable_config(draft.config, config)
    for warning in [*warnings_about(draft.config, config, "vLLM"), *path_warning(config)]:
        logger.warning(warning)
    _warn_about_embedding(draft.embed_tokens.weight, config, dtype)
    with folder_written_aside(output) as partial:
        save_draft(draft, partial, dtype)
        try:
            report = check(partial)
        except InputError as error:  # name what the user has; the partial folder is gone by the time this is read
            raise InputError(str(error).replace(str(partial), f"export of {checkpoint}")) from None
        same_tensors(draft, load_draft(partial), dtype)
    logger.info(f"{output}: {report}")
    return output


def servable_config(draft: DraftConfig, run: RunConfig) -> DraftConfig:
    """The draft's config with nothing left to an engine's defaults, fitted to the run's verifier. Raises InputError."""
    verifier = verifier_config(run)
    text = verifier.get_text_config(decoder=True)
    refuse_other_verifier(draft, text, run.train.verifier.verifier_name_or_path)
    data = draft.model_dump(mode="json")
    layer, methods = data["transformer_layer_config"], data["speculators_config"]
    for key in DROPPED:
        data.pop(key, None)
        layer.pop(key, None)
    layer["tie_word_embeddings"] = data["tie_word_embeddings"] = False
    _cover_positions(layer, getattr(text, "max_position_embeddings", None) or 0)
    layer.pop("num_aux_hidden_states", None)  # `save_draft_config` derives it
    data["eagle_aux_hidden_state_layer_ids"] = _aux_layers(draft, run, text.num_hidden_layers)
    methods["verifier"]["name_or_path"] = run.train.verifier.verifier_name_or_path
    methods["verifier"]["architectures"] = list(verifier.architectures or ())
    return parse_draft_config(data, "export")


def warnings_about(draft: DraftConfig, run: RunConfig, engine: str) -> list[str]:
    """What may go wrong in an engine although the folder is right, one line each."""
    layer, text = draft.transformer_layer_config, verifier_config(run).get_text_config(decoder=True)
    found = []
    for release, flags in _releases(served_flags(draft), engine).items():
        found.append(f"{', '.join(flags)}: followed by {release}; an older or another engine may ignore them silently")
    for flag in sorted(_unknown_flags(draft)):
        found.append(f"{flag}: no engine is known to follow this flag of the draft's config")
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if (heads, size) != (layer.num_key_value_heads, layer.head_dim):
        found.append(
            f"the draft's key-value cache ({layer.num_key_value_heads} heads x {layer.head_dim}) differs from the verifier's "
            f"({heads} x {size}): some engines give both one cache layout and refuse this"
        )
    return found


def path_warning(run: RunConfig) -> list[str]:
    """The one line to say where config.json would hold a path of this machine."""
    name = run.train.verifier.verifier_name_or_path
    remedy = "to serve elsewhere, correct speculators_config.verifier.name_or_path"
    return [f"config.json names the verifier by its local folder {name}: {remedy}"] if Path(name).exists() else []


def served_flags(draft: DraftConfig) -> list[str]:
    """The keys of `FIRST_RELEASE` that this draft uses."""
    layer = draft.transformer_layer_config
    derived = {
        "num_layers": layer.num_hidden_layers > 1,
        "target_layer_ids": draft.num_aux != 3,
        "sliding_window": any(layer.window(index) for index in range(layer.num_hidden_layers)),
        "qwen3": layer.model_type == "qwen3",
        "attention_bias": layer.attention_bias,
        "mlp_bias": layer.mlp_bias,
        "partial_rotary_factor": layer.rope_parameters.get("partial_rotary_factor", 1.0) != 1,
    }
    return [flag for flag in FIRST_RELEASE if derived.get(flag, getattr(draft, flag, False))]


def _releases(flags: list[str], engine: str) -> dict[str, list[str]]:
    """Flags by the release of `engine` that first follows them."""
    found: dict[str, list[str]] = {}
    for flag in flags:
        release = FIRST_RELEASE[flag].get(engine)
        found.setdefault(f"{engine} {release}" if release else f"no {engine} that was looked at", []).append(flag)
    return found


def _unknown_flags(draft: DraftConfig) -> set[str]:
    """Switches that are on and that neither this package nor the table knows."""
    return {key for key, value in (draft.model_extra or {}).items() if value is True and key not in INERT}


def verifier_config(run: RunConfig) -> PreTrainedConfig:
    """The config of the run's verifier."""
    section = run.train.verifier
    return load_config(local_folder(section.verifier_name_or_path), section.trust_remote_code)


def refuse_other_verifier(draft: DraftConfig, text: Any, name: str) -> None:
    """Raise InputError where the draft's sizes are not those of the verifier `name` with text config `text`."""
    for what, own, its in (
        ("vocabulary", draft.verifier_vocab_size, text.vocab_size),
        ("hidden size", draft.verifier_hidden_size, text.hidden_size),
    ):
        if own != its:
            raise InputError(
                f"the draft was trained for a verifier of {what} {own}, {name} has {its}: name the verifier it was trained "
                "with in train.verifier.verifier_name_or_path"
            )


def _aux_layers(draft: DraftConfig, run: RunConfig, layers: int) -> list[int]:
    """The verifier layers whose states the draft reads; an engine that is not told guesses others."""
    stored, asked = draft.eagle_aux_hidden_state_layer_ids, run.train.draft.target_layer_ids
    if stored is None and asked is None:
        raise InputError(
            "the checkpoint does not say which verifier layers it reads and engines would guess: set "
            f"train.draft.target_layer_ids (speculators 0.3 with its default data reads [3, {layers // 2 + 1}, {layers - 2}])"
        )
    ids = stored or sorted(asked or ())
    if asked is not None and sorted(asked) != ids:
        raise InputError(f"train.draft.target_layer_ids is {asked}, the checkpoint was trained on {stored}: correct the run file")
    if ids[-1] > layers:
        raise InputError(f"aux layer {ids[-1]} does not exist: the verifier has {layers} layers")
    return ids


def _cover_positions(layer: dict[str, Any], positions: int) -> None:
    """Let the draft serve every position that the verifier does, without changing the rotary table it was trained with."""
    trained = layer["max_position_embeddings"]
    if trained >= positions:
        return
    layer["max_position_embeddings"] = positions
    if layer["rope_parameters"]["rope_type"] in ("yarn", "dynamic", "longrope"):  # their tables depend on the trained length
        layer["rope_parameters"].setdefault("original_max_position_embeddings", trained)
    logger.info(
        f"max_position_embeddings raised from {trained} to the verifier's {positions}; the draft is untrained beyond {trained}"
    )


def _warn_about_embedding(embed: Tensor, run: RunConfig, dtype: torch.dtype) -> None:
    """A draft of the verifier's width carries its embedding; another one hints at another or a rotated verifier."""
    section = run.train.verifier
    own = verifier_weights(section.verifier_name_or_path, names=["embed"], trust_remote_code=section.trust_remote_code).embed
    if own.shape == embed.shape and not torch.equal(own.to(dtype), embed.to(dtype)):
        logger.warning(
            f"the draft's embedding is not that of {section.verifier_name_or_path}: right for a draft with an embedding of "
            "its own, else it was trained with another (or a rotated, or quantised) copy of the verifier and its "
            "drafts will be rejected"
        )


def same_tensors(draft: Draft, reloaded: Draft, dtype: torch.dtype) -> None:
    """Raise OSError where what was read back is not what was to be written."""
    expected, found = draft.exported_tensors(dtype), reloaded.exported_tensors(dtype)
    different = sorted(name for name in expected if not torch.equal(expected[name], found[name]))
    if different:
        raise OSError(f"{', '.join(different)}: read back with other values than were written; the disk is not to be trusted")


def refuse_foreign(output: Path, source: Path, what: str) -> None:
    """The whole folder is replaced, so it may hold an earlier export only."""
    if output.resolve() == Path(source).resolve():
        raise InputError(f"{what} {output} is the checkpoint itself: choose another folder")
    if output.exists() and not output.is_dir():
        raise InputError(f"{what} {output} is not a folder: choose another")
    foreign = sorted({path.name for path in output.iterdir()} - FILES) if output.exists() else []
    if foreign:
        raise InputError(
            f"{what} {output} holds {', '.join(foreign[:5])}, which export did not write: move it away or choose another folder"
        )
