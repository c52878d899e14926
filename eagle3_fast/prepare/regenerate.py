"""The verifier answers the prompts itself, so that the draft trains on text that the verifier writes.

Every user turn is answered in sequence, each with the verifier's own earlier replies before it. Finished batches are appended
to `<output>.partial`; when all are done the rows go to `output` in prompt order. A kill loses at most the batch in work:
batches are cut from all prompts whether answered or not and each has its own seed, so a resumed run writes the same text.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from eagle3_fast.config import RegenerateSection, RunConfig, VerifierSection
from eagle3_fast.errors import InputError
from eagle3_fast.extract.shape import load_config, local_folder, model_class
from eagle3_fast.extract.weights import verifier_fingerprint
from eagle3_fast.files import read_json, write_json, written_aside
from eagle3_fast.log import logger, progress
from eagle3_fast.precision import arithmetic_dtype
from eagle3_fast.prepare.conversations import read_rows
from eagle3_fast.prepare.tokenizer import load_tokenizer, stop_ids, tokenizer_hash
from eagle3_fast.records import Conversation

WINDOW = 16  # batches that are sorted together by prompt length, so that a batch pads little

Chat = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """One row to answer: `turns` are the messages before each reply (system and first user, then one user turn each)."""

    id: int
    turns: tuple[Chat, ...]
    length: int  # characters of the first turn


@dataclass(frozen=True)
class Reply:
    """What the verifier wrote after one generation prompt.

    `finish_reason`: "stop", "length" (cut at the limit), "empty reply" or "prompt too long".
    """

    text: str
    finish_reason: str
    tokens: int


def regenerate(config: RunConfig) -> dict[str, Any]:
    """Answer `regenerate.prompts` into the JSONL file `regenerate.output`; returns its manifest.

    Rows: `{"id", "messages", "finish_reason"}`; finish_reason is "stop", or "length" when the last reply was cut. The manifest
    `<output>.manifest.json` holds the settings and counts. Raises InputError when the output was begun with other settings.
    """
    section = config.regenerate
    output, partial = Path(section.output), Path(f"{section.output}.partial")
    manifest_path = Path(f"{section.output}.manifest.json")
    prompts, skipped = read_prompts(section.prompts)
    settings = _settings(config, prompts)
    _claim(output, manifest_path, settings)
    if output.is_file():
        logger.info("%s: already complete, nothing to do", output)
        return dict(read_json(manifest_path))

    answered = _repair(partial)
    todo = [batch for batch in enumerate(batches(prompts, section.batch_size)) if any(p.id not in answered for p in batch[1])]
    if answered:
        logger.info("%s: going on after %d answered prompts", partial, len(answered))
    if todo:
        answerer = Answerer.load(config.train.verifier, section)
        _answer(answerer, todo, answered, partial, config.train.seed, total=len(prompts))
    manifest = {"settings": settings, "counts": _finish(partial, output, skipped)}
    write_json(manifest_path, manifest)
    partial.unlink()
    logger.info("%s: %s", output, ", ".join(f"{count} {name}" for name, count in manifest["counts"].items()))
    return manifest


def read_prompts(paths: list[str]) -> tuple[list[Prompt], Counter[str]]:
    """The prompts of all rows in order, and the rows that have none, counted by reason. Assistant turns are dropped."""
    prompts: list[Prompt] = []
    skipped: Counter[str] = Counter()
    for row in read_rows(paths):
        turns = _turns(row) if isinstance(row, Conversation) else ()
        if turns:
            prompts.append(Prompt(len(prompts), turns, sum(len(message["content"]) for message in turns[0])))
        else:
            skipped[getattr(row, "reason", "no user turn to answer")] += 1
    if not prompts:
        raise InputError(f"{', '.join(paths)}: no prompts found ({dict(skipped) or 'the files are empty'})")
    return prompts, skipped


def _turns(conversation: Conversation) -> tuple[Chat, ...]:
    """The messages to send before each reply; none when tool turns make the chat depend on replies that we do not have."""
    turns: list[Chat] = []
    pending: Chat = []
    for message in conversation.messages:
        if message.role == "tool":
            return ()
        if message.role != "assistant":
            pending.append({"role": message.role, "content": message.content})
        if message.role == "user":
            turns.append(pending)
            pending = []
    return tuple(turns)


def batches(prompts: list[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    """Cut the prompts into batches of similar length; the cut depends on nothing but the prompts and the size."""
    window = WINDOW * batch_size
    for start in range(0, len(prompts), window):
        by_length = sorted(prompts[start : start + window], key=lambda prompt: (-prompt.length, prompt.id))
        for first in range(0, len(by_length), batch_size):
            yield by_length[first : first + batch_size]


def _settings(config: RunConfig, prompts: list[Prompt]) -> dict[str, Any]:
    """Everything that decides the text of the replies."""
    section, verifier = config.regenerate, config.train.verifier.verifier_name_or_path
    unused = {"batch_size"} if section.temperature == 0 else set()  # free to change after running out of memory
    text = json.dumps([prompt.turns for prompt in prompts]).encode()
    return {
        "verifier": verifier_fingerprint(verifier),
        "tokenizer": tokenizer_hash(verifier),
        "prompts": hashlib.sha256(text).hexdigest(),
        "seed": config.train.seed,
        **section.model_dump(exclude={"prompts", "output"} | unused),
    }


def _claim(output: Path, manifest_path: Path, settings: dict[str, Any]) -> None:
    """Note the settings before the first reply; refuse to mix replies made under different ones."""
    if not manifest_path.is_file():
        if output.exists():
            raise InputError(f"{output}: exists but was not made by regenerate (no {manifest_path.name}); choose another output")
        write_json(manifest_path, {"settings": settings})
        return
    before = read_json(manifest_path)["settings"]
    changed = [name for name in settings if settings[name] != before.get(name)]
    if changed:
        raise InputError(
            f"{output}: was begun with another {', '.join(changed)}; set regenerate.output to a new file or delete {output}*"
        )


def _repair(partial: Path) -> set[int]:
    """Ids answered so far; a last line that a kill left half written is cut off."""
    if not partial.is_file():
        return set()
    text = partial.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        os.truncate(partial, len(whole))
    return {json.loads(line)["id"] for line in whole.splitlines()}


@torch.inference_mode()
def _answer(
    answerer: Answerer, todo: list[tuple[int, list[Prompt]]], answered: set[int], partial: Path, seed: int, total: int
) -> None:
    """Answer the batches and append each to `partial` when it is done."""
    tokens = 0
    with progress(total=total, initial=len(answered), unit="prompt", desc="regenerate") as bar:
        for index, batch in todo:
            torch.manual_seed(seed + index)
            rows, generated = answerer.chat(batch)
            missing = [row for row in rows if row["id"] not in answered]
            with partial.open("a", encoding="utf-8") as lines:
                lines.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in missing))
                lines.flush()
                os.fsync(lines.fileno())
            tokens += generated
            bar.update(len(missing))
            bar.set_postfix({"tokens/s": round(tokens / bar.format_dict["elapsed"])})


def _finish(partial: Path, output: Path, skipped: Counter[str]) -> dict[str, int]:
    """Write the answered rows in prompt order; returns how many rows were written and left out."""
    rows = sorted((json.loads(line) for line in partial.read_text(encoding="utf-8").splitlines()), key=lambda row: row["id"])
    counts = Counter(row["finish_reason"] for row in rows)
    with written_aside(output) as aside:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows if row["finish_reason"] in ("stop", "length"))
        aside.write_text("".join(lines), encoding="utf-8")
    return dict(counts) | dict(skipped)


class Answerer:
    """The verifier, in bfloat16 where the device computes in it, with its tokenizer, answering batches of chats."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], section: RegenerateSection
    ) -> None:
        self.model: Any = model
        self.tokenizer = tokenizer
        tokenizer.padding_side = "left"
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.stop_ids = stop_ids
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.longest_prompt = math.inf if context is None else context - section.max_new_tokens
        sampling = {"do_sample": True, "temperature": section.temperature, "top_p": section.top_p, "top_k": 0}
        # The model's own generation config would fill every field left open here, so ours replaces it.
        model.generation_config = GenerationConfig(
            max_new_tokens=section.max_new_tokens,
            eos_token_id=sorted(self.stop_ids),
            pad_token_id=tokenizer.pad_token_id,
            **(sampling if section.temperature > 0 else {"do_sample": False}),
        )

    @classmethod
    def load(cls, verifier: VerifierSection, section: RegenerateSection) -> Answerer:
        """Load the verifier on the GPU when there is one. Raises InputError when its folder holds no usable model."""
        folder = local_folder(verifier.verifier_name_or_path)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = arithmetic_dtype(torch.bfloat16, device)
        loader = model_class(load_config(folder, verifier.trust_remote_code))
        try:
            model = loader.from_pretrained(
                folder, dtype=dtype, attn_implementation="sdpa", trust_remote_code=verifier.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise InputError(f"{folder}: the verifier cannot be loaded ({' '.join(str(error).split())})") from None
        tokenizer = load_tokenizer(verifier)
        return cls(model.to(device).eval(), tokenizer, stop_ids(verifier.verifier_name_or_path, tokenizer), section)

    def chat(self, batch: list[Prompt]) -> tuple[list[dict[str, Any]], int]:
        """Answer every user turn of every prompt in sequence; returns the rows and the number of generated tokens."""
        chats: list[Chat] = [[] for _ in batch]
        reasons = ["stop"] * len(batch)
        generated = 0
        for turn in range(max(len(prompt.turns) for prompt in batch)):
            active = [i for i, prompt in enumerate(batch) if turn < len(prompt.turns) and reasons[i] == "stop"]
            for i in active:
                chats[i] += batch[i].turns[turn]
            for i, reply in zip(active, self.reply([chats[i] for i in active]), strict=True):
                chats[i].append({"role": "assistant", "content": reply.text})
                reasons[i] = reply.finish_reason
                generated += reply.tokens
        rows = zip(batch, chats, reasons, strict=True)
        return [{"id": prompt.id, "messages": chat, "finish_reason": reason} for prompt, chat, reason in rows], generated

    def reply(self, chats: list[Chat]) -> list[Reply]:
        """One reply to each chat."""
        prompts = [self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        encoded = self.tokenizer(prompts, add_special_tokens=False)["input_ids"]
        replies = iter(self._generate([ids for ids in encoded if len(ids) <= self.longest_prompt]))
        return [next(replies) if len(ids) <= self.longest_prompt else Reply("", "prompt too long", 0) for ids in encoded]

    def _generate(self, prompts: list[list[int]]) -> list[Reply]:
        if not prompts:
            return []
        inputs = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(self.model.device)
        ids = self.model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        return [self._reply(row) for row in ids[:, inputs["input_ids"].shape[1] :].tolist()]

    def _reply(self, ids: list[int]) -> Reply:
        end = next((i for i, token in enumerate(ids) if token in self.stop_ids), None)
        text = str(self.tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False))
        reason = "empty reply" if not text.strip() else "length" if end is None else "stop"
        return Reply(text, reason, len(ids) if end is None else end + 1)
