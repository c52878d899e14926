"""The draft vocabulary: which verifier tokens the draft can propose.

Two tensors say it (contract of speculators, section 4): `t2d` marks the chosen verifier tokens, and draft id i stands for
verifier id i + d2t[i]. They are built from the supervised token counts that `prepare` writes, and nothing takes them for
granted: a mapping is checked against both sizes whatever its source.
"""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.extract.shape import verifier_shape
from eagle3_fast.files import write_json, written_aside
from eagle3_fast.log import logger, say_once


@dataclass(frozen=True, eq=False)
class VocabMapping:
    """d2t: int64 [D], verifier id = draft id + d2t[draft id]. t2d: bool [V], true = the draft has this verifier token."""

    d2t: Tensor
    t2d: Tensor

    @property
    def draft_vocab_size(self) -> int:
        return len(self.d2t)

    @property
    def verifier_ids(self) -> Tensor:
        """int64 [D]: the verifier id of each draft id, ascending."""
        return torch.arange(len(self.d2t)) + self.d2t

    def coverage(self, token_freq: dict[int, int]) -> float:
        """Share of the supervised tokens that the draft can propose."""
        chosen = set(self.verifier_ids.tolist())
        return sum(count for token, count in token_freq.items() if token in chosen) / max(sum(token_freq.values()), 1)

    def digest(self) -> str:
        """sha256 of both tensors: equal exactly when the mappings are."""
        return hashlib.sha256(self.d2t.numpy().tobytes() + self.t2d.numpy().tobytes()).hexdigest()


def build_mapping(token_freq: dict[int, int], draft_vocab_size: int, target_vocab_size: int) -> tuple[Tensor, Tensor]:
    """The most frequent tokens as (d2t int64 [D], t2d bool [V]); ties go to the smaller id, gaps are filled with 0, 1, 2, ...

    Raises InputError for D > V and for counted ids outside [0, V).
    """
    if not 1 <= draft_vocab_size <= target_vocab_size:
        raise InputError(
            f"draft_vocab_size {draft_vocab_size} is not between 1 and the verifier's vocabulary size {target_vocab_size}; "
            "correct train.draft.draft_vocab_size"
        )
    outside = [token for token in token_freq if not 0 <= token < target_vocab_size]
    if outside:
        raise InputError(
            f"token counts hold id {outside[0]}, outside the verifier's vocabulary of {target_vocab_size}; "
            "they come from another tokenizer: run `prepare` again"
        )
    chosen = sorted(token_freq, key=lambda token: (-token_freq[token], token))[:draft_vocab_size]
    unseen = (token for token in range(draft_vocab_size) if token not in token_freq)
    chosen += islice(unseen, draft_vocab_size - len(chosen))
    ids = torch.tensor(sorted(chosen), dtype=torch.int64)
    t2d = torch.zeros(target_vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(draft_vocab_size), t2d


def checked_mapping(d2t: Tensor, t2d: Tensor, draft_vocab_size: int | None, target_vocab_size: int, source: str) -> VocabMapping:
    """A mapping whose parts agree with each other and with both sizes. `draft_vocab_size` none: whatever d2t holds.

    Raises InputError that names `source`.
    """
    expected = draft_vocab_size or d2t.numel()
    if d2t.dtype != torch.int64 or d2t.shape != (expected,):
        raise InputError(f"{source}: d2t is {_kind(d2t)}, expected int64 [{expected}]; run `vocab` again or correct the paths")
    if t2d.dtype != torch.bool or t2d.shape != (target_vocab_size,):
        raise InputError(f"{source}: t2d is {_kind(t2d)}, expected bool [{target_vocab_size}]; it was made for another verifier")
    if not torch.equal(torch.arange(len(d2t)) + d2t, t2d.nonzero().flatten()):
        raise InputError(f"{source}: d2t and t2d do not name the same tokens; run `vocab` again or correct the paths")
    return VocabMapping(d2t, t2d)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def load_mapping(config: RunConfig, target_vocab_size: int) -> VocabMapping | None:
    """The mapping that a run trains with; none = the verifier's full vocabulary, which is taken only when the config says so.

    In this order: train.draft.d2t_path and t2d_path; full vocabulary when draft_vocab_size is not set or equals
    `target_vocab_size`; the token counts, with which mapping files in the data folder must agree; those files alone.
    Raises InputError when none of these gives a mapping, and for one that does not fit the sizes.
    """
    draft = config.train.draft
    size = draft.draft_vocab_size
    explicit = None
    if draft.d2t_path and draft.t2d_path:
        source = f"{draft.d2t_path} and {draft.t2d_path}"
        explicit = checked_mapping(_read(draft.d2t_path), _read(draft.t2d_path), size, target_vocab_size, source)
        size = explicit.draft_vocab_size
    if size is None or size == target_vocab_size:
        say_once(
            f"draft vocabulary: the verifier's full vocabulary of {target_vocab_size} (draft_vocab_size is {size or 'not set'})"
        )
        return None
    if explicit is not None:
        return explicit
    path, stored = _stored(config, size, target_vocab_size)
    counts = _counts_path(config)
    if not counts.is_file():
        if stored is None or draft.token_freq_path:
            raise InputError(
                f"{counts}: no token counts to build a draft vocabulary of {size} from; run `prepare`, set "
                "train.draft.token_freq_path, name d2t_path and t2d_path, or remove train.draft.draft_vocab_size to train the full "
                "vocabulary"
            )
        say_once(f"draft vocabulary: {path} as it lies, there are no token counts to compare it with")
        return stored
    built = VocabMapping(*build_mapping(load_token_freq(counts), size, target_vocab_size))
    if stored is not None and stored.digest() != built.digest():
        raise InputError(
            f"{path}: was built from other token counts than {counts}; run `vocab` to build it again, or "
            "name both files in train.draft.d2t_path and t2d_path to keep it"
        )
    return built


def vocab(config: RunConfig) -> dict[str, Any] | None:
    """Build the mapping of `train.draft.draft_vocab_size` from the token counts and write it into the data folder.

    Files: `d2t-<D>.npy`, `t2d-<D>.npy` and `vocab-<D>.json`, whose content is returned; none for the full vocabulary.
    """
    shape = verifier_shape(config.train.verifier.verifier_name_or_path, config.train.verifier.trust_remote_code)
    size, counts = config.train.draft.draft_vocab_size, _counts_path(config)
    if size is None or size == shape.vocab_size:
        logger.info("draft vocabulary: the verifier's full vocabulary of %d, there is nothing to build", shape.vocab_size)
        return None
    if not counts.is_file():
        raise InputError(f"{counts}: no token counts; run `prepare` or set train.draft.token_freq_path")
    token_freq = load_token_freq(counts)
    mapping = VocabMapping(*build_mapping(token_freq, size, shape.vocab_size))
    d2t_path, t2d_path = _files(config, size)
    for path, tensor in ((d2t_path, mapping.d2t), (t2d_path, mapping.t2d)):
        with written_aside(path) as partial, partial.open("wb") as file:
            np.save(file, tensor.numpy())
    coverage = mapping.coverage(token_freq)
    manifest = {
        "draft_vocab_size": size,
        "target_vocab_size": shape.vocab_size,
        "distinct_supervised_tokens": len(token_freq),
        "coverage": coverage,
        "digest": mapping.digest(),
    }
    write_json(d2t_path.with_name(f"vocab-{size}.json"), manifest)
    logger.info("%s: %d of %d tokens, %.2f %% of the supervised", d2t_path, size, shape.vocab_size, 100 * coverage)
    return manifest


def load_token_freq(path: Path) -> dict[int, int]:
    """Token counts as `prepare` and speculators write them, `torch.save` of a plain dict. Raises InputError otherwise."""
    try:
        counts = torch.load(path, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise InputError(f"{path}: not a file of token counts ({' '.join(str(error).split())[:80]}); run `prepare` again") from None
    if not isinstance(counts, dict) or not all(isinstance(x, int) for pair in counts.items() for x in pair):
        raise InputError(f"{path}: is no dict of token id to count; run `prepare` again")
    return counts


def _counts_path(config: RunConfig) -> Path:
    return Path(config.train.draft.token_freq_path or Path(config.train.data.data_path) / "token_freq.pt")


def _files(config: RunConfig, size: int) -> tuple[Path, Path]:
    folder = Path(config.train.data.data_path)
    return folder / f"d2t-{size}.npy", folder / f"t2d-{size}.npy"


def _stored(config: RunConfig, size: int, target_vocab_size: int) -> tuple[Path, VocabMapping | None]:
    """The mapping of this size in the data folder, checked, and its d2t file; None where there is none.

    Files that carry the size in their name come first. `d2t.npy` and `t2d.npy` (speculators 0.3 to 0.7) are passed over where they are
    of another size.
    """
    d2t_path, t2d_path = _files(config, size)
    if not d2t_path.is_file() and not t2d_path.is_file():
        d2t_path, t2d_path = d2t_path.with_name("d2t.npy"), t2d_path.with_name("t2d.npy")
        if not d2t_path.is_file():
            return d2t_path, None
        if (found := _read(d2t_path).numel()) != size:
            say_once(f"{d2t_path}: is of a draft vocabulary of {found}, not {size}, and is not used")
            return d2t_path, None
    return d2t_path, checked_mapping(_read(d2t_path), _read(t2d_path), size, target_vocab_size, str(d2t_path))


def _read(path: str | Path) -> Tensor:
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; d2t and t2d go together, run `vocab` again or correct the paths") from None
    except (ValueError, OSError, EOFError, TypeError) as error:
        raise InputError(f"{path}: not a .npy file of numbers ({error}); run `vocab` again or correct the paths") from None
