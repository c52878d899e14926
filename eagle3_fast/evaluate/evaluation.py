"""The verb `evaluate`: decode prompts outside the training set with and without the draft, and report acceptance and speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from eagle3_fast.config import EvaluateSection, RunConfig, VerifierSection
from eagle3_fast.errors import InputError
from eagle3_fast.evaluate.acceptance import TAU_CONVENTION, acceptance, rate
from eagle3_fast.evaluate.choice import choice
from eagle3_fast.evaluate.decode import Decoded, plain_decode, speculative_decode
from eagle3_fast.evaluate.drafter import check_vocabulary
from eagle3_fast.evaluate.prompts import Prompt, read_prompts
from eagle3_fast.extract.shape import VerifierShape, verifier_shape
from eagle3_fast.extract.verifier import Verifier
from eagle3_fast.files import write_json
from eagle3_fast.log import logger, progress
from eagle3_fast.model.draft import Draft, load_draft
from eagle3_fast.ops import select
from eagle3_fast.prepare.tokenizer import load_tokenizer, stop_ids


@dataclass(frozen=True)
class Comparison:
    """One prompt decoded both ways."""

    prompt: Prompt
    plain: Decoded
    speculative: Decoded


def evaluate(config: RunConfig, draft_folder: str | Path | None = None) -> dict[str, Any]:
    """Evaluate a draft folder on each file of `evaluate.prompts`; writes `evaluate.output` and returns its content.

    The draft is `draft_folder`, by default what `export` wrote; only its files are read. The verifier is
    `train.verifier.verifier_name_or_path`, or where that is empty the one that the draft's config.json names. A rate without
    any case is None, and so is `identical` when sampling. Raises InputError for files that cannot be used and for a draft that
    does not fit the verifier.
    """
    section = config.evaluate
    if not section.prompts:
        raise InputError("evaluate.prompts is empty: name at least one file of prompts outside the training set")
    select(config.ops.impl, config.ops.logits)
    draft_folder = draft_folder or config.export.output
    draft = load_draft(draft_folder)
    check_vocabulary(draft, str(draft_folder))
    named = _verifier_section(config, draft, draft_folder)
    shape = verifier_shape(named.verifier_name_or_path, named.trust_remote_code)
    _check_sizes(draft, shape, draft_folder)
    tokenizer = load_tokenizer(named)
    context = shape.config.get("max_position_embeddings")
    longest = None if context is None else context - section.max_new_tokens
    prompts = {path: read_prompts(path, tokenizer, section.max_prompts, longest) for path in section.prompts}
    ends = stop_ids(named.verifier_name_or_path, tokenizer)
    contest = Contest(matching_verifier(named, draft, section), draft, section, ends)
    result = {
        "draft": str(draft_folder),
        **section.model_dump(include={"draft_tokens", "temperature", "max_new_tokens", "dtype"}),
        "tau_convention": TAU_CONVENTION,
        "prompt_sets": [
            summarise(Path(path).stem, list(contest.run(rows, Path(path).stem, config.train.seed)), section)
            for path, rows in prompts.items()
        ],
    }
    write_json(section.output, result)
    return result


def _verifier_section(config: RunConfig, draft: Draft, draft_folder: str | Path) -> VerifierSection:
    section = config.train.verifier
    path = section.verifier_name_or_path or draft.config.speculators_config.verifier.name_or_path
    if not path:
        raise InputError(f"{draft_folder}/config.json names no verifier: set train.verifier.verifier_name_or_path")
    return section.model_copy(update={"verifier_name_or_path": path})


def _check_sizes(draft: Draft, shape: VerifierShape, draft_folder: str | Path) -> None:
    made_for = draft.config.verifier_vocab_size, draft.config.verifier_hidden_size
    if made_for != (shape.vocab_size, shape.hidden_size):
        raise InputError(
            f"{draft_folder}: made for a verifier of {made_for[0]} tokens and hidden size {made_for[1]}, but {shape.path} has "
            f"{shape.vocab_size} and {shape.hidden_size}; set train.verifier.verifier_name_or_path to the right one"
        )


def matching_verifier(named: VerifierSection, draft: Draft, section: EvaluateSection) -> Verifier:
    """The verifier with the draft's aux layers; the draft takes its device and dtype, but for the rotary table."""
    verifier = Verifier(
        named.verifier_name_or_path,
        draft.config.eagle_aux_hidden_state_layer_ids,
        getattr(torch, section.dtype),
        trust_remote_code=named.trust_remote_code,
    )
    draft.to(verifier.device)
    for parameter in draft.parameters():
        parameter.data = parameter.data.to(verifier.dtype)
    return verifier


@dataclass(frozen=True)
class Contest:
    """Plain against speculative decoding, on the same models and settings."""

    verifier: Verifier
    draft: Draft
    section: EvaluateSection
    stop_ids: frozenset[int]

    def run(self, prompts: Sequence[Prompt], name: str, seed: int) -> Iterator[Comparison]:
        """Every prompt both ways; which way goes first changes from prompt to prompt, so that neither gains from it."""
        for index, prompt in enumerate(progress(prompts, desc=name, unit="prompt")):
            ways = (self.plain, self.speculative) if index % 2 == 0 else (self.speculative, self.plain)
            texts = {way.__name__: way(prompt, seed + index) for way in ways}
            yield Comparison(prompt, **texts)

    def plain(self, prompt: Prompt, seed: int) -> Decoded:
        choose = choice(self.section.temperature, seed, self.verifier.device)
        return plain_decode(self.verifier, prompt.token_ids, self.section.max_new_tokens, choose, self.stop_ids)

    def speculative(self, prompt: Prompt, seed: int) -> Decoded:
        section, choose = self.section, choice(self.section.temperature, seed, self.verifier.device)
        return speculative_decode(
            self.verifier, self.draft, prompt.token_ids, section.draft_tokens, section.max_new_tokens, choose, self.stop_ids
        )


def summarise(name: str, comparisons: Sequence[Comparison], section: EvaluateSection) -> dict[str, Any]:
    """The entry of one prompt set. Greedy texts must be identical; the first pair that is not is noted and logged."""
    greedy = section.temperature == 0
    different = [pair for pair in comparisons if greedy and pair.plain.tokens != pair.speculative.tokens]
    difference = first_difference(different[0]) if different else None
    if difference:
        logger.warning("%s: %d texts differ from plain greedy decoding, the first: %s", name, len(different), difference)
    statistics = acceptance([p for pair in comparisons for p in pair.speculative.passes], section.draft_tokens)
    return {
        "name": name,
        "prompts": len(comparisons),
        "identical": len(comparisons) - len(different) if greedy else None,
        "first_difference": difference,
        **asdict(statistics),
        "plain_tokens_per_s": _speed([pair.plain for pair in comparisons]),
        "speculative_tokens_per_s": _speed([pair.speculative for pair in comparisons]),
    }


def first_difference(pair: Comparison) -> dict[str, Any]:
    """Where two texts part: the prompt's source, the place, and both tokens; None where a text has ended."""
    plain, speculative = pair.plain.tokens, pair.speculative.tokens
    shared = 0
    while plain[shared : shared + 1] == speculative[shared : shared + 1] != []:
        shared += 1
    ways = {"plain": plain, "speculative": speculative}
    return {"source": pair.prompt.source, "token": shared} | {way: next(iter(ids[shared:]), None) for way, ids in ways.items()}


def _speed(texts: list[Decoded]) -> float | None:
    """Tokens per second of decoding, prompts left out."""
    return rate(sum(text.passed_tokens for text in texts), sum(text.seconds for text in texts))


def table(result: dict[str, Any], console: Console | None = None) -> None:
    """Print one line for each prompt set of an evaluation, to standard output if no console is given."""
    ways = "greedy" if result["temperature"] == 0 else f"temperature {result['temperature']:g}"
    view = Table(title=f"{result['draft']}: {result['draft_tokens']} drafts a pass, {ways}, {result['dtype']}")
    view.caption = (
        f"tau: {result['tau_convention']}. αk: drafts 0..k all accepted, of the passes that offered them. "
        "same: texts equal to those decoded without drafts."
    )
    view.add_column("set")
    alphas = [f"α{k}" for k in range(result["draft_tokens"])]
    for heading in ("same", *alphas, "tau", "plain t/s", "draft t/s", "speedup"):
        view.add_column(heading, justify="right")
    for entry in result["prompt_sets"]:
        plain, speculative = entry["plain_tokens_per_s"], entry["speculative_tokens_per_s"]
        view.add_row(
            entry["name"],
            f"{'-' if entry['identical'] is None else entry['identical']}/{entry['prompts']}",
            *(_number(value, 3) for value in (*entry["alpha"], entry["tau"])),
            *(_number(value, 1) for value in (plain, speculative)),
            _number(speculative / plain if plain and speculative else None, 2),
        )
    (console or Console()).print(view)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
