"""A tiny verifier folder (byte-level tokenizer, chat templates, two-layer Llama) for the tests of `prepare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import CHATML
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eagle3_fast.config import RunConfig

VOCAB_SIZE = 320
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]


@pytest.fixture(scope="session")
def backend() -> str:
    """A byte-level BPE with a few merges, as tokenizer.json text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["user assistant system the reply to a question is an answer\n\n"] * 20, trainer)
    return str(tokenizer.to_str())


@pytest.fixture
def make_tokenizer(backend: str) -> Callable[[str], PreTrainedTokenizerBase]:
    """A tokenizer with the given chat template."""

    def make(template: str) -> PreTrainedTokenizerBase:
        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(backend), bos_token="<s>", eos_token="<|im_end|>", chat_template=template
        )

    return make


@pytest.fixture
def make_verifier(make_tokenizer: Callable[[str], PreTrainedTokenizerBase], tmp_path: Path) -> Callable[..., Path]:
    """A verifier folder without weights, named by its template."""

    def make(template: str = CHATML, name: str = "verifier") -> Path:
        folder = tmp_path / name
        tokenizer = make_tokenizer(template)
        tokenizer.save_pretrained(folder)
        tiny_config().save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def answering_verifier(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier folder with random weights."""
    folder = tmp_path_factory.mktemp("answering")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend), bos_token="<s>", eos_token="<|im_end|>", chat_template=CHATML
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config()).save_pretrained(folder)
    return folder


def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,  # more than the tokenizer uses, as real verifiers pad it
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=2,
        architectures=["LlamaForCausalLM"],
    )


@pytest.fixture
def run_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """A run file in memory; keyword arguments are the sections beside `train` and the groups in it."""

    def make(verifier: Path, draft: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
        train = {
            "verifier": {"verifier_name_or_path": str(verifier)},
            "data": {"data_path": str(tmp_path / "out")},
            "draft": draft or {},
        }
        return RunConfig.model_validate({"train": train, **sections})

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Rows as a JSONL file; returns its path."""

    def write(rows: list[Any], name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write
