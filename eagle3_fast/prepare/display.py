"""One training row for the eye: its text with the supervised spans marked."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.extract.pt_folder import open_rows
from eagle3_fast.prepare.tokenizer import load_tokenizer


def show_row(config: RunConfig, row: int) -> str:
    """`show_mask` of one row of the data folder, counted from 0. Raises InputError when there is no such row."""
    rows = open_rows(config)
    if not 0 <= row < len(rows):
        raise InputError(f"{config.train.data.data_path}: there is no row {row}; it holds rows 0 to {len(rows) - 1}")
    return show_mask(rows[row], load_tokenizer(config.train.verifier))


def show_mask(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, colour: bool | None = None) -> str:
    """The text of a row (`input_ids` and `loss_mask` of equal length), supervised spans marked, and a line of totals.

    Supervised text is green when `colour` is true and stands between ⟦ ⟧ when it is false; none: colour on a terminal.
    """
    ids, mask = list(row["input_ids"]), list(row["loss_mask"])
    colour = sys.stdout.isatty() if colour is None else colour
    text = Text()
    for supervised, span in _spans(ids, mask):
        piece = str(tokenizer.decode(span, clean_up_tokenization_spaces=False))
        if colour:
            text.append(piece, style="bold green" if supervised else "dim")
        else:
            text.append(f"⟦{piece}⟧" if supervised else piece)
    text.append(f"\nsupervised {sum(mask)} of {len(ids)} tokens")
    console = Console(file=StringIO(), force_terminal=colour, color_system="standard" if colour else None, soft_wrap=True)
    with console.capture() as capture:
        console.print(text)
    return capture.get()


def _spans(ids: Sequence[int], mask: Sequence[int]) -> Iterator[tuple[bool, list[int]]]:
    """Runs of equally masked ids."""
    for flag, run in groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0]):
        yield bool(flag), [token for _, token in run]
