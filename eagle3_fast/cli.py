"""The `eagle3-fast` command: one verb for each stage, all of them reading one run file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_fast import __version__
from eagle3_fast.errors import InputError, Interrupted
from eagle3_fast.log import configure

if TYPE_CHECKING:
    from eagle3_fast.config import RunConfig

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: everything is saved, run the same command to go on


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; bad input gives one line on standard error and exit code 2, an interrupted run exit code 75."""
    options = _parser().parse_args(arguments)
    configure()
    try:
        options.run(options)
    except InputError as error:
        print(f"eagle3-fast: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except (Interrupted, KeyboardInterrupt) as stop:
        print(f"eagle3-fast: {stop or 'interrupted'}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eagle3-fast", description="Train EAGLE-3 draft models for speculative decoding.")
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    _add_run_verb(verbs, "regenerate", _regenerate, "let the verifier answer prompts, so that the draft learns its own text")
    _add_run_verb(verbs, "prepare", _prepare, "chats into token rows with loss masks")
    _add_run_verb(verbs, "vocab", _vocab, "choose the draft vocabulary from the counted tokens")
    _add_run_verb(verbs, "extract", _extract, "store the verifier's hidden states of every row")
    train = _add_run_verb(verbs, "train", _train, "train the draft")
    train.add_argument("--online", action="store_true", help="compute hidden states while training, store none")
    _add_run_verb(verbs, "evaluate", _evaluate, "decode prompts speculatively and measure acceptance")
    _add_run_verb(verbs, "export", _export, "write the folder that a server loads")
    _add_run_verb(verbs, "report", _report, "write the run's HTML report")
    _add_run_verb(verbs, "run", _run, "every verb from prepare to report, in order")
    check = verbs.add_parser("check", help="verify an exported draft folder")
    check.add_argument("folder", type=Path)
    check.set_defaults(run=_check)
    doctor = verbs.add_parser("doctor", help="what this machine can train on, what is wrong, and how to repair it")
    doctor.set_defaults(run=_doctor)
    show = _add_run_verb(verbs, "show-mask", _show_mask, "print a prepared row with its supervised spans coloured")
    show.add_argument("--row", type=int, default=0)
    return parser


def _add_run_verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], None],
    summary: str,
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=summary, description=summary)
    parser.add_argument("--config", required=True, type=Path, help="run file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace those of the run file")
    parser.set_defaults(run=run)
    return parser


def _config(options: argparse.Namespace) -> RunConfig:
    from eagle3_fast.config import load_run_config

    return load_run_config(options.config, options.overrides)


def _regenerate(options: argparse.Namespace) -> None:
    from eagle3_fast.prepare.regenerate import regenerate

    regenerate(_config(options))


def _prepare(options: argparse.Namespace) -> None:
    from eagle3_fast.prepare.shards import prepare

    prepare(_config(options))


def _vocab(options: argparse.Namespace) -> None:
    from eagle3_fast.prepare.vocab import vocab

    vocab(_config(options))


def _extract(options: argparse.Namespace) -> None:
    from eagle3_fast.extract.states import extract

    extract(_config(options))


def _train(options: argparse.Namespace) -> None:
    from eagle3_fast.train.trainer import train

    train(_config(options), options.online)


def _export(options: argparse.Namespace) -> None:
    from eagle3_fast.export.speculators import export
    from eagle3_fast.train.checkpoint import servable_checkpoint

    config = _config(options)
    export(config, servable_checkpoint(Path(config.train.trainer.save_path)))


def _evaluate(options: argparse.Namespace) -> None:
    from eagle3_fast.evaluate.evaluation import evaluate, table

    table(evaluate(_config(options)))


def _report(options: argparse.Namespace) -> None:
    from eagle3_fast.report import report

    print(report(_config(options)))


def _run(options: argparse.Namespace) -> None:
    from eagle3_fast.pipeline import run

    run(_config(options))


def _check(options: argparse.Namespace) -> None:
    from eagle3_fast.export.check import check

    print(check(options.folder))


def _doctor(options: argparse.Namespace) -> None:
    from eagle3_fast.doctor import doctor

    if not doctor():
        sys.exit(EXIT_BAD_INPUT)


def _show_mask(options: argparse.Namespace) -> None:
    from eagle3_fast.prepare.display import show_row

    print(show_row(_config(options), options.row))
