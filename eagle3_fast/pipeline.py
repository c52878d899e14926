"""Every verb from prepare to report, in order, on one run file. Each of them goes on where it stopped, so the whole does too."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.log import logger


def run(config: RunConfig) -> None:
    """prepare, vocab, extract, train, export, evaluate, report; ends with the table of results and the command that serves the draft."""
    from eagle3_fast.evaluate.evaluation import evaluate, table
    from eagle3_fast.export.engines import serve_command
    from eagle3_fast.extract.states import extract
    from eagle3_fast.prepare.shards import prepare
    from eagle3_fast.prepare.vocab import vocab
    from eagle3_fast.report import report
    from eagle3_fast.train.checkpoint import servable_checkpoint
    from eagle3_fast.train.trainer import train

    refuse_unservable(config)
    verbs: dict[str, Callable[[], Any]] = {
        "prepare": lambda: prepare(config),
        "vocab": lambda: vocab(config),
        "extract": lambda: extract(config),
        "train": lambda: train(config),
        "export": lambda: export_draft(config),
        "evaluate": lambda: evaluate(config, None if config.export.format == "speculators" else servable_checkpoint(checkpoints)),
    }
    checkpoints = Path(config.train.trainer.save_path)
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
    verifier, tokens = config.train.verifier.verifier_name_or_path, config.evaluate.draft_tokens
    logger.info("serve:  %s", serve_command(config.export.format, config.export.output, verifier, tokens))


def export_draft(config: RunConfig) -> Path:
    """Write the servable checkpoint of a run in the layout that it asks for."""
    from eagle3_fast.export import sglang, speculators
    from eagle3_fast.train.checkpoint import servable_checkpoint

    export = sglang.export if config.export.format == "sglang" else speculators.export
    return export(config, servable_checkpoint(Path(config.train.trainer.save_path)))


def export_training_state(config: RunConfig) -> Path:
    """Make the newest checkpoint of a run one that speculators' own trainer goes on from, too."""
    from eagle3_fast.train.checkpoint import is_own, latest_checkpoint
    from eagle3_fast.train.speculators_checkpoint import add_training_state

    save_path = Path(config.train.trainer.save_path)
    folder = latest_checkpoint(save_path)
    if folder is None or not is_own(folder):
        raise InputError(f"{folder or save_path}: not a checkpoint of this trainer; nothing to add to")
    add_training_state(config, folder)
    return folder


def refuse_unservable(config: RunConfig) -> None:
    """Refuse before hours of training what `export` would refuse after them. Raises InputError with the keys to change."""
    if config.export.format != "sglang":
        return
    from eagle3_fast.export.sglang import flat_config
    from eagle3_fast.export.speculators import servable_config, verifier_config
    from eagle3_fast.extract.weights import verifier_shape
    from eagle3_fast.train.start import planned_config

    section = config.train.verifier
    draft = planned_config(config, verifier_shape(section.verifier_name_or_path, section.trust_remote_code), None)
    flat_config(servable_config(draft, config), config.export.dtype, verifier_config(config).get_text_config(decoder=True))
