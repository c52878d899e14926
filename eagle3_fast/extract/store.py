"""Sample files: `hs_{row}.safetensors`, as speculators writes and reads them (contract, section 5.2), and their manifest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3_fast.errors import InputError
from eagle3_fast.files import read_json, write_json, written_aside
from eagle3_fast.records import HiddenStates

MANIFEST = "extract.json"
FORMAT = 1
OVERFLOW = "extract with hidden_states_dtype bfloat16 or float32"


class SampleError(InputError):
    """One sample cannot be used; the run may go on without it. `sample` is its name."""

    def __init__(self, sample: str, reason: str) -> None:
        super().__init__(f"{sample}: {reason}")
        self.sample = sample


def sample_path(folder: str | Path, row: int) -> Path:
    """File of the sample of a row of the whole prepared dataset."""
    return Path(folder) / f"hs_{row}.safetensors"


def write_sample(folder: str | Path, row: int, sample: HiddenStates) -> None:
    """Write one sample whole or not at all. Raises SampleError for states that are not finite or not one per token."""
    path = sample_path(folder, row)
    _check_rows(path, sample.states.shape[0], len(sample.token_ids))
    check_finite(path, sample.states, OVERFLOW)
    tensors = {"hidden_states": sample.states.contiguous(), "token_ids": sample.token_ids.to(torch.int64).contiguous()}
    with written_aside(path) as partial:
        save_file(tensors, partial)


def read_sample(folder: str | Path, row: int, expected_ids: Tensor, n_aux: int) -> HiddenStates:
    """Read and check one sample.

    Args:
        expected_ids: int64 [T], the row's tokens in the prepared dataset.
        n_aux: aux layers the draft takes; the file must hold one layer more, the last.

    Raises:
        SampleError: the file is missing, damaged, of other tokens or another number of layers, or a value is not finite.
    """
    path = sample_path(folder, row)
    with _opened(path) as file:
        _check_header(path, file, expected_ids, n_aux)
        states = file.get_tensor("hidden_states")
        if states.dtype == torch.float8_e4m3fn:
            states = states.bfloat16() * _scales(path, file, len(states)).bfloat16()
    check_finite(path, states, OVERFLOW)
    return HiddenStates(token_ids=expected_ids, states=states)


def read_last_states(folder: str | Path, row: int, tokens: int) -> Tensor:
    """The last states of a sample's first `tokens` tokens at most, [t, G]; no more of its file is read. Raises SampleError."""
    path = sample_path(folder, row)
    with _opened(path) as file:
        _check_names(path, file)
        stored = file.get_slice("hidden_states")
        states = stored[:tokens, _layers(path, stored.get_shape()) - 1]
        if states.dtype == torch.float8_e4m3fn:
            states = states.bfloat16() * _scales(path, file, stored.get_shape()[0])[:tokens, 0].bfloat16()
    return states


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A sample file; one that is missing or damaged is a SampleError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise SampleError(str(path), "no such file; run extract") from None
    except SafetensorError as error:
        raise SampleError(str(path), f"not a whole sample file ({error}); delete it and run extract again") from None


def is_whole(folder: str | Path, row: int, expected_ids: Tensor, n_aux: int) -> bool:
    """Whether a row's file is there, complete, and of these tokens. Reads its header and ids only."""
    path = sample_path(folder, row)
    try:
        with safe_open(path, framework="pt") as file:
            _check_header(path, file, expected_ids, n_aux)
    except (FileNotFoundError, SafetensorError, SampleError):
        return False
    return True


def _check_header(path: Path, file: Any, expected_ids: Tensor, n_aux: int) -> None:
    """All that can be checked without reading the states. safetensors itself compares header and file size on opening."""
    _check_names(path, file)
    shape, ids = file.get_slice("hidden_states").get_shape(), file.get_tensor("token_ids")
    layers = _layers(path, shape)
    _check_rows(path, shape[0], len(ids))
    if len(ids) != len(expected_ids):
        raise SampleError(
            str(path), f"is of {len(ids)} tokens, the dataset's row has {len(expected_ids)}; prepare and extract again"
        )
    if not torch.equal(ids, expected_ids):
        at = int((ids != expected_ids).nonzero()[0])
        raise SampleError(
            str(path), f"token {at} is {int(ids[at])}, the dataset has {int(expected_ids[at])}; extract again from this dataset"
        )
    check_layers(path, layers, n_aux)


def _check_names(path: Path, file: Any) -> None:
    missing = {"hidden_states", "token_ids"} - set(file.keys())
    if missing:
        raise SampleError(str(path), f"holds no {' and no '.join(sorted(missing))}; run extract again")


def _layers(path: Path, shape: list[int]) -> int:
    if len(shape) != 3 or shape[1] == 0:
        raise SampleError(str(path), f"hidden_states has shape {shape}, must be [tokens, layers, hidden size]")
    return shape[1]


def _scales(path: Path, file: Any, tokens: int) -> Tensor:
    """float32 [T, 1, 1]: what speculators' fp8 backend multiplies all layers of a token by."""
    name = "hidden_states_scales"
    if name not in file.keys():  # noqa: SIM118  # not a dict
        raise SampleError(str(path), f"its hidden states are float8 without {name}; delete it and extract again")
    scales = file.get_tensor(name)
    if scales.dtype != torch.float32 or scales.shape != (tokens, 1, 1):
        found = f"{str(scales.dtype).removeprefix('torch.')} {list(scales.shape)}"
        raise SampleError(str(path), f"{name} is {found}, must be float32 [{tokens}, 1, 1]; delete it and extract again")
    wrong = ~(scales.isfinite() & (scales > 0)).flatten()
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise SampleError(str(path), f"{name} of token {at} is {float(scales[at])}; delete it and extract again")
    return scales


def check_layers(path: Path, layers: int, n_aux: int) -> None:
    """Raise SampleError where a sample's layers are not `n_aux` aux layers and the last one."""
    if layers != n_aux + 1:
        raise SampleError(
            str(path), f"holds {layers} layers, {n_aux} aux layers and the last one make {n_aux + 1}; correct target_layer_ids"
        )


def _check_rows(path: Path, states: int, ids: int) -> None:
    if states != ids:
        raise SampleError(str(path), f"has {states} rows of hidden states for {ids} token ids; extract again")


def check_finite(path: Path, states: Tensor, remedy: str) -> None:
    """Raise SampleError, naming the first token, where a value of states [T, ...] is not finite."""
    if states.numel() and not torch.isfinite(torch.stack(states.aminmax())).all():  # aminmax hands on NaN; no copy of the states
        at = int((~states.isfinite()).flatten(1).any(1).nonzero()[0])
        raise SampleError(str(path), f"the states of token {at} are not finite ({states.dtype} overflows?); {remedy}")


def read_manifest(folder: str | Path) -> dict[str, Any] | None:
    """The folder's `extract.json`, or None: folders that speculators wrote have none."""
    path = Path(folder) / MANIFEST
    return read_json(path) if path.exists() else None


def write_manifest(folder: str | Path, manifest: dict[str, Any]) -> None:
    write_json(Path(folder) / MANIFEST, {"format": FORMAT, **manifest})


def check_manifest(folder: str | Path, expected: dict[str, Any]) -> None:
    """Refuse to mix: raise InputError, naming the keys, where a manifest in `folder` has other values than `expected`."""
    stored = read_manifest(folder)
    if stored is None:
        return
    other = [f"{key} is {stored.get(key)!r}, now {value!r}" for key, value in expected.items() if stored.get(key) != value]
    if other:
        raise InputError(
            f"{folder}: was extracted with other settings ({'; '.join(other)}); give another hidden_states_path or delete it"
        )
