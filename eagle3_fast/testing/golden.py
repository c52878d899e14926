"""Compare this package with values computed by released speculators packages: `python -m eagle3_fast.testing.golden FOLDER`.

FOLDER holds any of: model cases (a folder with `meta.json`, `config.json`, `draft`, `batch` and `expected.safetensors`), `n9-data`
and `s3-data` (samples with the batches packed from them and the sampler's batches), and `vocab.json`. One line is printed for each
case with its largest deviation; the exit code is 1 when any misses, 2 when there is nothing to compare.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3_fast.config import parse_loss
from eagle3_fast.errors import InputError
from eagle3_fast.extract.pt_samples import open_pt_sample
from eagle3_fast.files import read_json
from eagle3_fast.model.config import load_draft_config
from eagle3_fast.model.draft import Draft, load_tensors
from eagle3_fast.model.ttt import Objective, run_ttt
from eagle3_fast.records import HiddenStates, PackedBatch, TTTOutput
from eagle3_fast.train.metrics import speculators_metrics
from eagle3_fast.train.packing import PackingSampler, pack

VALUE_TOLERANCE = 1e-5
"""Relative, for losses and metrics."""
GRADIENT_TOLERANCE = 1e-4
"""Of the norm of each parameter's gradient."""


@dataclass(frozen=True)
class Verdict:
    """Largest deviation of a case, where it was found, and whether it is within tolerance."""

    case: str
    deviation: float
    where: str
    passed: bool

    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'MISS'} {self.case:<24} {self.deviation:9.2e}  {self.where}"


class _Deviations:
    """Collects deviations of a case, each as a share of its tolerance, and keeps the worst."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.found: list[tuple[float, float, str]] = [(0.0, 0.0, "nothing compared")]

    def add(self, where: str, deviation: float, tolerance: float) -> None:
        share = deviation / tolerance if tolerance else float("inf") if deviation else 0.0
        self.found.append((share if share == share else float("inf"), deviation, where))

    def exact(self, where: str, actual: Any, expected: Any) -> None:
        self.add(where, 0.0 if actual == expected else 1.0, 0.0)

    def verdict(self) -> Verdict:
        share, deviation, where = max(self.found)
        return Verdict(self.case, deviation, where, len(self.found) > 1 and share <= 1)


def compare_all(folder: Path) -> Iterator[Verdict]:
    """One verdict for every case found in `folder`."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder of golden cases")
    for path in sorted(folder.iterdir()):
        if (path / "meta.json").is_file():
            yield compare_model(path)
        elif (path / "packing.json").is_file():
            yield compare_data(path)
        elif path.name == "vocab.json":
            yield compare_vocab(path)


def compare_model(case: Path) -> Verdict:
    """Loss, metrics, draft tokens of computed rows, and every gradient of one model case."""
    meta, expected = read_json(case / "meta.json"), load_file(case / "expected.safetensors")
    output, draft = run_case(case, meta)
    output.loss.backward()
    found = _Deviations(case.name)
    found.add("loss", _relative(output.loss.detach(), expected["loss"]), VALUE_TOLERANCE)
    metrics = speculators_metrics(output, list(_objective(meta).kinds), ratios=meta["produced_by"] == "s3")
    wanted = {name.removeprefix("metric."): value for name, value in expected.items() if name.startswith("metric.")}
    found.exact("names of metrics", sorted(metrics.keys() & wanted.keys()), sorted(wanted))
    for name in metrics.keys() & wanted.keys():
        found.add(name, _relative(torch.tensor(metrics[name]), wanted[name]), VALUE_TOLERANCE)
    for k, tokens in enumerate(output.draft_tokens):
        computed = tokens >= 0
        found.exact(f"draft_tokens.{k}", tokens[computed].tolist(), expected[f"draft_tokens.{k}"].flatten()[computed].tolist())
    _compare_gradients(found, draft, expected, meta["trainable"])
    return found.verdict()


def _compare_gradients(found: _Deviations, draft: Draft, expected: dict[str, Tensor], trainable: list[str]) -> None:
    parameters = dict(draft.named_parameters())
    found.exact(
        "trainable parameters", sorted(name for name, value in parameters.items() if value.requires_grad), sorted(trainable)
    )
    for name in trainable:
        actual, wanted = parameters[name].grad, expected[f"grad.{name}"]
        gap = wanted if actual is None else actual - wanted
        found.add(f"grad.{name}", float(gap.norm() / wanted.norm().clamp_min(1e-30)), GRADIENT_TOLERANCE)


def run_case(case: Path, meta: dict[str, Any]) -> tuple[TTTOutput, Draft]:
    """Our output on the case's batch, and the draft that made it."""
    draft = Draft(load_draft_config(case), train_head="lm_head.weight" in meta["trainable"])
    absent = ("verifier_norm.weight",) if meta["produced_by"] == "s3" else ()
    load_tensors(draft, load_file(case / "draft.safetensors"), str(case / "draft.safetensors"), missing_ok=absent)
    return run_ttt(draft, read_batch(case / "batch.safetensors"), _objective(meta)), draft


def _objective(meta: dict[str, Any]) -> Objective:
    call, current = meta["call"], meta["produced_by"] == "n9"
    return Objective(
        ttt_steps=call["ttt_steps"],
        terms=parse_loss(call.get("loss_fn", "kl_div")),
        step_loss_decay=call["ttt_step_loss_decay"],
        teacher_forced=current or call["use_off_policy_tokens"],
        verifier_norm=current,
    )


def read_batch(path: Path) -> PackedBatch:
    """A packed batch of either release: `document_ids` (0.9) or `lengths` (0.3)."""
    fields = load_file(path)
    if "lengths" in fields:
        lengths = fields.pop("lengths")
        documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        padding = torch.full((fields["input_ids"].shape[1] - len(documents),), -1)
        fields["document_ids"] = torch.cat((documents, padding))[None]
    aux, last = fields.pop("hidden_states")[0], fields.pop("verifier_last_hidden_states")[0]
    rows: dict[str, Any] = {name: value[0] for name, value in fields.items()}
    return PackedBatch(aux_hidden_states=aux, last_hidden_states=last, **rows)


def compare_data(case: Path) -> Verdict:
    """Packed batches and sampler batches, which must match exactly."""
    found = _Deviations(case.name)
    packing, current = read_json(case / "packing.json"), (case / "hidden_states").is_dir()
    total = packing.pop("total_seq_len")
    readers: dict[str, Callable[[Path, int], tuple[HiddenStates, Tensor]]] = (
        {"": _read_arrow_row} if current else {"v0-": _read_pt, "v1-": _read_pt}
    )
    for prefix, read in readers.items():
        for name, rows in packing.items():
            path = case / f"packed-{prefix}{name}.safetensors"
            samples = [read(case / prefix.rstrip("-"), row) for row in rows]
            _compare_batch(found, path, samples, total)
    for index, setting in enumerate(read_json(case / "sampler.json")):
        for key, wanted in setting["batches"].items():
            rank, epoch = (int(part.strip("rankepoch")) for part in key.split("."))
            sampler = PackingSampler(
                setting["lengths"], setting["batch_max_length"], setting["num_replicas"], rank, setting["seed"], rotate=current
            )
            found.exact(f"sampler {index} {key}", sampler.batches(epoch), wanted)
    return found.verdict()


def _compare_batch(found: _Deviations, path: Path, samples: list[tuple[HiddenStates, Tensor]], total: int) -> None:
    wanted, states = read_batch(path), samples[0][0].states
    actual = pack(samples, total, states.shape[1] - 1, states.shape[2], wanted.aux_hidden_states.dtype)
    for name, value in vars(wanted).items():
        if isinstance(value, Tensor):
            found.exact(f"{path.stem} {name}", torch.equal(getattr(actual, name), value), True)


def _read_arrow_row(folder: Path, row: int) -> tuple[HiddenStates, Tensor]:
    from datasets import load_from_disk

    fields = load_file(folder / "hidden_states" / f"hs_{row}.safetensors")
    example = load_from_disk(str(folder))[row]
    return HiddenStates(fields["token_ids"], fields["hidden_states"]), torch.tensor(example["loss_mask"])


def _read_pt(folder: Path, row: int) -> tuple[HiddenStates, Tensor]:
    """A sample of release 0.3, which packs float32."""
    sample = open_pt_sample(folder / f"data_{row}.pt")
    return HiddenStates(sample.input_ids, sample.states().float()), sample.loss_mask


def compare_vocab(path: Path) -> Verdict:
    """`d2t` and `t2d` built from token counts, which must match exactly."""
    from eagle3_fast.prepare.vocab import build_mapping

    found = _Deviations(path.stem)
    for index, case in enumerate(read_json(path)):
        counts = {int(token): count for token, count in case["token_freq"].items()}
        d2t, t2d = build_mapping(counts, case["draft_vocab_size"], case["target_vocab_size"])
        found.exact(f"d2t {index}", list(map(int, d2t)), case["d2t"])
        found.exact(f"t2d {index}", list(map(int, t2d)), case["t2d"])
    return found.verdict()


def _relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double().flatten(), expected.double().flatten()
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-12)) if len(expected) else 0.0


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m eagle3_fast.testing.golden FOLDER", file=sys.stderr)
        return 2
    try:
        verdicts = []
        for verdict in compare_all(Path(arguments[0])):
            print(verdict, flush=True)
            verdicts.append(verdict)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not verdicts:
        print(f"error: {arguments[0]}: no golden cases found", file=sys.stderr)
        return 2
    return 0 if all(verdict.passed for verdict in verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
