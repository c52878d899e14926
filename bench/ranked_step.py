"""A whole optimizer step on all its ranks: CASE (a JSON object) DTYPE RANKS STAGE.

The first rank starts the others and speaks `measure.serve`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from batches import packed_batch
from bench_train_step import new_draft
from measure import Local, serve
from presets import Case

from eagle3_fast.config import RunConfig
from eagle3_fast.model.ttt import Objective, plan_rows
from eagle3_fast.train.engine import start_engine
from eagle3_fast.train.ranks import Ranks, join


def step(case: Case, dtype: str, stage: int, ranks: Ranks) -> Callable[[], Any]:
    """One packed batch of `case` on every rank: forward, backward, Muon. Alone and without a launcher it is the plain engine's."""
    data = {"verifier": {"verifier_name_or_path": "none"}, "data": {"hidden_states_dtype": dtype}}
    config = RunConfig.model_validate({"train": data, "deepspeed": {"stage": stage}})
    objective = Objective(ttt_steps=case.ttt_steps)
    draft, batch = new_draft(case, "cpu"), packed_batch(case, getattr(torch, dtype), "cpu")
    engine = start_engine(draft, objective, config, planned_steps=1000, ranks=ranks)
    plan = plan_rows(batch, objective)

    def call() -> None:
        counts = ranks.sum(plan.counts)
        engine.backward(engine.forward(batch, plan, counts).loss, last=True)
        engine.step()

    return call


def lead(case: Case, dtype: str, stage: int, ranks: Ranks) -> Local:
    """The first rank: every call takes the others along."""
    call = step(case, dtype, stage, ranks)
    return Local(lambda: (ranks.on_first(lambda: True), call()), "cpu")


def follow(case: Case, dtype: str, stage: int, ranks: Ranks) -> None:
    call = step(case, dtype, stage, ranks)
    try:
        while ranks.on_first(lambda: True):
            call()
    except RuntimeError:  # the first rank has closed
        return


def main(arguments: list[str]) -> None:
    case, dtype, size, stage = Case(**json.loads(arguments[0])), arguments[1], int(arguments[2]), int(arguments[3])
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        return follow(case, dtype, stage, join(60))
    if size == 1:
        return serve(lambda: lead(case, dtype, stage, Ranks()))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    command = [sys.executable, *sys.orig_argv[1:]]
    streams = {"stdin": subprocess.DEVNULL, "stdout": sys.stderr}  # the first rank's own carry the protocol
    places = [{**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(1, size)]
    others = [subprocess.Popen(command, env=place, **streams) for place in places]
    os.environ.update(RANK="0", LOCAL_RANK="0")
    try:
        serve(lambda: lead(case, dtype, stage, join(60)))
    finally:
        for other in others:
            other.kill()


if __name__ == "__main__":
    main(sys.argv[1:])
