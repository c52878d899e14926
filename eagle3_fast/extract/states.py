"""The verb `extract`: store the verifier's hidden states of the prepared rows, one file per row."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.extract.backends import Backend, InProcess, Served
from eagle3_fast.extract.self_check import SelfCheck
from eagle3_fast.extract.sources import OnlineStates, token_ids
from eagle3_fast.extract.store import (
    MANIFEST,
    SampleError,
    check_manifest,
    is_whole,
    read_manifest,
    write_manifest,
    write_sample,
)
from eagle3_fast.extract.verifier import Verifier, checked_layer_ids
from eagle3_fast.extract.vllm_states import VllmStates
from eagle3_fast.extract.weights import verifier_fingerprint, verifier_shape, verifier_weights
from eagle3_fast.files import read_json
from eagle3_fast.log import logger, progress
from eagle3_fast.prepare.dataset import open_prepared, validate_ids
from eagle3_fast.records import HiddenStates

FULL_DISK = 0.95
"""Share of the disk at which writing stops."""


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
            disk, states that are not finite, states from which the verifier's own head does not give its own tokens, or a server
            that is gone or gave no states for some rows.
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
        backend = _backend(config, dataset, layer_ids)
        check = _self_check(config, backend, dataset, len(layer_ids))
        check.fresh()
        write_manifest(folder, manifest)
        _store_all(backend, folder, rows, lengths, token_bytes)
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


def _backend(config: RunConfig, dataset: Dataset, layer_ids: list[int]) -> Backend:
    section = config.train.verifier
    if config.extract.backend == "vllm":
        return Served(VllmStates(config, dataset, layer_ids))
    dtype: torch.dtype = getattr(torch, config.train.data.hidden_states_dtype)
    verifier = Verifier(
        section.verifier_name_or_path, layer_ids, dtype, config.extract.attn_implementation, section.trust_remote_code
    )
    return InProcess(OnlineStates(verifier, dataset), config.extract.batch_tokens)


def _self_check(config: RunConfig, backend: Backend, dataset: Dataset, n_aux: int) -> SelfCheck:
    section = config.train.verifier
    weights = verifier_weights(section.verifier_name_or_path, names=("norm", "head"), trust_remote_code=section.trust_remote_code)
    weights = replace(weights, head=weights.head.to(backend.dtype))
    return SelfCheck(partial(backend.testify, weights=weights), dataset, weights, n_aux, config.extract.minimum_agreement)


def _store_all(backend: Backend, folder: Path, rows: list[int], lengths: Sequence[int], token_bytes: int) -> None:
    written: list[int] = []
    unusable: list[SampleError] = []

    def write(row: int, sample: HiddenStates) -> None:
        if _room(folder) < lengths[row] * token_bytes:
            raise InputError(
                f"{folder}: the disk is {FULL_DISK:.0%} full after {len(written)} of {len(rows)} rows; make room and run "
                "extract again, it goes on from there"
            )
        write_sample(folder, row, sample)
        written.append(row)

    with progress(total=sum(lengths[row] for row in rows), unit=" tokens", unit_scale=True, desc="extract") as bar:
        for row, error in backend.store(rows, lengths, write):
            bar.update(lengths[row])
            if error is not None:
                logger.warning("left out: %s", error)
                unusable.append(error)
    if unusable:
        raise InputError(
            f"{folder}: {len(unusable)} of {len(rows)} rows have no hidden states, the first: {unusable[0]}; run extract again for "
            "them, or train with train.generation.on_missing skip"
        )
