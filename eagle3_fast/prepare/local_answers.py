"""The verifier, loaded in this process, answers batches of prompts of like length.

Batches are cut from all prompts whether answered or not and each has its own seed, so a resumed run writes the same text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.extract.shape import load_config, local_folder, model_class
from eagle3_fast.extract.weights import verifier_fingerprint
from eagle3_fast.precision import arithmetic_dtype
from eagle3_fast.prepare.answers import Chat, Prompt, Reply, Row, converse
from eagle3_fast.prepare.tokenizer import load_tokenizer, stop_ids, tokenizer_hash

WINDOW = 16  # batches that are sorted together by prompt length, so that a batch pads little


def batches(prompts: list[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    """Cut the prompts into batches of similar length; the cut depends on nothing but the prompts and the size."""
    window = WINDOW * batch_size
    for start in range(0, len(prompts), window):
        by_length = sorted(prompts[start : start + window], key=lambda prompt: (-prompt.length, prompt.id))
        for first in range(0, len(by_length), batch_size):
            yield by_length[first : first + batch_size]


class LocalAnswerer:
    """The verifier, in bfloat16 where the device computes in it, with its tokenizer."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], config: RunConfig
    ) -> None:
        section = config.regenerate
        self.model: Any = model
        self.tokenizer = tokenizer
        self.batch_size = section.batch_size
        self.seed = config.train.seed
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

    @staticmethod
    def settings(config: RunConfig) -> dict[str, Any]:
        """Of the weights, the tokenizer and sampling. Raises InputError when the verifier is not in reach."""
        section, verifier = config.regenerate, config.train.verifier.verifier_name_or_path
        # Greedy batches may be cut otherwise, after running out of memory; sampled ones draw from the seed of their batch.
        decisive = {"max_new_tokens", "temperature", "top_p"} | ({"batch_size"} if section.temperature > 0 else set())
        return {
            "verifier": verifier_fingerprint(verifier),
            "tokenizer": tokenizer_hash(verifier),
            "seed": config.train.seed,
            **section.model_dump(include=decisive),
        }

    @classmethod
    def load(cls, config: RunConfig) -> LocalAnswerer:
        """Load the verifier on the GPU when there is one. Raises InputError when its folder holds no usable model."""
        verifier = config.train.verifier
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
        return cls(model.to(device).eval(), tokenizer, stop_ids(verifier.verifier_name_or_path, tokenizer), config)

    def answers(self, prompts: list[Prompt], answered: set[int]) -> Iterator[tuple[list[Row], int]]:
        """The rows that each batch lacks, and the tokens of the whole batch."""
        for index, batch in enumerate(batches(prompts, self.batch_size)):
            if all(prompt.id in answered for prompt in batch):
                continue
            torch.manual_seed(self.seed + index)
            rows, tokens = converse(batch, self.reply)
            yield [row for row in rows if row["id"] not in answered], tokens

    def reply(self, chats: list[Chat]) -> list[Reply]:
        """One reply to each chat."""
        prompts = [self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        encoded = self.tokenizer(prompts, add_special_tokens=False)["input_ids"]
        replies = iter(self._generate([ids for ids in encoded if len(ids) <= self.longest_prompt]))
        return [next(replies) if len(ids) <= self.longest_prompt else Reply("", "prompt too long", 0) for ids in encoded]

    @torch.inference_mode()
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
