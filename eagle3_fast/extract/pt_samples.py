"""Samples of speculators 0.3 to 0.7: `data_{idx}.pt`, tokens, loss mask and hidden states in one file (contract, section 5.1).

Format 1 holds `hidden_states`, a list of [T, G]: the aux states, then the state before the verifier's final norm. Format 0 holds
`hidden_state` [T, n_aux * G] and `target` [T, G], the state after that norm. A file says itself which it is. Nothing of a file but its
header is read until a tensor is used, and a file that would run code is refused.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_fast.errors import InputError
from eagle3_fast.extract.store import SampleError, check_finite

NAME = re.compile(r"data_(\d+)\.pt")
DAMAGE = (
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    EOFError,
    OSError,
    pickle.UnpicklingError,
)
"""What torch.load raises for files that are cut or changed."""
REMEDY = "delete it or generate it again"


def holds_pt_samples(folder: str | Path) -> bool:
    """Whether a data folder is one of `.pt` samples. Prepared rows in it come first."""
    return not (Path(folder) / "state.json").is_file() and next(_found(Path(folder)), None) is not None


def sample_files(folder: str | Path) -> list[Path]:
    """Files named `data_{idx}.pt`, in subfolders too, sorted by their path from `folder` with numbers as numbers: 2 before 10.

    Other files that end in `pt`, such as token_freq.pt, are none.
    """
    folder = Path(folder)
    return sorted(_found(folder), key=lambda path: _natural(path.relative_to(folder).as_posix()))


def _found(folder: Path) -> Iterator[Path]:
    for where, _, names in os.walk(folder):
        yield from (Path(where, name) for name in names if NAME.fullmatch(name))


def _natural(name: str) -> list[Any]:
    """Text and numbers alternate, so that equal places always compare like with like."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


@dataclass(frozen=True)
class PtSample:
    """One file, mapped into memory. `layers`: aux states, then the last state, [T, G] each."""

    path: Path
    version: int  # 0 or 1
    input_ids: Tensor  # int64 [T]
    loss_mask: Tensor  # int64 [T]
    layers: Sequence[Tensor]

    def states(self) -> Tensor:
        """[T, n_aux + 1, G], read into memory. Raises SampleError where a value is not finite."""
        states = torch.stack(list(self.layers), dim=1)
        check_finite(self.path, states, REMEDY)
        return states


def open_pt_sample(path: Path) -> PtSample:
    """Open a file of either format.

    Raises:
        SampleError: it is missing, damaged, or its tensors do not fit together.
        InputError: it would run code.
    """
    fields = _loaded(path)
    ids, mask = (_tensor(path, fields, name, floating=False) for name in ("input_ids", "loss_mask"))
    if "target" in fields:
        target, joined = (_tensor(path, fields, name, floating=True) for name in ("target", "hidden_state"))
        layers, version = [*_parts(path, joined, target), target], 0
    else:
        layers, version = _list_of_states(path, fields), 1
    for name, value in (("loss_mask", mask), *((f"layer {i} of its hidden states", layer) for i, layer in enumerate(layers))):
        expected = ids.shape if value is mask else (len(ids), layers[0].shape[-1])
        if ids.ndim != 1 or value.shape != expected:
            raise SampleError(str(path), f"input_ids has shape {list(ids.shape)}, {name} {list(value.shape)}; {REMEDY}")
    return PtSample(path, version, ids.long(), mask.long(), layers)


def _loaded(path: Path) -> dict[str, Any]:
    """The tensors of a file, by name. Only plain tensors and containers are taken: unpickling calls nothing."""
    try:
        fields = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise SampleError(str(path), "no such file") from None
    except DAMAGE as error:
        _refuse_code(path)
        raise SampleError(str(path), f"not a whole .pt sample ({' '.join(str(error).split())[:80]}); {REMEDY}") from None
    if not isinstance(fields, dict):
        raise SampleError(str(path), f"holds {type(fields).__name__}, not tensors by name; {REMEDY}")
    return fields


def _refuse_code(path: Path) -> None:
    """Raise InputError, whatever the run does with broken samples, where a file names things to call."""
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except DAMAGE:
        return
    if named:
        raise InputError(f"{path}: would run code when it is read ({', '.join(named)}); samples hold tensors alone: delete it")


def _tensor(path: Path, fields: dict[str, Any], name: str, floating: bool) -> Tensor:
    value = fields.get(name)
    if not isinstance(value, Tensor) or value.is_floating_point() != floating:
        kind = "floating-point" if floating else "integer"
        found = (
            f"is {value.dtype}" if isinstance(value, Tensor) else "is missing" if value is None else f"is {type(value).__name__}"
        )
        raise SampleError(str(path), f"{name} {found}, must be a tensor of {kind} numbers; {REMEDY}")
    return value


def _parts(path: Path, joined: Tensor, target: Tensor) -> Sequence[Tensor]:
    """The aux states of format 0, which lie one after the other on the feature axis."""
    if joined.ndim != 2 or target.ndim != 2 or not target.shape[1] or not joined.shape[1] or joined.shape[1] % target.shape[1]:
        raise SampleError(
            str(path),
            f"hidden_state has shape {list(joined.shape)}, which is no multiple of target's {list(target.shape)}; {REMEDY}",
        )
    return joined.split(target.shape[1], dim=1)


def _list_of_states(path: Path, fields: dict[str, Any]) -> list[Tensor]:
    states = fields.get("hidden_states")
    if not isinstance(states, list | tuple) or len(states) < 2:
        found = "is missing" if states is None else f"is {type(states).__name__}"
        raise SampleError(str(path), f"hidden_states {found}, must be a list of the states of two layers or more; {REMEDY}")
    layers = [_tensor(path, {"hidden_states": layer}, "hidden_states", floating=True) for layer in states]
    if any(layer.ndim != 2 for layer in layers):
        raise SampleError(
            str(path),
            f"hidden_states has shapes {[list(layer.shape) for layer in layers]}, must be [tokens, hidden size]; {REMEDY}",
        )
    return layers
