"""Every verb from prepare to report, in order, on one run file. Each of them goes on where it stopped, so the whole does too."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3_fast.config import RunConfig
from eagle3_fast.log import logger


def run(config: RunConfig) -> None:
    """prepare, vocab, extract, train, export, evaluate, report; ends with the table of results and the folder to serve."""
    from eagle3_fast.evaluate.evaluation import evaluate, table
    from eagle3_fast.export.speculators import export
    from eagle3_fast.extract.states import extract
    from eagle3_fast.prepare.shards import prepare
    from eagle3_fast.prepare.vocab import vocab
    from eagle3_fast.report import report
    from eagle3_fast.train.checkpoint import servable_checkpoint
    from eagle3_fast.train.trainer import train

    verbs: dict[str, Callable[[], Any]] = {
        "prepare": lambda: prepare(config),
        "vocab": lambda: vocab(config),
        "extract": lambda: extract(config),
        "train": lambda: train(config),
        "export": lambda: export(config, servable_checkpoint(Path(config.train.trainer.save_path))),
        "evaluate": lambda: evaluate(config, config.export.output),
    }
    seconds: dict[str, float] = {}
    results: dict[str, Any] = {}
    for number, (verb, work) in enumerate(verbs.items(), start=1):
        logger.info("\n[%d/%d] %s", number, len(verbs) + 1, verb)
        began = time.perf_counter()
        results[verb] = work()
        seconds[verb] = round(time.perf_counter() - began, 1)
    logger.info("\n[%d/%d] report", len(verbs) + 1, len(verbs) + 1)
    page = report(config, seconds)
    table(results["evaluate"])
    logger.info("report: %s", page)
    logger.info("serve:  vllm serve %s", config.export.output)
