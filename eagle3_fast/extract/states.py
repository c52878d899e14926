"""The verb `extract`: run the verifier over the prepared rows and store its hidden states, one file per row."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.extract.sources import OnlineStates, token_ids
from eagle3_fast.extract.store import (
    MANIFEST,
    check_manifest,
    is_whole,
    read_manifest,
    read_sample,
    write_manifest,
    write_sample,
)
from eagle3_fast.extract.verifier import Verifier, checked_layer_ids
from eagle3_fast.extract.weights import VerifierWeights, verifier_fingerprint, verifier_shape, verifier_weights
from eagle3_fast.files import read_json
from eagle3_fast.log import logger, progress
from eagle3_fast.prepare.dataset import open_prepared, validate_ids
from eagle3_fast.records import HiddenStates

FULL_DISK = 0.95
"""Share of the disk at which writing stops."""
CHECKED_ROWS = 8
CHECKED_TOKENS = 256
"""The self-check looks at the first tokens of rows spread evenly over the dataset."""
LOGIT_TOLERANCE = 0.1
"""Relative (root mean square) distance of logits from the verifier's: bfloat16 is below 0.02, a wrong scale beyond 0.5."""


@dataclass(frozen=True)
class ExtractSummary:
    """What a run of `extract` did. `agreement` is None when every file was there already."""

    folder: str
    rows: int
    written: int
    tokens_written: int
    bytes_written: int
    seconds: float
    agreement: float | None


def extract(config: RunConfig) -> ExtractSummary:
    """Store the hidden states of every prepared row that has no whole file yet.

    Files and manifest are those of `store`. An interrupted run goes on where it stopped.

    Raises:
        InputError: no prepared data, ids outside the verifier's vocabulary, a folder extracted with other settings, too little
            disk, states that are not finite, or states from which the verifier's own head does not give its own tokens.
    """
    started = time.monotonic()
    section, folder = config.train.verifier, config.hidden_states_path
    dataset = open_prepared(config.train.data.data_path)
    lengths = dataset["seq_len"][:]
    shape = verifier_shape(section.verifier_name_or_path, section.trust_remote_code)
    layer_ids = checked_layer_ids(config.train.draft.target_layer_ids, shape.num_hidden_layers)
    dtype: torch.dtype = getattr(torch, config.train.data.hidden_states_dtype)
    validate_ids(dataset, shape.vocab_size)
    manifest = _manifest(config, layer_ids, shape.hidden_size, len(dataset))
    check_manifest(folder, {key: value for key, value in manifest.items() if key != "verifier"})

    rows = [row for row in range(len(dataset)) if not is_whole(folder, row, token_ids(dataset, row), len(layer_ids))]
    tokens = sum(lengths[row] for row in rows)
    token_bytes = (len(layer_ids) + 1) * shape.hidden_size * dtype.itemsize
    _announce(folder, rows, tokens, token_bytes)
    stored = read_manifest(folder)
    if 0 < len(rows) < len(dataset) and stored is None:
        raise InputError(
            f"{folder}: holds samples without {MANIFEST}, of a verifier that is not known; give another hidden_states_path"
        )
    agreement = None
    if rows or (stored is not None and "agreement" not in stored):  # all written, but the check failed or was not reached
        verifier = Verifier(
            shape.path, layer_ids, dtype, config.extract.attn_implementation, trust_remote_code=section.trust_remote_code
        )
        check = SelfCheck(verifier, dataset, section.trust_remote_code, config.extract.minimum_agreement)
        check.fresh()
        write_manifest(folder, manifest)
        _store_all(OnlineStates(verifier, dataset), folder, rows, lengths, config.extract.batch_tokens, token_bytes)
        agreement = check.stored(folder)
        write_manifest(folder, {**manifest, "agreement": agreement})
    summary = ExtractSummary(
        str(folder), len(dataset), len(rows), tokens, tokens * token_bytes, time.monotonic() - started, agreement
    )
    logger.info("extract: " + ", ".join(f"{key} {value}" for key, value in asdict(summary).items()))
    return summary


def _manifest(config: RunConfig, layer_ids: list[int], hidden_size: int, rows: int) -> dict[str, Any]:
    path = config.train.verifier.verifier_name_or_path
    prepare_json = Path(config.train.data.data_path) / "prepare.json"  # absent beside rows of speculators
    prepared = read_json(prepare_json) if prepare_json.exists() else {}
    return {
        "verifier": path,
        "verifier_fingerprint": verifier_fingerprint(path),
        "layer_ids": layer_ids,
        "hidden_size": hidden_size,
        "dtype": config.train.data.hidden_states_dtype,
        "rows": rows,
        "prepare_key": prepared.get("key"),
        "tokenizer": prepared.get("tokenizer"),
    }


def _room(folder: Path) -> int:
    """Bytes that may still be written to `folder`'s disk before it is 95 % full."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(existing)
    return int(usage.free - (1 - FULL_DISK) * (usage.used + usage.free))


def _announce(folder: Path, rows: list[int], tokens: int, token_bytes: int) -> None:
    needed, room = tokens * token_bytes, _room(folder)
    logger.info(f"extract: {len(rows)} rows, {tokens} tokens x {token_bytes} bytes = {needed / 1e9:.2f} GB into {folder}")
    if needed > room:
        raise InputError(
            f"{folder}: the hidden states need {needed / 1e9:.2f} GB, {max(room, 0) / 1e9:.2f} GB may be written before the "
            f"disk is {FULL_DISK:.0%} full; give another extract.hidden_states_path, fewer rows, or train with --online"
        )


def batches(rows: Iterable[int], lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Rows of like length together, the longest first: at most `batch_tokens` tokens with padding, or one longer row alone."""
    batch: list[int] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _store_all(
    source: OnlineStates, folder: Path, rows: list[int], lengths: Sequence[int], batch_tokens: int, token_bytes: int
) -> None:
    written = 0
    with progress(total=sum(lengths[row] for row in rows), unit=" tokens", unit_scale=True, desc="extract") as bar:
        for batch in batches(rows, lengths, batch_tokens):
            tokens = sum(lengths[row] for row in batch)
            if _room(folder) < tokens * token_bytes:
                raise InputError(
                    f"{folder}: the disk is {FULL_DISK:.0%} full after {written} of {len(rows)} rows; make room and run "
                    "extract again, it goes on from there"
                )
            for row, sample in zip(batch, source.load_many(batch), strict=True):
                write_sample(folder, row, sample)
            written += len(batch)
            bar.update(tokens)


# --- does the verifier's own head, on these states, say what the verifier says? --------------------------------------------


def check_states(samples: Sequence[HiddenStates], weights: VerifierWeights, verifier_argmax: Sequence[Tensor]) -> float:
    """Share of positions at which head(norm(last state)) has the verifier's own most likely token.

    Args:
        weights: with norm and the whole head, the head in the dtype in which the verifier ran.
        verifier_argmax: int64 [t] for each sample, the verifier's argmax at its first t <= T positions; -1 is not counted.
    """
    right = total = 0
    for sample, expected in zip(samples, verifier_argmax, strict=True):
        counted = expected >= 0
        last = sample.states[: len(expected), -1][counted]
        right += int((weights.logits(last).argmax(-1) == expected[counted]).sum())
        total += int(counted.sum())
    return right / max(total, 1)


def decided_argmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Argmax of logits [T, V], -1 where the runner-up is within rounding of the states: other batch shapes round otherwise."""
    top = logits.topk(2)
    rounding = torch.finfo(dtype).eps * logits.abs().amax(-1)
    return torch.where(top.values[:, 0] - top.values[:, 1] > rounding, top.indices[:, 0], -1)


class SelfCheck:
    """Compares a few rows' states with what the verifier says about the same tokens, run whole and one row at a time."""

    def __init__(self, verifier: Verifier, dataset: Dataset, trust_remote_code: bool, minimum: float) -> None:
        self.verifier, self.dataset, self.minimum = verifier, dataset, minimum
        self.rows = range(0, len(dataset), max(len(dataset) // CHECKED_ROWS, 1))[:CHECKED_ROWS]
        weights = verifier_weights(verifier.shape.path, names=("norm", "head"), trust_remote_code=trust_remote_code)
        self.weights = replace(weights, head=weights.head.to(verifier.dtype))
        self.expected: list[Tensor] = []

    def fresh(self) -> float:
        """Check states computed as the run will compute them: argmax, and the size of the logits. Raises InputError."""
        prefixes = [token_ids(self.dataset, row)[:CHECKED_TOKENS] for row in self.rows]
        samples = [HiddenStates(*pair) for pair in zip(prefixes, self.verifier.hidden_states(prefixes), strict=True)]
        squared_difference = squared_size = 0.0
        for sample in samples:  # one row of logits over the vocabulary at a time
            theirs, ours = self.verifier.logits(sample.token_ids), self.weights.logits(sample.states[:, -1])
            squared_difference += float((ours - theirs).square().sum())
            squared_size += float(theirs.square().sum())
            self.expected.append(decided_argmax(theirs, self.verifier.state_dtype))
        agreement = self._agreement(samples, "computed")
        distance = (squared_difference / squared_size) ** 0.5
        if not distance <= LOGIT_TOLERANCE:
            raise InputError(
                f"{self.verifier.shape.path}: logits from its head, norm and config are {distance:.0%} away from its own: its "
                f"family ({self.verifier.shape.model_type}) scales or caps logits in a way that is not known here"
            )
        return agreement

    def stored(self, folder: Path) -> float:
        """The same check on what was written, after `fresh`. Raises InputError."""
        n_aux = len(self.verifier.layer_ids)
        samples = [read_sample(folder, row, token_ids(self.dataset, row), n_aux) for row in self.rows]
        return self._agreement(samples, "stored")

    def _agreement(self, samples: Sequence[HiddenStates], what: str) -> float:
        agreement = check_states(samples, self.weights, self.expected)
        if agreement < self.minimum:
            raise InputError(
                f"{what} hidden states give the verifier's own token at {agreement:.1%} of positions, "
                f"extract.minimum_agreement is {self.minimum:.1%}; the last state is not the one before the final norm, or "
                "norm and head are not this verifier's"
            )
        return agreement
