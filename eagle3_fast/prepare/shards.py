"""The verb `prepare`: source rows to a folder of token rows, by several processes, resumable, never out of date.

Source rows are cut into numbered shards of fixed size; each is tokenized by one process and written aside, so the result does
not depend on the number of processes and a killed run goes on with the shards that are missing. What lies in the data folder
belongs to a key over everything the rows depend on; another key replaces the rows and everything cheap that was made from them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets.arrow_writer import ArrowWriter

from eagle3_fast.config import PrepareSection, RunConfig, VerifierSection
from eagle3_fast.errors import InputError
from eagle3_fast.extract.shape import verifier_shape
from eagle3_fast.files import read_json, write_json, written_aside
from eagle3_fast.log import logger, progress
from eagle3_fast.prepare.conversations import Row, RowError, Unusable, data_files, read_rows
from eagle3_fast.prepare.dataset import FEATURES, count_supervised, validate_ids
from eagle3_fast.prepare.display import show_mask
from eagle3_fast.prepare.tokenization import ChatTokenizer, cut
from eagle3_fast.prepare.tokenizer import load_tokenizer, stop_ids, tokenizer_hash
from eagle3_fast.records import Conversation, TokenizedExample

FORMAT = 1  # raised when the same sources and settings give other rows than before
SHARD_ROWS = 512  # source rows; part of what a shard is, so changing it needs another FORMAT
PROBED_ROWS = 32
MANIFEST = "prepare.json"


def prepare(config: RunConfig) -> dict[str, Any]:
    """Tokenize `prepare.data` into `train.data.data_path`; returns the manifest, which is also written there as prepare.json.

    Writes a `datasets` Arrow folder (columns of `prepare.dataset.FEATURES`) and token_freq.pt, a dict of token id to the number
    of times it is supervised. Does nothing when the folder already holds the result. Raises InputError for sources that cannot
    be read, when no usable row remains, and when hidden states made from other rows are in the way.
    """
    folder = Path(config.train.data.data_path)
    tokenizer_digest = tokenizer_hash(config.train.verifier.verifier_name_or_path)
    key = preparation_key(config, tokenizer_digest)
    before = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else None
    if before is not None and before["key"] == key and (folder / "state.json").is_file():
        logger.info("%s: already prepared from the same data and settings (%d rows), nothing to do", folder, before["rows"])
        return dict(before)
    _refuse_to_orphan(folder, config.hidden_states_path, ours=before is not None)

    work = folder / f".prepare-{key[:16]}"
    for stale in set(folder.glob(".prepare-*")) - {work}:
        shutil.rmtree(stale)
    work.mkdir(parents=True, exist_ok=True)
    report = _tokenize_all(config, work)
    if report.rows == 0:
        shutil.rmtree(work)
        raise InputError(f"no usable row in {', '.join(config.prepare.data)}: {report.reasons(config.prepare.seq_length)}")
    rows = datasets.concatenate_datasets([datasets.Dataset.from_file(str(path)) for path in sorted(work.glob("shard-*.arrow"))])
    verifier = config.train.verifier
    validate_ids(rows, verifier_shape(verifier.verifier_name_or_path, verifier.trust_remote_code).vocab_size)
    token_freq, tokens = count_supervised(rows)
    manifest = {
        "key": key,
        "rows": len(rows),
        "tokens": tokens,
        "supervised_tokens": sum(token_freq.values()),
        "dropped": dict(sorted(report.dropped.items())),
        "mask_path": report.mask_path,
        "tokenizer": tokenizer_digest,
    }
    _swap_in(rows, token_freq, manifest, folder, work)
    _announce(folder, manifest, report.notes)
    return manifest


def preparation_key(config: RunConfig, tokenizer_digest: str) -> str:
    """sha256 over everything that the rows depend on: contents of sources and tokenizer, settings, library versions."""
    verifier = config.train.verifier
    sources = [[_file_hash(file) for file in data_files(path)] for path in config.prepare.data]
    parts = {
        "format": FORMAT,
        "sources": sources,
        "tokenizer": tokenizer_digest,
        "stop_ids": sorted(stop_ids(verifier.verifier_name_or_path, load_tokenizer(verifier))),
        "settings": config.prepare.model_dump(exclude={"data", "num_workers"}),
        "versions": {name: importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _refuse_to_orphan(folder: Path, hidden_states: Path, ours: bool) -> None:
    """Raise InputError when new rows would replace rows that we did not write, or rows whose hidden states are still there."""
    if not ours and (folder / "state.json").is_file():
        raise InputError(f"{folder}: holds rows that were not written by `prepare`; choose another train.data.data_path")
    if next(hidden_states.glob("hs_*.safetensors"), None) is not None:
        raise InputError(
            f"{hidden_states}: holds hidden states of rows that `prepare` would replace, because data or settings changed; "
            "choose another train.data.data_path or delete that folder"
        )


# --- shards ------------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What happened to the source rows of one shard, or of all."""

    rows: int
    dropped: Counter[str]
    notes: dict[str, str]
    mask_path: str
    longest: int = 0  # tokens of the longest row that was tokenized but dropped

    @classmethod
    def read(cls, path: Path) -> Report:
        fields = read_json(path)
        return cls(**fields | {"dropped": Counter(fields["dropped"])})

    def drop(self, reason: str, example: TokenizedExample | None) -> None:
        self.dropped[reason] += 1
        self.longest = max(self.longest, len(example.input_ids) if example else 0)

    def add(self, other: Report) -> None:
        self.rows += other.rows
        self.dropped.update(other.dropped)
        self.notes = other.notes | self.notes
        self.longest = max(self.longest, other.longest)

    def reasons(self, seq_length: int) -> str:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in self.dropped.most_common(5)) or "the sources are empty"
        lengths = f" (rows of up to {self.longest} tokens, prepare.seq_length is {seq_length})" if self.longest else ""
        return reasons + lengths


class ShardWriter:
    """Tokenizes source rows and writes them as one Arrow file; lives in each process."""

    def __init__(self, verifier: VerifierSection, section: PrepareSection) -> None:
        tokenizer = load_tokenizer(verifier)
        stops = stop_ids(verifier.verifier_name_or_path, tokenizer)
        self.chats = ChatTokenizer(tokenizer, stops, section.supervise_template_reasoning)
        self.section = section

    def example(self, row: Row) -> TokenizedExample:
        """The uncut tokens of a source row. Raises RowError."""
        if isinstance(row, Unusable):
            raise RowError(row.reason)
        return self.chats.tokenize(row) if isinstance(row, Conversation) else row

    def write(self, rows: list[Row], path: Path) -> Report:
        """Write the usable ones of `rows` to `path`, and beside it the report, which says that the shard is whole."""
        done = path.with_suffix(".json")
        if done.is_file():
            return Report.read(done)
        report = Report(0, Counter(), {}, self.chats.mask_path)
        with written_aside(path) as partial, ArrowWriter(path=str(partial), features=FEATURES) as writer:
            for row in rows:
                whole = None
                try:
                    whole = self.example(row)
                    example = cut(whole, self.section.seq_length, self.section.minimum_valid_tokens)
                except RowError as reason:
                    report.drop(str(reason), whole)
                    continue
                writer.write({"input_ids": example.input_ids, "loss_mask": example.loss_mask, "seq_len": len(example.input_ids)})
                report.rows += 1
            writer.finalize()
        report.notes = dict(self.chats.notes)
        write_json(done, vars(report))
        return report

    def probe(self, rows: list[Row]) -> None:
        """Raise InputError with a sample when not one of the first chats has a supervised token."""
        sample = None
        for row in rows:
            try:
                example = self.example(row)
            except RowError:
                continue
            if any(example.loss_mask):
                return
            sample = sample or example
        if sample is not None:
            text = show_mask({"input_ids": sample.input_ids, "loss_mask": sample.loss_mask}, self.chats.tokenizer, colour=False)
            raise InputError(
                f"none of the first {len(rows)} rows has a supervised token (mask from {self.chats.mask_path}); correct the "
                f"chat template; the first of them, supervised text between ⟦ ⟧: {text[-400:].strip()!r}"
            )


_writer: ShardWriter | None = None  # one for each worker process


def _start_worker(verifier: VerifierSection, section: PrepareSection) -> None:
    global _writer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _writer = ShardWriter(verifier, section)


def _write_shard(rows: list[Row], path: Path) -> Report:
    assert _writer is not None
    return _writer.write(rows, path)


def _tokenize_all(config: RunConfig, work: Path) -> Report:
    """Write every shard that `work` lacks; returns the report over all shards."""
    section = config.prepare
    writer = ShardWriter(config.train.verifier, section)
    rows = read_rows(section.data, section.max_samples)
    shards = iter(lambda: list(islice(rows, SHARD_ROWS)), [])
    first = list(islice(shards, 2))
    if first:
        writer.probe(first[0][:PROBED_ROWS])
    numbered = ((shard, work / f"shard-{number:06d}.arrow") for number, shard in enumerate(chain(first, shards)))
    alone = section.num_workers == 1 or len(first) < 2
    here = ((len(shard), writer.write(shard, path)) for shard, path in numbered)
    total = Report(0, Counter(), {}, writer.chats.mask_path)
    with progress(unit="row", desc="prepare") as bar:
        for source_rows, report in here if alone else _in_processes(numbered, config):
            total.add(report)
            bar.update(source_rows)
    return total


def _in_processes(numbered: Iterator[tuple[list[Row], Path]], config: RunConfig) -> Iterator[tuple[int, Report]]:
    """(source rows, report) of each shard in order; few shards are in memory at a time."""
    workers = config.prepare.num_workers
    arguments = (config.train.verifier, config.prepare)
    running: deque[tuple[int, Future[Report]]] = deque()
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, arguments) as pool:
        for shard, path in numbered:
            running.append((len(shard), pool.submit(_write_shard, shard, path)))
            if len(running) > 2 * workers:
                source_rows, report = running.popleft()
                yield source_rows, report.result()
        for source_rows, report in running:
            yield source_rows, report.result()


# --- the finished folder ----------------------------------------------------------------------------------------------


def _swap_in(rows: datasets.Dataset, token_freq: dict[int, int], manifest: dict[str, Any], folder: Path, work: Path) -> None:
    """Replace the rows of `folder` and what was made from them. Without state.json, written last, nobody takes it for rows."""
    final = work / "final"
    shutil.rmtree(final, ignore_errors=True)
    rows.reset_format()  # concatenation has set one, which would be stored
    rows.save_to_disk(str(final))
    torch.save(token_freq, final / "token_freq.pt")
    for pattern in (
        "state.json",
        MANIFEST,
        "data-*.arrow",
        "dataset_info.json",
        "token_freq.pt",
        "[dt]2[td]-*.npy",
        "vocab-*.json",
    ):
        for path in folder.glob(pattern):
            path.unlink()
    for path in final.iterdir():
        if path.name != "state.json":
            os.replace(path, folder / path.name)
    write_json(folder / MANIFEST, manifest)
    os.replace(final / "state.json", folder / "state.json")
    shutil.rmtree(work)


def _announce(folder: Path, manifest: dict[str, Any], notes: dict[str, str]) -> None:
    logger.info(
        "%s: %d rows, %d tokens, %d supervised; mask from %s",
        folder,
        manifest["rows"],
        manifest["tokens"],
        manifest["supervised_tokens"],
        manifest["mask_path"],
    )
    for reason, count in manifest["dropped"].items():
        logger.info("dropped %d rows: %s", count, reason)
    for note in notes.values():
        logger.warning("note: %s", note)
