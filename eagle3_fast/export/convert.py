"""Drafts of other trainers into the layout that vLLM or SGLang serves, and back.

Read: folders of SafeAILab, SpecForge and SGLang (a flat Llama config) and of speculators, with their weights as safetensors, whole
or in shards, or as pytorch_model.bin. Every tensor is placed or refused by name, and the written folder must give the source's
logits before it gets its name.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.export.check import check, probe_logits
from eagle3_fast.export.sglang import EMBED, check_flat, read_flat, save_flat, share_embedding, verifier_embedding
from eagle3_fast.export.speculators import refuse_foreign, servable_config
from eagle3_fast.extract.checkpoint import Checkpoint
from eagle3_fast.extract.shape import local_folder
from eagle3_fast.files import folder_written_aside, read_json
from eagle3_fast.log import logger
from eagle3_fast.model.config import parse_draft_config
from eagle3_fast.model.draft import VERIFIER_PARTS, Draft, load_draft, load_tensors, save_draft

Layout = Literal["speculators", "sglang"]

OPTIONS = {"train.verifier.verifier_name_or_path": "--verifier", "train.draft.target_layer_ids": "--aux-layer-ids"}
"""What keys of a run file are called on the command line of `convert`, which reads none."""


def convert(source: str | Path, folder: Path, verifier: str, to: Layout, layers: list[int] | None = None) -> Path:
    """Write the draft in `source` (a folder, or an id in the Hugging Face cache) to `folder` in another layout.

    Args:
        verifier: folder or cached id of the verifier that the draft was trained for.
        layers: after how many decoder layers the draft's aux states are taken; None: as the source says.

    Returns:
        `folder`. It is replaced as a whole, after its check; tensors keep their dtype.

    Raises:
        InputError: the source has a tensor or key that has no place, lacks one, does not fit the verifier, or cannot be
            represented in the other layout.
    """
    try:
        return _convert(local_folder(source) if not Path(source).exists() else Path(source), folder, _run(verifier, layers), to)
    except InputError as error:
        message = str(error)
        for key, option in OPTIONS.items():
            message = message.replace(key, option)
        raise InputError(message) from None


def _convert(source: Path, folder: Path, run: RunConfig, to: Layout) -> Path:
    refuse_foreign(folder, source, "the destination")
    raw, tensors = read_json(source / "config.json"), source_tensors(source)
    draft, dtype = source_draft(raw, tensors, run, str(source)), _float_dtype(tensors, source)
    draft.load_state_dict(draft.exported_tensors(dtype), strict=False)  # what came from the verifier may be of another dtype
    if to == "sglang":
        share_embedding(draft, run)
    expected = probe_logits(draft)
    draft.config = servable_config(draft.config, run)
    with folder_written_aside(folder) as partial:
        try:
            written = _written(draft, partial, dtype, run, to)
        except InputError as error:  # name what the user has; the partial folder is gone by the time this is read
            raise InputError(str(error).replace(str(partial), f"conversion of {source}")) from None
        for step, (before, after) in enumerate(zip(expected, probe_logits(written), strict=True)):
            if not torch.allclose(before, after, rtol=1e-5, atol=1e-5 * float(before.abs().max())):
                raise InputError(f"conversion of {source}: logits of draft step {step} are not the source's; nothing was written")
    logger.info("%s: %s, same logits as %s", folder, to, source)
    return folder


def _written(draft: Draft, folder: Path, dtype: torch.dtype, run: RunConfig, to: Layout) -> Draft:
    """Save the draft, check the folder, and read it back from its files alone."""
    if to == "sglang":
        save_flat(draft, folder, dtype, run)
        return check_flat(folder, run)
    save_draft(draft, folder, dtype)
    logger.info(check(folder))
    return load_draft(folder)


def source_draft(raw: Any, tensors: dict[str, Tensor], run: RunConfig, where: str) -> Draft:
    """The draft of a folder in either layout, its embedding the verifier's where it has none."""
    if not isinstance(raw, dict):
        raise InputError(f"{where}/config.json: not a mapping")
    if "speculators_model_type" not in raw:
        return read_flat(raw, tensors, run, where, run.train.draft.target_layer_ids)
    draft = Draft(parse_draft_config(raw, f"{where}/config.json"))
    if EMBED not in tensors:
        tensors = {**tensors, EMBED: verifier_embedding(run)}
    load_tensors(draft, tensors, where, missing_ok=VERIFIER_PARTS)
    return draft


def source_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from safetensors where there are any, else from pytorch_model.bin, which may hold nothing else."""
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").is_file():
        checkpoint = Checkpoint(folder)
        return {name: checkpoint.tensor(name) for name in checkpoint.files}
    path = folder / "pytorch_model.bin"
    if not path.is_file():
        raise InputError(f"{folder}: holds neither *.safetensors nor pytorch_model.bin")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise InputError(f"{path}: not a file of plain tensors ({' '.join(str(error).split())[:200]})") from None
    others = [] if isinstance(found, dict) else [type(found).__name__]
    others = others or [str(name) for name, value in found.items() if not isinstance(value, Tensor)]
    if others:
        raise InputError(f"{path}: {', '.join(others[:5])}: not tensors by name")
    return found


def _float_dtype(tensors: dict[str, Tensor], source: Path) -> torch.dtype:
    """The one dtype of the float tensors; float32, which holds them all, where they have several."""
    found = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point() and tensor.numel()}
    if unknown := found - {torch.float32, torch.bfloat16, torch.float16}:
        raise InputError(f"{source}: tensors of {', '.join(map(str, unknown))}: only float32, bfloat16 and float16 are served")
    return found.pop() if len(found) == 1 else torch.float32


def _run(verifier: str, layers: list[int] | None) -> RunConfig:
    """The run file that would say the same."""
    section = {"verifier": {"verifier_name_or_path": verifier}, "draft": {"target_layer_ids": layers}}
    return RunConfig.model_validate({"train": section})
