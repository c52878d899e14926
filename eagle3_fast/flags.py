"""The flags of `eagle3-fast train`: one for every key of speculators' training configs, `--` and the key with dashes."""

from __future__ import annotations

import argparse
from typing import Any

from eagle3_fast.config import descriptions
from eagle3_fast.spellings import KEYS, Key


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add them all, by group. Their values stay text: the run file's schema reads and judges them as it does those of a file."""
    described = descriptions()
    groups: dict[str, Any] = {}
    for key in KEYS:
        if key.group not in groups:
            groups[key.group] = parser.add_argument_group(key.path.rpartition(".")[0])
        text = described.get(key.here or "", "") or key.why
        groups[key.group].add_argument(
            key.flag, dest=key.path, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **_form(key)
        )
    parser.set_defaults(flags=[key.flag for key in KEYS])


def _form(key: Key) -> dict[str, Any]:
    if key.form == "switch":
        return {"action": "store_true" if key.name.startswith("no_") else argparse.BooleanOptionalAction}
    metavar = key.name.rpartition("_")[2].upper()
    return {"nargs": "+", "metavar": metavar} if key.form == "list" else {"metavar": metavar}


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The flags that stood on the command line, by the dotted key of speculators."""
    paths = {key.path for key in KEYS}
    return {path: value for path, value in vars(options).items() if path in paths}
