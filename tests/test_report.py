"""The report shows what the run's files say, needs nothing else, and does not hide what is missing or bad."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.model.config import parse_draft_config, save_draft_config
from eagle3_fast.report import POINTS, ReportInputs, gather, read_metrics, report, series, thinned, write_report

CHAT = {
    "name": "chat",
    "prompts": 40,
    "identical": 40,
    "passes": 1000,
    "tokens": 1930,
    "alpha": [0.53, 0.27, 0.13],
    "conditional": [0.53, 0.51, 0.48],
    "tau": 1.93,
    "plain_tokens_per_s": 16.0,
    "speculative_tokens_per_s": 22.4,
}
EVALUATION: dict[str, Any] = {
    "draft": "draft",
    "draft_tokens": 3,
    "temperature": 0.0,
    "max_new_tokens": 128,
    "dtype": "float32",
    "prompt_sets": [CHAT],
}


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    """The run file of a finished run whose files lie in `tmp_path`."""
    layer = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    methods = {"proposal_methods": [{"speculative_tokens": 3}], "verifier": {"name_or_path": "toy", "architectures": []}}
    draft = {
        "speculators_model_type": "eagle3",
        "speculators_config": methods,
        "transformer_layer_config": layer,
        "draft_vocab_size": 24,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    }
    save_draft_config(parse_draft_config(draft, "test"), tmp_path / "draft", "bfloat16")
    rows = [
        {"global_step": s, "split": "train", "loss_0": 5 - s / 10, "loss_1": 6 - s / 10, "tokens_per_s": 900} for s in range(1, 41)
    ]
    rows += [
        {"global_step": s, "split": "val", "loss_0": 5.1 - s / 10, "loss_1": 6.1 - s / 10, "tau": 1 + s / 50} for s in (20, 40)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "evaluation.json").write_text(json.dumps(EVALUATION))
    (tmp_path / "prepare.json").write_text(json.dumps({"rows": 1234, "tokens": 567890, "dropped": {"no reply": 7}}))
    (tmp_path / "vocab-24.json").write_text(json.dumps({"coverage": 0.987}))
    (tmp_path / "hidden_states").mkdir()
    (tmp_path / "hidden_states" / "extract.json").write_text(json.dumps({"agreement": 0.9991}))
    train = {
        "verifier": {"verifier_name_or_path": "org/Toy-7B"},
        "draft": {"draft_vocab_size": 24},
        "data": {"data_path": str(tmp_path)},
        "trainer": {"save_path": str(tmp_path)},
    }
    sections = {"evaluate": {"output": str(tmp_path / "evaluation.json")}, "export": {"output": str(tmp_path / "draft")}}
    return RunConfig.model_validate({"train": train, **sections})


def plain_text(path: Path) -> str:
    """The page without tags, white space collapsed."""
    body = path.read_text(encoding="utf-8").split("</style>", 1)[1]
    return " ".join(re.sub(r"<[^>]*>", " ", body).split())


def test_says_what_the_files_say(run: RunConfig) -> None:
    path = report(run, {"train": 3723.0, "prepare": 4.25})
    text = plain_text(path)
    assert path.name == "report.html"
    for expected in (
        "EAGLE-3 draft for Toy-7B",
        "&tau; 1.93 1.40x plain speed",
        "tokens per verifier pass, the verifier&#39;s own token included",
        "chat 40 of 40 1.93 0.530 0.270 0.130 0.510 0.480 16.0 22.4 1.40",
        "22.4 speculative, 1.40x",
        "Reads verifier layers 1, 2, 4",
        "Vocabulary 24 of 64 tokens",
        "98.70 % of the supervised tokens",
        "Rows 1,234",
        "7 no reply",
        "99.91 % of positions",
        "Optimizer steps 40",
        "Median speed 900 tokens/s",
        "1.80 at the end",
        "train 1 h 02 min",
        "prepare 4.2 s",
        f"vllm serve {run.export.output}",
    ):
        assert expected in text, expected
    assert "differ" not in text.split("Acceptance and speed")[0]


def test_needs_no_network_and_follows_the_colour_scheme(run: RunConfig) -> None:
    html = report(run).read_text(encoding="utf-8")
    assert html.count("<svg") == 3
    assert not re.findall(r"<(script|link|img|iframe)\b|@import|url\((?!#)", html)
    assert all(reference.startswith("#") for reference in re.findall(r'(?:href|src)="([^"]*)"', html))
    assert "prefers-color-scheme: dark" in html
    assert "#01020" not in html, "a stand-in colour was left in a plot"
    assert "var(--ink)" in html.split("</style>", 1)[1]


def test_names_axes_and_lines(run: RunConfig) -> None:
    text = plain_text(report(run))
    for label in (
        "optimizer step",
        "loss per supervised token (kl_div)",
        "step 0",
        "step 1",
        "drafted position k",
        "generated tokens per second",
    ):
        assert label in text, label


def test_texts_that_differ_are_shouted(run: RunConfig) -> None:
    evaluation = {**EVALUATION, "prompt_sets": [{**CHAT, "identical": 38}]}
    path = write_report(ReportInputs(run, evaluation=evaluation), Path(run.export.output) / "r.html")
    assert "chat: 2 of 40 outputs differ from plain greedy decoding" in plain_text(path)


def test_absent_files_are_said_to_be_absent(tmp_path: Path) -> None:
    empty = RunConfig.model_validate(
        {
            "train": {
                "verifier": {"verifier_name_or_path": "toy"},
                "data": {"data_path": str(tmp_path)},
                "trainer": {"save_path": str(tmp_path)},
            },
            "evaluate": {"output": str(tmp_path / "e.json")},
            "export": {"output": str(tmp_path / "draft")},
        }
    )
    text = plain_text(report(empty))
    assert "Not evaluated yet" in text
    assert "No metrics were found" in text


def test_rates_without_a_case_and_sampled_runs_are_dashes(run: RunConfig) -> None:
    entry = {
        **CHAT,
        "identical": None,
        "alpha": [0.5, None, None],
        "conditional": [0.5, None, None],
        "speculative_tokens_per_s": None,
    }
    evaluation = {**EVALUATION, "temperature": 1.0, "prompt_sets": [entry]}
    text = plain_text(write_report(ReportInputs(run, evaluation=evaluation), Path(run.export.output) / "r.html"))
    assert "chat – of 40 1.93 0.500 – – – – 16.0 – –" in text
    assert "temperature 1.0" in text


def test_names_are_escaped(run: RunConfig) -> None:
    evaluation = {**EVALUATION, "prompt_sets": [{**CHAT, "name": "<b>&co"}]}
    html = write_report(ReportInputs(run, evaluation=evaluation), Path(run.export.output) / "r.html").read_text()
    assert "<b>&co" not in html
    assert "&lt;b&gt;&amp;co" in html


def test_an_unfinished_last_line_is_ignored_and_a_broken_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"global_step": 1}\n{"glob')
    assert read_metrics(path) == [{"global_step": 1}]
    path.write_text('{"glob\n{"global_step": 1}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl:1: not valid JSON"):
        read_metrics(path)


def test_series_take_the_later_of_two_runs_and_skip_nan() -> None:
    rows = [{"global_step": s, "split": "train", "loss_0": v} for s, v in ((1, 5.0), (2, 4.0), (3, float("nan")), (2, 3.0))]
    assert series([*rows, {"global_step": 9, "split": "val", "loss_0": 1.0}], "train", "loss_0") == ([1, 2], [5.0, 3.0])


def test_long_curves_are_averaged_not_sampled() -> None:
    steps, values = thinned([float(x) for x in range(4 * POINTS)], [float(x % 4) for x in range(4 * POINTS)])
    assert len(steps) == POINTS
    assert set(values) == {1.5}
    assert thinned([1.0, 2.0], [3.0, 4.0]) == ([1.0, 2.0], [3.0, 4.0])


def test_gather_reads_the_run_s_own_files(run: RunConfig) -> None:
    inputs = gather(run)
    assert inputs.draft is not None
    assert (len(inputs.metrics), inputs.vocabulary["coverage"], inputs.agreement) == (42, 0.987, 0.9991)
