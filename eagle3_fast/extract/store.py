"""Sample files: `hs_{row}.safetensors`, as speculators writes and reads them (contract, section 5.2), and their manifest."""

from __future__ import annotations

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
    _check_finite(path, sample.states)
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
    try:
        with safe_open(path, framework="pt") as file:
            _check_header(path, file, expected_ids, n_aux)
            states = file.get_tensor("hidden_states")
            if states.dtype == torch.float8_e4m3fn:  # speculators' fp8 backend: one scale per token
                states = states.bfloat16() * file.get_tensor("hidden_states_scales").bfloat16()
    except FileNotFoundError:
        raise SampleError(str(path), "no such file; run extract") from None
    except SafetensorError as error:
        raise SampleError(str(path), f"not a whole sample file ({error}); delete it and run extract again") from None
    _check_finite(path, states)
    return HiddenStates(token_ids=expected_ids, states=states)


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
    missing = {"hidden_states", "token_ids"} - set(file.keys())
    if missing:
        raise SampleError(str(path), f"holds no {' and no '.join(sorted(missing))}; run extract again")
    shape, ids = file.get_slice("hidden_states").get_shape(), file.get_tensor("token_ids")
    if len(shape) != 3:
        raise SampleError(str(path), f"hidden_states has shape {shape}, must be [tokens, layers, hidden size]")
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
    if shape[1] != n_aux + 1:
        raise SampleError(
            str(path),
            f"holds {shape[1]} layers, {n_aux} aux layers and the last one make {n_aux + 1}; correct target_layer_ids",
        )


def _check_rows(path: Path, states: int, ids: int) -> None:
    if states != ids:
        raise SampleError(str(path), f"has {states} rows of hidden states for {ids} token ids; extract again")


def _check_finite(path: Path, states: Tensor) -> None:
    if states.numel() and not torch.isfinite(torch.stack(states.aminmax())).all():  # aminmax hands on NaN; no copy of the states
        at = int((~states.isfinite()).flatten(1).any(1).nonzero()[0])
        raise SampleError(
            str(path),
            f"the states of token {at} are not finite ({states.dtype} overflows?); "
            "extract with hidden_states_dtype bfloat16 or float32",
        )


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
