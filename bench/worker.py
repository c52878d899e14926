"""One provider of one bench on one case: in this process, or as a process of its own that speaks `measure.serve`'s lines."""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib import import_module

import torch
from measure import Local, Unavailable, serve
from presets import Case

from eagle3_fast.errors import InputError


def start(bench: str, provider: str, case: Case, dtype: str, device: str) -> Local:
    """The provider checked against float64, its inputs in place, warmed up. Raises Unavailable where it cannot run."""
    try:
        return import_module(f"bench_{bench}").make(provider, case, getattr(torch, dtype), device)
    except InputError as refusal:
        raise Unavailable(str(refusal)) from None
    except torch.OutOfMemoryError:
        raise Unavailable("needs more memory than the GPU has") from None


def main(arguments: list[str]) -> None:
    """BENCH PROVIDER CASE (a JSON object) DTYPE DEVICE THREADS"""
    bench, provider, case, dtype, device, threads = arguments
    torch.set_num_threads(int(threads))
    serve(partial(start, bench, provider, Case(**json.loads(case)), dtype, device))


if __name__ == "__main__":
    main(sys.argv[1:])
