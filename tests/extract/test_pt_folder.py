"""A folder of `.pt` samples: which files it has and in which order, how long they are, and of which layers."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from extract.pt_files import sample, write

from eagle3_fast.errors import InputError
from eagle3_fast.extract import pt_folder
from eagle3_fast.extract.pt_folder import PtRows, PtStates, sample_layer_ids
from eagle3_fast.extract.pt_samples import holds_pt_samples, sample_files
from eagle3_fast.extract.store import SampleError


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were opened."""
    names: list[str] = []
    monkeypatch.setattr(
        pt_folder, "open_pt_sample", lambda path, read=pt_folder.open_pt_sample: names.append(path.name) or read(path)
    )
    return names


def folder_of(folder: Path, *lengths: int) -> Path:
    for index, length in enumerate(lengths):
        write(folder / f"data_{index}.pt", length, seed=index)
    return folder


def test_samples_are_found_by_name_in_natural_order(tmp_path: Path) -> None:
    for name in ("data_10.pt", "data_2.pt", "part10/data_0.pt", "part9/data_7.pt", "part9/deep/data_1.pt", "data_0.pt"):
        write(tmp_path / name)
    for name in ("token_freq.pt", "data_x.pt", "data_3.pt.partial", "old_data_4.pt", "data_5.ckpt", "chatgpt"):
        write(tmp_path / name)
    names = [path.relative_to(tmp_path).as_posix() for path in sample_files(tmp_path)]
    assert names == ["data_0.pt", "data_2.pt", "data_10.pt", "part9/data_7.pt", "part9/deep/data_1.pt", "part10/data_0.pt"]


def test_prepared_rows_come_first(tmp_path: Path) -> None:
    assert not holds_pt_samples(tmp_path) and not holds_pt_samples(tmp_path / "absent")
    write(tmp_path / "token_freq.pt")
    assert not holds_pt_samples(tmp_path)
    write(tmp_path / "sub" / "data_0.pt")
    assert holds_pt_samples(tmp_path)
    (tmp_path / "state.json").write_text("{}")
    assert not holds_pt_samples(tmp_path)


def test_rows_are_those_of_a_prepared_folder(tmp_path: Path) -> None:
    rows = PtRows(folder_of(tmp_path, 3, 5))
    assert (len(rows), rows.lengths) == (2, [3, 5])
    assert rows[1] == {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [1, 1, 1, 1, 1]}


def test_the_split_of_0_3(tmp_path: Path) -> None:
    """Its list is shuffled by the global generator, seeded with 0, and cut."""
    rows = PtRows(folder_of(tmp_path, *range(1, 12)), shuffled=True)
    names = [f"data_{index}.pt" for index in range(11)]
    random.seed(0)
    random.shuffle(names)
    assert [path.name for path in rows.files] == names
    assert rows.lengths == [int(name.removeprefix("data_").removesuffix(".pt")) + 1 for name in names]
    assert rows[4]["input_ids"] == list(range(rows.lengths[4] - 1, 2 * rows.lengths[4] - 1))


def test_each_file_is_opened_once(tmp_path: Path, opened: list[str]) -> None:
    folder_of(tmp_path, 3, 5)
    assert PtRows(tmp_path).lengths == [3, 5]
    assert opened == ["data_0.pt", "data_1.pt"]
    write(tmp_path / "data_2.pt", 9)
    write(tmp_path / "data_0.pt", 4)
    opened.clear()
    assert PtRows(tmp_path).lengths == [4, 5, 9]
    assert sorted(opened) == ["data_0.pt", "data_2.pt"]
    (tmp_path / "data_2.pt").unlink()
    assert PtRows(tmp_path).lengths == [4, 5]
    assert json.loads((tmp_path / pt_folder.NOTES).read_text()).keys() == {"data_0.pt", "data_1.pt"}


@pytest.mark.parametrize("change", ["size", "time"])
def test_a_changed_file_is_opened_again(tmp_path: Path, opened: list[str], change: str) -> None:
    path = folder_of(tmp_path, 3, 5) / "data_1.pt"
    PtRows(tmp_path)
    before = path.stat()
    if change == "size":
        write(path, 50)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    opened.clear()
    assert PtRows(tmp_path).lengths == [3, 50 if change == "size" else 5]
    assert opened == ["data_1.pt"]


@pytest.mark.parametrize("notes", ["no JSON", "[]", '{"data_0.pt": 3}'])
def test_broken_notes_are_written_anew(tmp_path: Path, notes: str) -> None:
    folder_of(tmp_path, 3)
    (tmp_path / pt_folder.NOTES).write_text(notes)
    assert PtRows(tmp_path).lengths == [3]
    assert json.loads((tmp_path / pt_folder.NOTES).read_text())["data_0.pt"][2] == 3


def test_a_folder_that_takes_no_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(pt_folder, "write_json", refuse)
    assert PtRows(folder_of(tmp_path, 3)).lengths == [3]


def test_notes_of_the_release_are_taken_when_they_fit(tmp_path: Path, opened: list[str]) -> None:
    folder_of(tmp_path, *range(1, 31))
    notes = {str(index): index + 1 for index in range(30)}
    (tmp_path / "sample_lengths.json").write_text(json.dumps(dict(reversed(notes.items()))))
    assert PtRows(tmp_path).lengths == list(range(1, 31))
    assert len(opened) == 8 and not (tmp_path / pt_folder.NOTES).exists()
    for wrong in ({**notes, "0": 2}, {**notes, "30": 2}, {"0": 1}, [1]):
        (tmp_path / "sample_lengths.json").write_text(json.dumps(wrong))
        assert PtRows(tmp_path).lengths == list(range(1, 31))
    write(tmp_path / "more" / "data_30.pt", 3)
    (tmp_path / "sample_lengths.json").write_text(json.dumps({**notes, "30": 3}))
    assert PtRows(tmp_path).lengths == [*range(1, 31), 3]


def test_a_length_that_is_no_longer_right(tmp_path: Path) -> None:
    rows = PtRows(folder_of(tmp_path, 3, 5))
    write(tmp_path / "data_1.pt", 6)
    with pytest.raises(SampleError, match=r"data_1.pt: is of 6 tokens, not 5 as noted"):
        rows[1]


def test_a_broken_file_keeps_its_place(tmp_path: Path) -> None:
    folder_of(tmp_path, 3, 5, 7)
    (tmp_path / "data_1.pt").write_bytes(b"cut")
    rows = PtRows(tmp_path)
    assert rows.lengths == [3, 0, 7] and len(rows[2]["input_ids"]) == 7
    with pytest.raises(SampleError, match="data_1.pt: not a whole .pt sample"):
        rows.open(1)
    write(tmp_path / "data_1.pt", 5)
    assert PtRows(tmp_path).lengths == [3, 5, 7]


def test_states_come_from_the_files(tmp_path: Path) -> None:
    states = PtStates(PtRows(folder_of(tmp_path, 3, 5)), 1, [3, 4, 5])
    assert torch.equal(states.load(1).states, sample(5, seed=1).states)
    assert torch.equal(states.load(1).token_ids, torch.arange(1, 6))
    assert torch.equal(states.last_states(1, 2), sample(5, seed=1).states[:2, -1])
    with pytest.raises(SampleError, match="data_0.pt: holds 4 layers, 2 aux layers and the last one make 3"):
        PtStates(states.rows, 1, [3, 4]).load(0)
    with pytest.raises(
        InputError, match=r"data_0.pt: is of format 1, engine.data_format_version is 0.*--data-format-version 1"
    ) as caught:
        PtStates(states.rows, 0, [3, 4, 5]).load(0)
    assert not isinstance(caught.value, SampleError)


def describe(folder: Path, layer_ids: object) -> Path:
    (folder / "data_config.json").write_text(json.dumps({"version": "2.0", "hidden_states": {"layer_ids": layer_ids}}))
    return folder


def test_layers_are_numbered_by_what_was_applied(tmp_path: Path) -> None:
    """Layer v of the record is the state after it, v + 1 here; release 0.3 takes [2, n // 2, n - 3] and n - 1."""
    assert sample_layer_ids(tmp_path, None, 32) == [3, 17, 30]
    assert sample_layer_ids(tmp_path, [20, 5], 32) == [5, 20]
    describe(tmp_path, [2, 16, 29, 31])
    assert sample_layer_ids(tmp_path, None, 32) == sample_layer_ids(tmp_path, [17, 3, 30], 32) == [3, 17, 30]
    describe(tmp_path, [0, 7, 31])
    assert sample_layer_ids(tmp_path, None, 32) == [1, 8]
    (tmp_path / "data_config.json").write_text('{"version": "2.0"}')
    assert sample_layer_ids(tmp_path, None, 32) == [3, 17, 30]


@pytest.mark.parametrize(
    ("layer_ids", "asked", "layers", "message"),
    [
        ([2, 16, 29, 31], [2, 16, 29], 32, r"after layers \[3, 17, 30\], train.draft.target_layer_ids is \[2, 16, 29\]"),
        ([2, 16, 29, 30], None, 32, "the last state is that after layer 31 of 32"),
        ([16, 2, 31], None, 32, r"would be \[17, 3\] by data_config.json, which must rise"),
        ([2], None, 32, r"layer_ids is \[2\]"),
        ("all", None, 32, "layer_ids is 'all'"),
        (None, None, 6, r"would be \[3, 4, 4\] by default, which must rise within 0..6; say in train.draft.target_layer_ids"),
        (None, [1, 7], 6, r"would be \[1, 7\] by train.draft.target_layer_ids"),
        (None, [], 6, "must rise"),
    ],
)
def test_layers_that_cannot_be(tmp_path: Path, layer_ids: object, asked: list[int] | None, layers: int, message: str) -> None:
    describe(tmp_path, layer_ids)
    with pytest.raises(InputError, match=message):
        sample_layer_ids(tmp_path, asked, layers)


def test_a_draft_of_other_layers_is_refused(tmp_path: Path) -> None:
    rows = PtRows(describe(folder_of(tmp_path, 3), [2, 16, 29, 31]))
    PtStates(rows, 1, [3, 17, 30])
    with pytest.raises(InputError, match=r"after layers \[3, 17, 30\], the draft reads layers \[2, 16, 29\]"):
        PtStates(rows, 1, [2, 16, 29])
