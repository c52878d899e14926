"""The `eagle3-fast` command: one verb for each stage, all of them reading one run file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from difflib import get_close_matches
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
    words = sys.argv[1:] if arguments is None else arguments
    ours = words[: words.index("--")] if "serve-verifier" in words and "--" in words else words
    options, rest = _parser("train" in words).parse_known_args(ours)
    options.vllm_arguments = words[len(ours) + 1 :]
    configure()
    try:
        _place(options, rest)
        options.run(options)
    except InputError as error:
        print(f"eagle3-fast: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except (Interrupted, KeyboardInterrupt) as stop:
        print(f"eagle3-fast: {stop or 'interrupted'}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _parser(with_flags: bool = False) -> argparse.ArgumentParser:
    """Of all verbs. The flags of `train` load the run file's schema, without which `doctor` can tell what is missing."""
    parser = argparse.ArgumentParser(prog="eagle3-fast", description="Train EAGLE-3 draft models for speculative decoding.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the DeepSpeed launcher says it here and in the environment
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    _add_run_verb(verbs, "regenerate", _regenerate, "let the verifier answer prompts, so that the draft learns its own text")
    _add_run_verb(verbs, "prepare", _prepare, "chats into token rows with loss masks")
    _add_run_verb(verbs, "vocab", _vocab, "choose the draft vocabulary from the counted tokens")
    _add_run_verb(verbs, "extract", _extract, "store the verifier's hidden states of every row")
    _add_serve_verifier(verbs)
    _add_train(verbs, with_flags)
    plan = _add_run_verb(verbs, "plan", _plan, "what disk and GPU memory a run needs, and what fits; nothing is loaded")
    plan.add_argument("--gpus", type=int, default=1, help="how many (1)")
    plan.add_argument("--gpu-memory", help="of each, such as 96GiB; default: that of the GPU present")
    plan.add_argument("--online", action="store_true", help="count the verifier too, for `train --online`")
    _add_run_verb(verbs, "evaluate", _evaluate, "decode prompts speculatively and measure acceptance")
    export = _add_run_verb(verbs, "export", _export, "write the folder that a server loads")
    export.add_argument("--format", choices=("speculators", "sglang"), help="layout, instead of the run file's export.format")
    export.add_argument(
        "--training-state",
        action="store_true",
        help="instead, add to the newest checkpoint what speculators' own trainer needs to go on from it",
    )
    _add_run_verb(verbs, "report", _report, "write the run's HTML report")
    _add_run_verb(verbs, "run", _run, "every verb from prepare to report, in order")
    _add_convert(verbs)
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


def _add_convert(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "a draft of SafeAILab, SpecForge, SGLang or speculators in another layout, with the same logits"
    parser = verbs.add_parser("convert", help=summary, description=summary)
    parser.add_argument("source", metavar="SOURCE", help="folder of the draft, or its id in the Hugging Face cache")
    parser.add_argument("folder", metavar="DEST", type=Path, help="folder to write")
    parser.add_argument("--verifier", required=True, help="folder or cached id of the verifier that the draft was trained for")
    parser.add_argument("--to", required=True, choices=("speculators", "sglang"), help="layout: speculators for vLLM")
    parser.add_argument(
        "--aux-layer-ids", type=int, nargs="+", metavar="J", help="after how many decoder layers aux states are taken, if unknown"
    )
    parser.set_defaults(run=_convert)


def _add_serve_verifier(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "start the vLLM server that `extract` and `train` ask for hidden states"
    serve = _add_run_verb(verbs, "serve-verifier", _serve_verifier, summary)
    serve.usage = (
        "eagle3-fast serve-verifier --config run.yaml [--dry-run] [section.key=value ...] [-- arguments of vllm serve ...]"
    )
    serve.add_argument("--dry-run", action="store_true", help="print its command, and end")


def _add_train(verbs: argparse._SubParsersAction[argparse.ArgumentParser], with_flags: bool) -> None:
    """`train` needs no run file: it takes every flag of speculators' own training command."""
    usage = "eagle3-fast train [--config run.yaml] [flags] [section.key=value ...]"
    parser = verbs.add_parser("train", help="train the draft", description="train the draft", usage=usage, allow_abbrev=False)
    parser.add_argument("--config", type=Path, help="run file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace those of the run file")
    parser.add_argument("--online", action="store_true", help="compute hidden states while training, store none")
    parser.add_argument("--dump-config", action="store_true", help="print the run file that all this amounts to, and end")
    parser.set_defaults(run=_train)
    if with_flags:
        from eagle3_fast.flags import add_flags

        add_flags(parser)


def _place(options: argparse.Namespace, rest: list[str]) -> None:
    """Overrides may stand anywhere among the flags; anything else that no argument took is refused."""
    for word in rest:
        if word.startswith("-") or "=" not in word or "overrides" not in options:
            flag = word.partition("=")[0]
            near = get_close_matches(flag, getattr(options, "flags", ()), n=1)
            raise InputError(f"unknown argument {flag}" + (f"; did you mean {near[0]}?" if near else ""))
        options.overrides.append(word)
    for name, values in vars(options).items():
        if "." in name and isinstance(values, list):  # a flag of several values, which takes every word that follows it
            own = next((at for at, word in enumerate(values) if at and "=" in word), len(values))
            options.overrides += values[own:]
            del values[own:]


def _config(options: argparse.Namespace) -> RunConfig:
    from eagle3_fast.config import load_run_config
    from eagle3_fast.flags import given

    return load_run_config(options.config, options.overrides, given(options))


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


def _serve_verifier(options: argparse.Namespace) -> None:
    from eagle3_fast.extract.vllm_server import serve_verifier

    serve_verifier(_config(options), options.vllm_arguments, options.dry_run)


def _train(options: argparse.Namespace) -> None:
    config = _config(options)
    if options.dump_config:
        from eagle3_fast.config import run_file

        print(run_file(config, whole=True), end="")
        return
    from eagle3_fast.pipeline import refuse_unservable
    from eagle3_fast.train.trainer import train

    refuse_unservable(config)
    train(config, options.online)


def _plan(options: argparse.Namespace) -> None:
    from eagle3_fast.train.plan import plan, recommendation, table

    planned = plan(_config(options), options.gpus, options.gpu_memory, options.online)
    table(planned)
    print(f"recommended: {recommendation(planned)}")


def _export(options: argparse.Namespace) -> None:
    from eagle3_fast.pipeline import export_draft, export_training_state

    if options.format:
        options.overrides = [*options.overrides, f"export.format={options.format}"]
    export = export_training_state if options.training_state else export_draft
    export(_config(options))


def _convert(options: argparse.Namespace) -> None:
    from eagle3_fast.export.convert import convert

    convert(options.source, options.folder, options.verifier, options.to, options.aux_layer_ids)


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
