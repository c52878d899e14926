"""The exported draft in real vLLM: does it load, change no token, and accept as often as our own evaluation says?

Run by `make test-vllm`, inside an environment of its own that holds vLLM and not this package; only files pass between the two:

    python tests/vllm/served.py --draft output/draft --prompts prompts.jsonl --evaluation output/evaluation.json

The verifier is the one that the draft's config.json names. Prompts are JSONL rows with `messages` (up to the last user turn) or with
`prompt`; drafted tokens, new tokens and the expected acceptance come from evaluation.json. Exit code 1 means a miss:

* text with speculation differs from text without it;
* the share of passes that accept drafted position k differs from ours by more than the tolerance;
* `vllm serve DRAFT`, which names no verifier, resolves to another model than the verifier or to another draft.
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
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, EngineArgs, SamplingParams

Speculation = dict[str, Any]


def read_prompts(path: Path) -> list[list[dict[str, str]]]:
    """Every row's messages up to its last user turn, as `apply_chat_template` takes them."""
    chats = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        last = max(index for index, message in enumerate(messages) if message["role"] == "user")
        chats.append([{"role": m["role"], "content": m["content"]} for m in messages[: last + 1]])
    return chats


def expected_set(evaluation: dict[str, Any], name: str) -> dict[str, Any]:
    """The prompt set of that name; a file that holds one set needs no name."""
    sets = {item["name"]: item for item in evaluation["prompt_sets"]}
    return next(iter(sets.values())) if len(sets) == 1 else sets[name]


def decode(
    verifier: str, dtype: str, chats: list[Any], max_new_tokens: int, speculation: Speculation | None
) -> tuple[list[Any], dict]:
    """Greedy token ids of every chat, and vLLM's counters by name."""
    llm = LLM(
        model=verifier,
        dtype=dtype,
        max_model_len=2048,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculation,
    )
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens)
    outputs = llm.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
    counters = {metric.name: getattr(metric, "values", getattr(metric, "value", None)) for metric in llm.get_metrics()}
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return [list(output.outputs[0].token_ids) for output in outputs], counters


def served_as(draft: Path, dtype: str) -> Any:
    """The engine config that `vllm serve DRAFT` ends in; nothing is loaded."""
    return EngineArgs(model=str(draft), dtype=dtype, max_model_len=2048, enforce_eager=True).create_engine_config()


def resolution_faults(draft: Path, verifier: str, tokens: int, dtype: str) -> list[str]:
    config = served_as(draft, dtype)
    found = {
        "model": (config.model_config.model, verifier),
        "tokenizer": (config.model_config.tokenizer, verifier),
        "draft": (config.speculative_config.model, str(draft)),
        "method": (config.speculative_config.method, "eagle3"),
        "drafted tokens": (config.speculative_config.num_speculative_tokens, tokens),
    }
    return [f"vllm serve {draft}: {what} is {have!r}, not {want!r}" for what, (have, want) in found.items() if have != want]


def acceptance(counters: dict[str, Any]) -> list[float]:
    """Share of verifier passes that accepted drafted position k."""
    passes = counters["vllm:spec_decode_num_drafts"]
    return [accepted / passes for accepted in counters["vllm:spec_decode_num_accepted_tokens_per_pos"]]


def table(measured: list[float], expected: list[float], counters: dict[str, Any]) -> str:
    rows = [f"{'position':>8} {'vLLM':>7} {'ours':>7} {'differs':>8}"]
    rows += [
        f"{k:>8} {ours[0]:>7.3f} {ours[1]:>7.3f} {ours[0] - ours[1]:>+8.3f}"
        for k, ours in enumerate(zip(measured, expected), 1)
    ]
    passes = counters["vllm:spec_decode_num_drafts"]
    rows.append(f"tau (tokens per verifier pass, its own included): vLLM {1 + sum(measured):.3f}, ours {1 + sum(expected):.3f}")
    return "\n".join([*rows, f"{passes} passes, {counters['vllm:spec_decode_num_accepted_tokens']} drafted tokens accepted"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True, help="exported folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file that evaluation.json was measured on")
    parser.add_argument("--evaluation", type=Path, required=True, help="evaluation.json of `evaluate`")
    parser.add_argument("--dtype", default="float32", help="dtype of verifier and draft; float32 makes ties rare")
    parser.add_argument("--tolerance", type=float, default=0.05, help="largest difference of a position's acceptance")
    options = parser.parse_args()

    evaluation = json.loads(options.evaluation.read_text(encoding="utf-8"))
    expected = expected_set(evaluation, options.prompts.stem)
    config = json.loads((options.draft / "config.json").read_text(encoding="utf-8"))
    verifier = config["speculators_config"]["verifier"]["name_or_path"]
    own_tokens = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    chats, limit = read_prompts(options.prompts)[: expected["prompts"]], evaluation["max_new_tokens"]

    faults = resolution_faults(options.draft, verifier, own_tokens, options.dtype)
    plain, _ = decode(verifier, options.dtype, chats, limit, None)
    speculation = {"model": str(options.draft), "num_speculative_tokens": evaluation["draft_tokens"], "method": "eagle3"}
    drafted, counters = decode(verifier, options.dtype, chats, limit, speculation)

    same = sum(a == b for a, b in zip(plain, drafted))
    print(f"{same} of {len(chats)} outputs are the same with and without speculation")
    if same < len(chats):
        faults.append(f"speculation changed {len(chats) - same} of {len(chats)} outputs")
    measured = acceptance(counters)
    print(table(measured, expected["alpha"], counters))
    faults += [
        f"position {k}: vLLM accepts {have:.3f}, our evaluation {want:.3f}"
        for k, (have, want) in enumerate(zip(measured, expected["alpha"], strict=True), 1)
        if abs(have - want) > options.tolerance
    ]
    print("\n".join(f"MISS {fault}" for fault in faults) or "vLLM agrees")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
