"""Hidden states out of a real vLLM server: the same as this process computes, and a training that a restart of the server does not touch.

Run by `make test-vllm-live` from the repository root, in this package's environment; vLLM lies in one of its own:

    python tests/vllm/live.py --vllm .venv-vllm/bin

The verifier is SmolLM2-135M on the CPU (`examples/smollm2.py`), the run file configs/short.yaml made shorter. Exit code 1 means a miss:

* `extract` through the server is further than rounding from the states that this process computes in float32: mean cosine of any
  layer, any token twice as far off as the worst of this process in the server's dtype, or the tokens that the last state gives;
* an online run of some steps, in whose middle the server is killed and started again, is not the offline run: other tokens in some
  batch, or losses that differ by more than rounding (vLLM's states depend, by rounding, on what else is in its batch).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import requests
import torch

from eagle3_fast.config import RunConfig, load_run_config
from eagle3_fast.extract.sources import token_ids
from eagle3_fast.extract.states import extract
from eagle3_fast.extract.store import read_sample
from eagle3_fast.extract.weights import verifier_weights
from eagle3_fast.log import configure
from eagle3_fast.prepare.dataset import open_prepared
from eagle3_fast.prepare.shards import prepare
from eagle3_fast.prepare.vocab import vocab
from eagle3_fast.train.trainer import Trainer

RUN_FILE = "configs/short.yaml"
ROWS, TOKENS = 40, 192
COSINE, SAME_TOKEN, SAME_LOSS = 0.999, 0.99, 0.03
PATIENCE = 300.0  # seconds for the server to start


class Server:
    """`eagle3-fast serve-verifier`, with everything that it starts in a process group of its own."""

    def __init__(self, words: list[str], vllm: Path, url: str, log: Path) -> None:
        self.words, self.url, self.log = words, url, log
        self.environment = {
            **os.environ,
            "PATH": f"{vllm.absolute()}{os.pathsep}{os.environ['PATH']}",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        }

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "eagle3_fast",
                    "serve-verifier",
                    *self.words,
                    "--",
                    "--max-model-len",
                    "1024",
                    "--enforce-eager",
                ],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        began = time.monotonic()
        while True:
            try:
                if requests.get(f"{self.url}/health", timeout=2).ok:
                    print(f"the server is up after {time.monotonic() - began:.0f} s")
                    return
            except requests.RequestException:
                pass
            if self.process.poll() is not None or time.monotonic() - began > PATIENCE:
                self.kill()
                raise SystemExit(f"the server did not start; see {self.log}")
            time.sleep(1)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def overrides(folder: Path, url: str, steps: int) -> list[str]:
    """What makes configs/short.yaml shorter, and sends it to the server."""
    return [
        f"train.data.data_path={folder / 'data'}",
        f"train.data.total_seq_len={2 * TOKENS}",
        f"train.trainer.max_steps={steps}",
        "train.trainer.epochs=20",
        f"train.generation.vllm_endpoint={url}",
        "train.generation.max_retries=9",
        f"prepare.max_samples={ROWS}",
        f"prepare.seq_length={TOKENS}",
        f"extract.exchange_path={folder / 'exchange'}",
        "extract.concurrency=8",
    ]


def compared_states(exact: RunConfig, served: RunConfig, own: RunConfig) -> list[str]:
    """Stored states of the server and of this process against float32; prints what it finds, returns the server's faults."""
    (theirs, their_tokens), (ours, our_tokens) = distance(served, exact), distance(own, exact)
    faults = []
    for layer, (server, here) in enumerate(zip(theirs.T, ours.T, strict=True)):
        print(
            f"layer {layer}: cosine of {len(server)} tokens: mean {server.mean():.6f}, least {server.min():.6f}; here {here.min():.6f}"
        )
        allowed = 2 * max(1 - float(here.min()), 1 - COSINE)  # no token may be much further off than rounding takes one here
        if float(server.mean()) < COSINE or 1 - float(server.min()) > allowed:
            faults.append(f"layer {layer}: cosine {server.mean():.6f}, least {server.min():.6f}")
    print(f"the last state gives the same token at {their_tokens:.2%} of positions, here {our_tokens:.2%}")
    return faults + ([f"the same token at {their_tokens:.2%} only"] if their_tokens < SAME_TOKEN else [])


def distance(found: RunConfig, exact: RunConfig) -> tuple[torch.Tensor, float]:
    """Cosine of each token's states [T, layers]; the share of tokens whose last states give the same next one."""
    dataset = open_prepared(exact.train.data.data_path)
    weights = verifier_weights(exact.train.verifier.verifier_name_or_path, names=("norm", "head"))
    weights = replace(weights, head=weights.head.float())  # bfloat16 logits would tie
    cosines, same = [], []
    for row in range(len(dataset)):
        ids = token_ids(dataset, row)
        theirs, ours = (read_sample(config.hidden_states_path, row, ids, 3).states.float() for config in (found, exact))
        cosines.append(torch.nn.functional.cosine_similarity(theirs, ours, dim=-1))
        same.append(weights.logits(theirs[:, -1]).argmax(-1) == weights.logits(ours[:, -1]).argmax(-1))
    return torch.cat(cosines), float(torch.cat(same).float().mean())


def trained(config: RunConfig, online: bool) -> tuple[list[torch.Tensor], list[float]]:
    """The tokens of every batch and the loss of every step of a training."""
    trainer = Trainer(config, online)
    tokens: list[torch.Tensor] = []
    losses: list[float] = []
    steps, report = trainer.loader.steps, trainer._report

    def read(*arguments: int) -> Iterator[list[Any]]:
        for window in steps(*arguments):
            tokens.extend(batch.input_ids for batch in window)
            yield window

    def noted(totals: Any, *rest: Any) -> None:
        report(totals, *rest)
        losses.append(trainer.last["loss"])

    trainer.loader.steps, trainer._report = read, noted  # type: ignore[method-assign]
    trainer.run()
    return tokens, losses


def killed_and_started_again(server: Server, path: Path, at: int) -> threading.Thread:
    """A thread that does it once `path`, a metrics.jsonl, tells of `at` steps."""

    def work() -> None:
        while not path.exists() or len(path.read_text().splitlines()) < at:
            time.sleep(0.05)
        server.kill()
        print(f"the server is killed after {len(path.read_text().splitlines())} steps")
        server.start()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def compared_runs(offline: tuple[list[torch.Tensor], list[float]], online: tuple[list[torch.Tensor], list[float]]) -> list[str]:
    different = [i for i, (a, b) in enumerate(zip(offline[0], online[0], strict=False)) if not torch.equal(a, b)]
    distance = max(abs(a - b) / a for a, b in zip(offline[1], online[1], strict=False))
    print(f"{len(online[0])} batches online, {len(offline[0])} offline, {len(different)} of other tokens")
    print(f"losses of {len(online[1])} steps: {online[1][0]:.3f} to {online[1][-1]:.3f}, at most {distance:.2%} apart")
    faults = [f"batch {different[0]} and {len(different) - 1} others hold other tokens"] if different else []
    if len(online[0]) != len(offline[0]) or len(online[1]) != len(offline[1]):
        faults.append(f"{len(online[1])} steps online, {len(offline[1])} offline")
    return faults + ([f"losses differ by {distance:.2%}"] if distance > SAME_LOSS else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="folder of the `vllm` command")
    parser.add_argument("--folder", type=Path, default=Path("build/live"), help="written anew")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    configure()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the server goes too, when `timeout` ends this
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    url = f"http://127.0.0.1:{free_port()}"
    words = overrides(options.folder, url, options.steps)

    def config(name: str, *more: str) -> RunConfig:
        states, checkpoints = (options.folder / f"{name}-{kind}" for kind in ("states", "checkpoints"))
        return load_run_config(
            RUN_FILE, [*words, f"extract.hidden_states_path={states}", f"train.trainer.save_path={checkpoints}", *more]
        )

    prepare(config("served"))
    vocab(config("served"))
    server = Server(["--config", RUN_FILE, *words], options.vllm, url, options.folder / "server.log")
    server.start()
    try:
        began = time.monotonic()
        summary = extract(config("served", "extract.backend=vllm"))
        print(
            f"extract through vLLM: {summary.tokens_written / (time.monotonic() - began):.0f} tokens/s, agreement {summary.agreement}"
        )
        extract(config("own"))
        exact = config("exact", "train.data.hidden_states_dtype=float32")
        extract(exact)
        faults = compared_states(exact, config("served"), config("own"))
        offline = trained(config("served"), online=False)
        path = options.folder / "online-checkpoints/metrics.jsonl"
        restart = killed_and_started_again(server, path, options.steps * 2 // 5)
        online = trained(config("online"), online=True)
        restart.join()
        faults += compared_runs(offline, online)
        left = list((options.folder / "exchange").glob("*"))
        print(f"{len(left)} files left in the exchange folder (those of requests that the killed server had answered half)")
    finally:
        server.kill()
    print("\n".join(f"MISS {fault}" for fault in faults) or "the server's hidden states are the verifier's, and so is the training")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
