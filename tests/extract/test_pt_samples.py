"""One `.pt` sample: what is stored is read, every kind of damage is named, and nothing in it is ever run."""

from __future__ import annotations

import os
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from extract.pt_files import sample, write

from eagle3_fast.errors import InputError
from eagle3_fast.extract.pt_samples import open_pt_sample
from eagle3_fast.extract.store import SampleError


@pytest.mark.parametrize("version", [0, 1])
def test_both_formats_hold_the_same(tmp_path: Path, version: int) -> None:
    opened = open_pt_sample(write(tmp_path / "data_0.pt", 7, version))
    stored = sample(7)
    assert opened.version == version
    assert torch.equal(opened.input_ids, stored.token_ids)
    assert torch.equal(opened.states(), stored.states)
    assert opened.loss_mask.dtype == torch.int64


def test_any_number_of_aux_states(tmp_path: Path) -> None:
    stored = sample(3, layers=6)
    path = write(tmp_path / "data_0.pt", 3, hidden_states=list(stored.states.unbind(1)))
    assert torch.equal(open_pt_sample(path).states(), stored.states)


STATES = sample(5).states
JOINED, TARGET = STATES[:, :3].flatten(1), STATES[:, 3]


@pytest.mark.parametrize(
    ("version", "changes", "message"),
    [
        (1, {"input_ids": None}, "input_ids is missing"),
        (1, {"loss_mask": None}, "loss_mask is missing"),
        (1, {"hidden_states": None}, "hidden_states is missing"),
        (1, {"hidden_states": STATES}, "hidden_states is Tensor, must be a list"),
        (1, {"hidden_states": [TARGET]}, "must be a list of the states of two layers or more"),
        (1, {"hidden_states": [TARGET, 3]}, "hidden_states is int"),
        (1, {"hidden_states": [TARGET, TARGET.long()]}, "hidden_states is torch.int64"),
        (1, {"hidden_states": [TARGET[None], TARGET[None]]}, "must be [tokens, hidden size]"),
        (1, {"hidden_states": [TARGET, TARGET[:4]]}, "input_ids has shape [5], layer 1 of its hidden states [4, 8]"),
        (1, {"hidden_states": [TARGET, TARGET[:, :4]]}, "layer 1 of its hidden states [5, 4]"),
        (1, {"input_ids": torch.arange(6)}, "input_ids has shape [6], loss_mask [5]"),
        (1, {"input_ids": torch.arange(5)[None]}, "input_ids has shape [1, 5]"),
        (1, {"input_ids": torch.rand(5)}, "input_ids is torch.float32, must be a tensor of integer numbers"),
        (1, {"loss_mask": torch.ones(4).long()}, "loss_mask [4]"),
        (0, {"hidden_state": None}, "hidden_state is missing"),
        (0, {"target": None}, "hidden_states is missing"),
        (0, {"target": TARGET[:4]}, "layer 3 of its hidden states [4, 8]"),
        (0, {"hidden_state": JOINED[:, :-1]}, "hidden_state has shape [5, 23], which is no multiple of target's [5, 8]"),
        (0, {"hidden_state": JOINED[:, :0]}, "no multiple"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, version: int, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "data_3.pt", 5, version, **changes)
    with pytest.raises(SampleError, match=re.escape(message)) as caught:
        open_pt_sample(path)
    assert caught.value.sample == str(path) and "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_values_that_are_not_finite(tmp_path: Path, value: float) -> None:
    states = STATES.clone()
    states[2, 1, 5] = value
    path = write(tmp_path / "data_0.pt", 5, hidden_states=list(states.unbind(1)))
    with pytest.raises(SampleError, match="data_0.pt: the states of token 2 are not finite"):
        open_pt_sample(path).states()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04"])
def test_other_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data_0.pt").write_bytes(content)
    with pytest.raises(SampleError, match="not a whole .pt sample"):
        open_pt_sample(tmp_path / "data_0.pt")
    with pytest.raises(SampleError, match="no such file"):
        open_pt_sample(tmp_path / "data_1.pt")
    torch.save([1, 2], tmp_path / "data_2.pt")
    with pytest.raises(SampleError, match="holds list, not tensors by name"):
        open_pt_sample(tmp_path / "data_2.pt")


def test_a_cut_or_changed_file_is_one_line(tmp_path: Path) -> None:
    """Whatever bytes are other ones: a sample, or a SampleError, or an InputError for a name that is not a tensor's; never more."""
    whole, draw = write(tmp_path / "data_0.pt").read_bytes(), random.Random(0)
    path, refused = tmp_path / "data_1.pt", 0
    warnings.simplefilter("ignore")
    for trial in range(300):
        content = bytearray(whole[: draw.randrange(len(whole))] if trial % 3 == 0 else whole)
        for _ in range(draw.choice([0, 1, 3, 20])):
            if content:
                content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
        try:
            open_pt_sample(path).states()
        except InputError as error:
            refused += 1
            assert str(error).startswith(str(path)) and "\n" not in str(error)
    assert refused > 150


class Harmful:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_a_file_that_would_run_code_is_refused_whatever_the_policy(tmp_path: Path) -> None:
    path = write(tmp_path / "data_0.pt", more=Harmful(tmp_path / "ran"))
    with pytest.raises(InputError, match=r"data_0.pt: would run code when it is read \(posix.mkdir\)") as caught:
        open_pt_sample(path)
    assert not isinstance(caught.value, SampleError) and "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
