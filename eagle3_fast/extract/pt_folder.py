"""A folder of `.pt` samples of speculators 0.3 to 0.7 as rows and hidden states: which files, how long, of which layers."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.extract.pt_samples import PtSample, holds_pt_samples, open_pt_sample, sample_files
from eagle3_fast.extract.store import SampleError, check_layers
from eagle3_fast.files import read_json, write_json
from eagle3_fast.log import logger, progress, say_once
from eagle3_fast.prepare.dataset import open_prepared
from eagle3_fast.records import HiddenStates

NOTES = "pt_lengths.json"
"""Our own notes of a folder: size, time of change and length of every file."""
RELEASED_NOTES = "sample_lengths.json"
"""Those of speculators 0.4 to 0.7: {idx: length}."""
DESCRIPTION = "data_config.json"
SPLIT_SEED = 0
"""What speculators 0.3 shuffles its files with before it cuts off those that validate."""
PROBES = 8
"""Files with which notes of others are compared."""


def open_rows(config: RunConfig) -> Any:
    """The rows of a run's data folder, in the order in which they are split: prepared ones, or else `.pt` samples (`PtRows`)."""
    folder = config.train.data.data_path
    return PtRows(folder, shuffled=config.engine.compat == "0.3") if holds_pt_samples(folder) else open_prepared(folder)


class PtRows:
    """A folder of `.pt` samples as rows, in the order of `sample_files`.

    shuffled: as speculators 0.3 shuffles its list of files, so that the last rows are those which validate there.

    A file that cannot be read counts 0 tokens; opening its row says why.
    """

    def __init__(self, folder: str | Path, shuffled: bool = False) -> None:
        self.folder = Path(folder)
        files = sample_files(folder)
        rows = list(zip(files, sample_lengths(self.folder, files), strict=True))
        if shuffled:
            random.Random(SPLIT_SEED).shuffle(rows)
        self.files, self.lengths = [path for path, _ in rows], [length for _, length in rows]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        """`input_ids` and `loss_mask`, as a row of a prepared folder has them. Raises SampleError."""
        sample = self.open(row)
        return {"input_ids": sample.input_ids.tolist(), "loss_mask": sample.loss_mask.tolist()}

    def open(self, row: int) -> PtSample:
        sample = open_pt_sample(self.files[row])
        if len(sample.input_ids) != self.lengths[row]:
            raise SampleError(
                str(sample.path),
                f"is of {len(sample.input_ids)} tokens, not {self.lengths[row]} as noted: it changed, or {RELEASED_NOTES} "
                "beside it is of other files; delete that and start again",
            )
        return sample


class PtStates:
    """The hidden states of a folder of `.pt` samples.

    Args:
        version: the format that the run file names, which also says whether the last states are normed.

    Raises InputError where the folder's own record names other aux layers than `layer_ids`.
    """

    def __init__(self, rows: PtRows, version: int, layer_ids: Sequence[int]) -> None:
        self.rows, self.version, self.n_aux = rows, version, len(layer_ids)
        recorded = recorded_layer_ids(rows.folder)
        if recorded is not None and recorded[:-1] != list(layer_ids):
            raise InputError(
                f"{rows.folder / DESCRIPTION}: the states are those after layers {recorded[:-1]}, the draft reads layers "
                f"{list(layer_ids)}; set train.draft.target_layer_ids to the former, or generate the samples again"
            )

    def load(self, row: int) -> HiddenStates:
        sample = self._open(row)
        return HiddenStates(token_ids=sample.input_ids, states=sample.states())

    def last_states(self, row: int, tokens: int) -> Tensor:
        """[t, G]: the last states of the first `tokens` tokens at most. Raises SampleError."""
        return self._open(row).layers[-1][:tokens].clone()

    def name(self, row: int) -> str:
        """The file of a row."""
        return str(self.rows.files[row])

    def _open(self, row: int) -> PtSample:
        sample = self.rows.open(row)
        if sample.version != self.version:
            raise InputError(
                f"{sample.path}: is of format {sample.version}, engine.data_format_version is {self.version}; set it "
                f"(--data-format-version {sample.version})"
            )
        check_layers(sample.path, len(sample.layers), self.n_aux)
        return sample


# --- how long they are -------------------------------------------------------------------------------------------------


def sample_lengths(folder: Path, files: Sequence[Path]) -> list[int]:
    """Tokens of each file; 0 where it cannot be read.

    speculators' own notes are taken where they name exactly these files and fit a few that are opened. Otherwise every file is opened
    once: what it held is noted in the folder and holds until its size or time of change is another.
    """
    released = _released_lengths(folder, files)
    if released is not None:
        return released
    noted = _noted(folder)
    names = [path.relative_to(folder).as_posix() for path in files]
    stamps = [[status.st_size, status.st_mtime_ns] for status in map(os.stat, files)]
    lengths = {name: noted[name][2] for name, stamp in zip(names, stamps, strict=True) if noted.get(name, [])[:2] == stamp}
    unread = [(name, path) for name, path in zip(names, files, strict=True) if name not in lengths]
    for name, path in progress(unread, desc="lengths of .pt samples", unit=" files") if unread else ():
        try:
            lengths[name] = len(open_pt_sample(path).input_ids)
        except SampleError as error:
            logger.warning("%s", error)
    if unread or noted.keys() - lengths.keys():
        _note(folder, {name: [*stamp, lengths[name]] for name, stamp in zip(names, stamps, strict=True) if name in lengths})
    return [lengths.get(name, 0) for name in names]


def note_lengths(folder: str | Path) -> None:
    """Note the lengths of a folder of `.pt` samples, so that of several processes the others open no file for them."""
    if holds_pt_samples(folder):
        sample_lengths(Path(folder), sample_files(folder))


def _released_lengths(folder: Path, files: Sequence[Path]) -> list[int] | None:
    path = folder / RELEASED_NOTES
    if not path.is_file():
        return None
    lengths, by_index = read_json(path), {file.stem.removeprefix("data_"): file for file in files if file.parent == folder}
    fits = isinstance(lengths, dict) and lengths.keys() == by_index.keys() and len(by_index) == len(files)
    for index in list(by_index)[:: max(len(files) // PROBES, 1)][:PROBES] if fits else ():
        try:
            fits &= len(open_pt_sample(by_index[index]).input_ids) == lengths[index]
        except SampleError:
            continue  # says nothing about the notes
    if not fits or not all(isinstance(length, int) and length >= 0 for length in lengths.values()):
        logger.info("%s: does not fit the files beside it and is not used", path)
        return None
    return [lengths[index] for index in by_index]


def _noted(folder: Path) -> dict[str, list[int]]:
    """Our notes of a folder: [bytes, nanoseconds, tokens] by file; nothing where there are none or they are no notes of ours."""
    try:
        notes = read_json(folder / NOTES)
    except InputError:
        return {}
    whole = isinstance(notes, dict) and all(isinstance(note, list) and len(note) == 3 for note in notes.values())
    return notes if whole else {}


def _note(folder: Path, notes: dict[str, list[int]]) -> None:
    try:
        write_json(folder / NOTES, notes)
    except OSError as error:
        logger.info("%s: lengths of its samples cannot be noted (%s); every run reads them again", folder, error.strerror)


# --- of which layers they are ------------------------------------------------------------------------------------------


def recorded_layer_ids(folder: Path) -> list[int] | None:
    """The layers of a folder's states by its data_config.json, in our numbering; None where it does not say.

    Its layer v is the state after that layer, which we call v + 1 (contract, section 8.1). The last of them is the last state's.
    """
    path = folder / DESCRIPTION
    if not path.is_file():
        return None
    description = read_json(path)
    states = description.get("hidden_states") if isinstance(description, dict) else None
    layers = states.get("layer_ids") if isinstance(states, dict) else None
    if layers is None:
        return None
    if not isinstance(layers, list) or len(layers) < 2 or not all(isinstance(v, int) and v >= 0 for v in layers):
        raise InputError(f"{path}: hidden_states.layer_ids is {layers!r}, must be a list of layer numbers; correct it")
    return [v + 1 for v in layers]


def sample_layer_ids(folder: str | Path, asked: Sequence[int] | None, num_layers: int) -> list[int]:
    """The aux layers of a folder of `.pt` samples: those of its record, else `asked` (the run file's), else the default of release 0.3.

    That default is [3, n // 2 + 1, n - 2]: one layer later than what engines assume of a draft that does not say.
    Raises InputError where record and run file differ, and where the last state is not that after the last layer.
    """
    folder = Path(folder)
    recorded = recorded_layer_ids(folder)
    if recorded is not None and recorded[-1] != num_layers:
        raise InputError(
            f"{folder / DESCRIPTION}: the last state is that after layer {recorded[-1]} of {num_layers}; the verifier's "
            "distribution does not follow from it: generate the samples again with the last layer among layer_ids"
        )
    source, ids = "by default", [3, num_layers // 2 + 1, num_layers - 2]
    if recorded is not None:
        source, ids = f"by {DESCRIPTION}", recorded[:-1]
        if asked is not None and sorted(asked) != ids:
            raise InputError(
                f"{folder / DESCRIPTION}: the states are those after layers {ids}, train.draft.target_layer_ids is {asked}"
            )
    elif asked is not None:
        source, ids = "by train.draft.target_layer_ids", sorted(asked)
    if not ids or ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] <= num_layers:
        raise InputError(
            f"{folder}: the aux layers of its samples would be {ids} {source}, which must rise within 0..{num_layers}; say in "
            "train.draft.target_layer_ids after which layers its states are"
        )
    say_once(f"{folder}: its states are those after layers {ids}, {source}; the draft's config says so to engines")
    return ids
