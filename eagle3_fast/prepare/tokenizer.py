"""The verifier's own tokenizer: the loaded object, the ids that end a reply, and a hash of the files that decide its output."""

from __future__ import annotations

import hashlib
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eagle3_fast.config import VerifierSection
from eagle3_fast.errors import InputError
from eagle3_fast.extract.shape import local_folder
from eagle3_fast.files import read_json

HASHED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def tokenizer_hash(name_or_path: str) -> str:
    """sha256 over the tokenizer's files, the chat template included. Raises InputError when there are none."""
    folder = local_folder(name_or_path)
    digest = hashlib.sha256()
    found = [folder / name for name in HASHED_FILES if (folder / name).is_file()]
    if not found:
        raise InputError(f"{name_or_path}: holds no tokenizer (tokenizer.json, tokenizer_config.json)")
    for path in found:
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load_tokenizer(verifier: VerifierSection) -> PreTrainedTokenizerBase:
    """The verifier's fast tokenizer with its chat template. Raises InputError when either is missing."""
    folder = local_folder(verifier.verifier_name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=verifier.trust_remote_code)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: its tokenizer cannot be loaded ({' '.join(str(error).split())})") from None
    if not tokenizer.is_fast:
        raise InputError(f"{folder}: its tokenizer gives no character offsets; a fast tokenizer (tokenizer.json) is needed")
    if not tokenizer.chat_template:
        raise InputError(f"{folder}: its tokenizer has no chat template; add chat_template.jinja to the folder")
    return tokenizer


def stop_ids(name_or_path: str, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a turn of the verifier: the tokenizer's end token and those of config.json and generation_config.json."""
    folder = local_folder(name_or_path)
    found: set[Any] = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            found |= set(value) if isinstance(value, list) else {value}
    return frozenset(found - {None})
