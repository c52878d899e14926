"""The benches' own tools: rows as the model plans them, memory and times as they are, tables that say what was stored."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import batches
import growth
import logit_precision
import measure
import presets
import pytest
import report
import torch
from train.runs import prepared_run

from eagle3_fast.files import write_json
from eagle3_fast.model import ttt
from eagle3_fast.model.draft import save_draft
from eagle3_fast.train.start import start_draft

RESULT = {
    **presets.SMOKE.record(),
    "bench": "linear_divergence",
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "tokens": 192,
    "gemm_flops": 4_000_000_000,
    "providers": {
        "fused": {"median": 0.5, "iqr": 0.1, "peak_mib": 7.0, "error": 1e-7},
        "reference": {"median": 1.0, "iqr": 0.1, "peak_mib": 70.0, "error": 1e-7},
        "gemm": {"median": 0.4, "iqr": 0.0, "peak_mib": 0.0, "error": None},
    },
    "unavailable": {"liger": "needs a GPU"},
    "failed": {"compile": "AssertionError: largest error 1"},
    "environment": {"cpu": "cpu", "features": ["avx2"], "gpu": None, "versions": {"torch": "2"}, "commit": "abc"},
}


@pytest.mark.parametrize("supervised", [0.5, 1.0])
def test_rows_are_those_that_the_model_plans(supervised: float) -> None:
    case = presets.Case("smoke", 320, rows=24, document=8, supervised=supervised)
    batch = batches.packed_batch(case, torch.float32, "cpu")
    plan, ours = ttt.plan_rows(batch, ttt.Objective(ttt_steps=case.ttt_steps)), batches.row_plan(case)
    for whole, part in ((plan.active, ours.active), (plan.scored, ours.scored)):
        assert [rows.tolist() for rows in whole] == [rows.tolist() for rows in part]
    rows = ours.active[-1]
    assert torch.equal(batches.key_ranges(case, rows), ttt.key_ranges(batch.document_ids, None)[rows])


def test_peak_memory_is_what_a_call_allocates_and_gives_back() -> None:
    peak = measure.Local(lambda: torch.zeros(16 * measure.MIB), "cpu").peak_mib()
    assert peak is None or 63 < peak < 80


def test_a_provider_in_a_process_of_its_own() -> None:
    remote = _remote("ttt_attention", "reference")
    turns = measure.Turns({"reference": remote})
    turns.take("reference")
    remote.close()
    assert turns.results()["reference"]["error"] < 1e-5
    assert remote.process.returncode == 0


def _remote(bench: str, provider: str) -> measure.Remote:
    case = json.dumps({"preset": "smoke", "vocab": 320, "rows": 32, "document": 16})
    return measure.Remote(
        [sys.executable, str(measure.BENCH / "worker.py"), bench, provider, case, "float32", "cpu", "1"], threads=1
    )


def test_what_cannot_run_is_named() -> None:
    with measure.started({"liger": lambda: _remote("linear_divergence", "liger")}) as all_of_them:
        assert not all_of_them.running
        assert "liger-kernel" in all_of_them.unavailable["liger"]


def test_a_faulty_provider_does_not_stop_the_others() -> None:
    def beyond_budget() -> measure.Local:
        raise AssertionError("largest error 1")

    makers = {"wrong": beyond_budget, "right": lambda: measure.Local(lambda: None, "cpu")}
    with measure.started(makers) as all_of_them:
        assert list(all_of_them.running) == ["right"]
        assert "largest error 1" in all_of_them.failed["wrong"]


def test_a_new_result_replaces_that_of_the_same_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    for threads, tokens in ((1, 1), (2, 2), (1, 3)):
        measure.save("x", {**RESULT, "threads": threads, "tokens": tokens})
    assert [(old["threads"], old["tokens"]) for old in json.loads((tmp_path / "x.json").read_text())] == [(2, 2), (1, 3)]


def test_spread() -> None:
    assert measure.spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"median": 3.0, "iqr": 2.0}
    assert measure.spread([4.0]) == {"median": 4.0, "iqr": 0.0}


def test_tables_and_plots(tmp_path: Path) -> None:
    other = {**RESULT, "vocab": 640, "case": "larger"}
    measure.add_ratios(RESULT["providers"])
    text = report.tables([RESULT, other])
    assert f"| {RESULT['case']} | reference | 1000 | 1e+02 | 2.00 | 2.50 | 192 | 70 | 1.0e-07 |  |" in text
    assert "| gemm | 400 | 0 | 0.80 | 1.00 | 480 | 0 |  | 10 |" in text
    assert "| liger | not run: needs a GPU |" in text
    assert "| compile | failed: AssertionError: largest error 1 |" in text
    assert [path.stat().st_size > 0 for path in report.plots([RESULT, other], tmp_path)] == [True]


def test_cases_fit_and_are_distinct() -> None:
    for preset in presets.MODELS:
        cases = presets.cases(preset)
        assert len({str(case) for case in cases}) == len(cases)
        assert all(case.rows % case.document == 0 for case in cases)


def test_logit_precision_of_a_checkpoint(
    tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared_run(tmp_path, toy, **{"train.data": {"hidden_states_dtype": "bfloat16"}})
    save_draft(start_draft(config), tmp_path / "draft")
    write_json(tmp_path / "run.json", config.model_dump(exclude_unset=True))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["logit_precision.py", "--config", "run.json", "draft"])
    logit_precision.main()
    (bands,) = json.loads(Path("build/logit_precision.json").read_text()).values()
    assert sum(band["rows"] for band in bands) > 100
    assert all(band["float32"] < 0.01 and band["centred"] < 0.01 for band in bands)
    assert "| centred | bfloat16 | float32 |" in capsys.readouterr().out


def test_growth_tells_sizes_times_and_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(growth, "BASE", presets.SMOKE)
    monkeypatch.setattr(growth, "STEPS", (1, 2, 3))
    for axis, values in (("ROWS", (96, 192)), ("VOCABULARIES", (256, 512)), ("LENGTHS", (64, 128))):
        monkeypatch.setattr(growth, axis, values)
    monkeypatch.setattr(sys, "argv", ["growth.py", "--threads", "1"])
    growth.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.count(" s,") for line in lines[2:]] == [2, 1, 1, 1]
    assert all("MiB" in line for line in lines[3:])
