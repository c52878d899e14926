"""Model sizes that are benched, and the cases that each is benched on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Model:
    """Sizes of a one-layer draft for a verifier of the same hidden size, and the draft vocabularies to try, the usual one first."""

    hidden: int
    intermediate: int
    heads: tuple[int, int]  # query, key-value
    head_dim: int
    vocabs: tuple[int, ...]
    verifier_vocab: int


MODELS = {
    "smoke": Model(64, 128, (4, 2), 16, (320,), 384),
    "smollm2": Model(576, 1536, (9, 3), 64, (32_000, 8_192, 49_152), 49_152),
    "llama8b": Model(4096, 14_336, (32, 8), 128, (32_000, 128_256), 128_256),
    "glm5": Model(6144, 12_288, (64, 8), 128, (32_000, 154_880), 154_880),
}


@dataclass(frozen=True)
class Case:
    """One packed batch: `rows` rows in documents of `document` rows, the last `supervised` of each counted by the loss."""

    preset: str
    vocab: int
    rows: int = 2048
    ttt_steps: int = 3
    supervised: float = 1.0
    document: int = 1024

    @property
    def model(self) -> Model:
        return MODELS[self.preset]

    def __str__(self) -> str:
        return f"{self.preset}-v{self.vocab}-s{self.rows}-d{self.document}-t{self.ttt_steps}-{round(100 * self.supervised)}pct"

    def record(self) -> dict[str, Any]:
        return {"case": str(self), **asdict(self)}


SMOKE = Case("smoke", 320, rows=192, supervised=0.5, document=96)
"""Runs anywhere in no time; also the case on which every provider is checked against float64 before it is timed."""

AXES: dict[str, tuple[Any, ...]] = {
    "ttt_steps": (3, 7),
    "supervised": (1.0, 0.45),
    "rows": (2_048, 8_192, 32_768),
    "document": (256, 1_024, 2_048, 8_192),
}
"""Values tried one at a time, all else as in the base case; the vocabularies are those of the model."""


def cases(preset: str, axes: Sequence[str] = ("vocab", *AXES)) -> list[Case]:
    """The base case of a preset, then one case for each other value of each axis that fits it."""
    first, *_ = vocabs = MODELS[preset].vocabs
    if preset == "smoke":
        return [SMOKE]
    base = Case(preset, first, rows=2_048 if preset == "smollm2" else 8_192)
    varied = [replace(base, **{axis: value}) for axis in axes for value in {"vocab": vocabs, **AXES}[axis]]
    return list(dict.fromkeys(case for case in [base, *varied] if case.document <= case.rows))
