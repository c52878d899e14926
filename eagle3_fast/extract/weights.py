"""Embedding, final norm and head of a verifier, read alone: the model is never loaded.

Where they lie (names as in the contract of speculators, section 2.2): the exact name, else the shortest name that ends in it
outside of layers, vision, audio and multi-token-prediction parts, else the aliases of other families.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3_fast.errors import InputError
from eagle3_fast.extract.checkpoint import Checkpoint, checkpoint_fingerprint
from eagle3_fast.extract.quantized import read_rows
from eagle3_fast.extract.shape import VerifierShape, local_folder, verifier_shape
from eagle3_fast.log import logger

__all__ = ["VerifierShape", "VerifierWeights", "verifier_fingerprint", "verifier_shape", "verifier_weights"]

STEMS = {
    "embed": ("embed_tokens", "tok_embeddings", "llm.embed", "backbone.embeddings"),
    "norm": ("model.norm", "norm", "llm.norm", "backbone.norm_f"),
    "head": ("lm_head", "output", "llm.unembed"),
}
"""Names without ".weight", in order of preference."""

ELSEWHERE = re.compile(r"(^|\.)(layers|blocks|h|mtp|draft|[^.]*(vision|visual|image|audio)[^.]*)\.")
"""Parts of a model that hold tensors of the same names for other purposes."""


@dataclass(frozen=True)
class VerifierWeights:
    """A part that was not asked for has no rows. `embed` and `head` are in their stored dtype (bfloat16 if stored quantised).

    The names of the shape suffixes are those of `records.py`.
    """

    shape: VerifierShape
    embed: Tensor  # [verifier vocabulary, G]
    norm: Tensor  # float32 [G]: the plain gain, 1 already added where the verifier adds it
    head: Tensor  # [verifier vocabulary or selected rows, G]

    def logits(self, states: Tensor) -> Tensor:
        """float32 [..., rows of head]: the verifier's own logits for states [..., G] taken before its final norm."""
        return self.shape.logits(states, self.norm, self.head)


def verifier_fingerprint(path: str | Path) -> str:
    """A hash that tells verifiers apart by their weights and config, wherever they lie. Reads a few MB at most per file."""
    return checkpoint_fingerprint(local_folder(path))


def verifier_weights(
    path: str | Path,
    rows: Tensor | None = None,
    names: Sequence[str] = ("embed", "norm", "head"),
    *,
    trust_remote_code: bool = False,
    tie_missing_head: bool = False,
) -> VerifierWeights:
    """Read `names` from the verifier in `path`.

    Args:
        rows: verifier-vocabulary ids (int64 [R]) of the head rows to read; None reads all.
        tie_missing_head: use the embedding as head where the config says "untied" and no head is stored.

    Raises:
        InputError: a part is not found (near matches are listed), has another shape than the config says, or a packed layout
            that is not supported.
    """
    shape = verifier_shape(path, trust_remote_code)
    checkpoint = Checkpoint(shape.path)
    nothing = torch.empty(0, shape.hidden_size)
    embed = _embed(checkpoint, shape, None) if "embed" in names else nothing
    norm = _norm(checkpoint, shape) if "norm" in names else nothing[:, 0]
    head = _head(checkpoint, shape, rows, tie_missing_head) if "head" in names else nothing
    return VerifierWeights(shape, embed, norm, head)


def _embed(checkpoint: Checkpoint, shape: VerifierShape, rows: Tensor | None) -> Tensor:
    return _matrix(checkpoint, shape, _required(checkpoint, "embed"), rows)


def _norm(checkpoint: Checkpoint, shape: VerifierShape) -> Tensor:
    if shape.norm_gain == "unit":
        return torch.ones(shape.hidden_size)
    stem = _beside_embedding(checkpoint) or _required(checkpoint, "norm")
    weight = checkpoint.tensor(f"{stem}.weight").float()
    if tuple(weight.shape) != (shape.hidden_size,):
        raise InputError(f"{shape.path}: {stem}.weight has shape {tuple(weight.shape)}, the config says ({shape.hidden_size},)")
    return weight + 1 if shape.norm_gain == "one_plus" else weight


def _head(checkpoint: Checkpoint, shape: VerifierShape, rows: Tensor | None, tie_missing_head: bool) -> Tensor:
    stem = _find(checkpoint, "head")
    if stem is not None and f"{stem}.bias" in checkpoint.files:
        raise InputError(f"{shape.path}: the head has a bias ({stem}.bias), which EAGLE-3 drafts cannot follow")
    if shape.tie_word_embeddings:
        tied = _embed(checkpoint, shape, rows)
        if stem is not None:
            _warn_if_other(tied, _matrix(checkpoint, shape, stem, rows), f"{shape.path}: {stem}")
        return tied
    if stem is not None:
        return _matrix(checkpoint, shape, stem, rows)
    if tie_missing_head:
        return _embed(checkpoint, shape, rows)
    raise InputError(
        f"{shape.path}: config.json says tie_word_embeddings is false, yet no head is stored{_near(checkpoint, 'head')}; the "
        "upload is incomplete, or the head is the embedding: then set tie_word_embeddings to true in config.json"
    )


def _warn_if_other(tied: Tensor, stored: Tensor, name: str) -> None:
    difference = (tied.float() - stored.float()).abs().max().item()
    if difference > 0:
        logger.warning(
            f"{name} differs from the embedding by up to {difference:.3g}, but the config ties them: the embedding is used"
        )


def _matrix(checkpoint: Checkpoint, shape: VerifierShape, stem: str, rows: Tensor | None) -> Tensor:
    """[V or R, G], checked against the config's sizes."""
    name = next(n for n in (f"{stem}.weight", f"{stem}.weight_packed") if n in checkpoint.files)
    height = checkpoint.shape(name)[0]
    if height != shape.vocab_size:
        raise InputError(
            f"{shape.path}: {name} has {height} rows, config.json says vocab_size {shape.vocab_size}; correct the config"
        )
    if rows is not None and len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < height:
        raise InputError(f"{shape.path}: rows {int(rows.min())}..{int(rows.max())} of {name} asked for, it has {height}")
    matrix = read_rows(checkpoint, stem, rows)
    if matrix.ndim != 2 or matrix.shape[1] != shape.hidden_size:
        raise InputError(
            f"{shape.path}: {name} gives shape {tuple(matrix.shape)}, config.json says hidden_size {shape.hidden_size}"
        )
    return matrix


def _stems(checkpoint: Checkpoint) -> list[str]:
    """Names without ".weight" of what can be a part of the text model's ends."""
    found = {key.rpartition(".weight")[0] for key in checkpoint.files if key.endswith((".weight", ".weight_packed"))}
    return sorted((stem for stem in found if not ELSEWHERE.search(stem + ".")), key=lambda stem: (len(stem), stem))


def _find(checkpoint: Checkpoint, part: str) -> str | None:
    stems = _stems(checkpoint)  # shortest first, so an exact name comes before any that ends in it
    for wanted in STEMS[part]:
        found = next((stem for stem in stems if stem == wanted or stem.endswith(f".{wanted}")), None)
        if found is not None:
            return found
    return None


def _beside_embedding(checkpoint: Checkpoint) -> str | None:
    """The norm of the module that owns the embedding: the certain choice where a wrapper has several final norms."""
    owner = (_find(checkpoint, "embed") or "").rpartition(".")[0]
    stem = f"{owner}.norm" if owner else "norm"
    return stem if f"{stem}.weight" in checkpoint.files else None


def _required(checkpoint: Checkpoint, part: str) -> str:
    stem = _find(checkpoint, part)
    if stem is None:
        wanted = ", ".join(f"{name}.weight" for name in STEMS[part])
        raise InputError(f"{checkpoint.folder}: no tensor named {wanted} or ending so{_near(checkpoint, part)}")
    return stem


def _near(checkpoint: Checkpoint, part: str) -> str:
    leaves = {stem.rpartition(".")[2]: stem for stem in _stems(checkpoint)}
    near = difflib.get_close_matches(STEMS[part][0], leaves, n=4, cutoff=0.4)
    return f"; nearest: {', '.join(leaves[leaf] + '.weight' for leaf in near)}" if near else ""
