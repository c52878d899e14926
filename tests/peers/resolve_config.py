"""Run by the peer's own Python: what released speculators makes of training commands.

Each line of standard input is a JSON list of words of its `train` command; the answer is a line of JSON: the resolved config, flat, and its
warnings.
To `null` it answers the default of every key, by dotted place.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

from speculators.train.config import TrainConfig
from speculators.train.config.resolution import resolve


def resolved(words: list[str]) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = resolve(TrainConfig, words)
    return {"values": config.flatten(), "warnings": [str(warning.message) for warning in caught]}


def defaults() -> dict[str, Any]:
    """Without resolution: a null stays a null. Keys of hidden-state backends are no part of the schema; they come from a resolved run."""
    found: dict[str, Any] = {}
    for name, field in TrainConfig.model_fields.items():
        group = field.annotation
        if hasattr(group, "model_fields"):
            fields = group.model_fields.items()  # type: ignore[union-attr]
            found |= {f"train.{name}.{key}": inner.get_default(call_default_factory=True) for key, inner in fields}
        else:
            found[f"train.{name}"] = field.get_default(call_default_factory=True)
    for backend in ("file", "mooncake"):
        words = ["--verifier-name-or-path", "x", "--hidden-states-backend", backend]
        values = resolve(TrainConfig, words).backend_args
        found |= {f"train.backend.{key}": value for key, value in values.items()}
    return found


if __name__ == "__main__":
    for line in sys.stdin:
        words = json.loads(line)
        print(json.dumps(defaults() if words is None else resolved(words)), flush=True)
