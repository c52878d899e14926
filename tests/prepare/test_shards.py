"""`prepare` writes whole, current, reproducible folders, counts what it leaves out, and refuses what would waste a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from chats import CHATML, REASONING

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.prepare import shards
from eagle3_fast.prepare.dataset import open_prepared, validate_ids
from eagle3_fast.prepare.display import show_row
from eagle3_fast.prepare.shards import prepare
from eagle3_fast.prepare.tokenizer import tokenizer_hash

Configure = Callable[..., RunConfig]
Verifier = Callable[..., Path]
Write = Callable[..., str]
ROWS: list[Any] = [{"prompt": f"question {i}", "response": f"the answer is {i} " * (i % 3 + 1)} for i in range(10)]


def contents(folder: Path) -> list[dict[str, Any]]:
    return list(open_prepared(folder))


def test_layout_counts_and_manifest(run_config: Configure, make_verifier: Verifier, write_jsonl: Write, tmp_path: Path) -> None:
    rows = [
        *ROWS,
        {"prompt": "only asked"},
        {"text": "?"},
        {"prompt": "a", "response": ""},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
    ]
    verifier = make_verifier()
    manifest = prepare(run_config(verifier, prepare={"data": [write_jsonl(rows)]}))
    found = open_prepared(tmp_path / "out")
    assert found.features == datasets.Features(
        {
            "input_ids": datasets.List(datasets.Value("int32")),
            "loss_mask": datasets.List(datasets.Value("int64")),
            "seq_len": datasets.Value("int64"),
        }
    )
    assert found[10] == {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "seq_len": 3}
    assert all(row["seq_len"] == len(row["input_ids"]) == len(row["loss_mask"]) for row in found)
    counts: dict[int, int] = {}
    for row in found:
        for token, flag in zip(row["input_ids"], row["loss_mask"], strict=True):
            counts[token] = counts.get(token, 0) + flag
    frequencies = torch.load(tmp_path / "out" / "token_freq.pt", weights_only=True)
    assert frequencies == {token: count for token, count in counts.items() if count}
    assert manifest == json.loads((tmp_path / "out" / "prepare.json").read_text())
    assert manifest["dropped"] == {"empty reply": 1, "no assistant turn": 1, "unknown form: keys text": 1}
    assert manifest["rows"] == len(found) == 11
    assert manifest["supervised_tokens"] == sum(frequencies.values())
    assert manifest["tokens"] == sum(found["seq_len"])
    assert manifest["mask_path"] == "turn boundaries"
    assert manifest["tokenizer"] == tokenizer_hash(str(verifier))
    assert not list((tmp_path / "out").glob(".*"))
    assert "⟦the answer is 0 <|im_end|>⟧" in show_row(run_config(verifier), 0)
    with pytest.raises(InputError, match="there is no row 11; it holds rows 0 to 10"):
        show_row(run_config(verifier), 11)


def test_rows_follow_every_setting(run_config: Configure, make_verifier: Verifier, write_jsonl: Write, tmp_path: Path) -> None:
    data = write_jsonl(ROWS)
    verifiers = make_verifier(CHATML, "plain"), make_verifier(REASONING, "thinking")
    seen: dict[str, list[int]] = {}
    for verifier, length in [(verifiers[0], 32), (verifiers[0], 48), (verifiers[1], 48)]:
        manifest = prepare(run_config(verifier, prepare={"data": [data], "seq_length": length}))
        seen[manifest["key"]] = open_prepared(tmp_path / "out")["seq_len"][:]
    assert len(seen) == 3
    lengths = list(seen.values())
    assert max(lengths[0]) == 32 < max(lengths[1])
    assert lengths[1] != lengths[2]


def test_same_key_does_nothing_and_another_replaces_what_was_made(
    run_config: Configure, make_verifier: Verifier, write_jsonl: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    verifier, out = make_verifier(), tmp_path / "out"
    config = run_config(verifier, prepare={"data": [write_jsonl(ROWS)]})
    prepare(config)
    stamp = (out / "state.json").stat().st_mtime_ns
    with caplog.at_level("INFO", logger="eagle3_fast"):
        prepare(run_config(verifier, prepare={"data": [write_jsonl(ROWS)], "num_workers": 7}))
    assert "nothing to do" in caplog.text
    assert (out / "state.json").stat().st_mtime_ns == stamp
    for name in ("d2t-4.npy", "t2d-4.npy", "vocab-4.json"):
        (out / name).write_text("stale")
    write_jsonl(ROWS[:5])
    prepare(config)
    assert len(contents(out)) == 5
    assert {path.name for path in out.iterdir()} == {
        "data-00000-of-00001.arrow", "dataset_info.json", "prepare.json", "state.json", "token_freq.pt",
    }  # fmt: skip


def test_hidden_states_and_foreign_rows_are_not_replaced(
    run_config: Configure, make_verifier: Verifier, write_jsonl: Write, tmp_path: Path
) -> None:
    config = run_config(make_verifier(), prepare={"data": [write_jsonl(ROWS)]})
    prepare(config)
    (tmp_path / "out" / "hidden_states").mkdir()
    (tmp_path / "out" / "hidden_states" / "hs_0.safetensors").write_bytes(b"")
    prepare(config)  # the same rows: nothing is in danger
    write_jsonl(ROWS[:5])
    with pytest.raises(InputError, match=r"out/hidden_states: holds hidden states of rows .* choose another train.data.data_path"):
        prepare(config)
    assert len(contents(tmp_path / "out")) == 10
    (tmp_path / "out" / "hidden_states" / "hs_0.safetensors").unlink()
    (tmp_path / "out" / "prepare.json").unlink()
    with pytest.raises(InputError, match="were not written by `prepare`"):
        prepare(config)


def test_number_of_processes_does_not_matter(
    run_config: Configure, make_verifier: Verifier, write_jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, data = make_verifier(), write_jsonl(ROWS)
    found = []
    for workers, size in [(1, 512), (1, 3), (2, 3)]:
        monkeypatch.setattr(shards, "SHARD_ROWS", size)
        config = run_config(verifier, prepare={"data": [data], "num_workers": workers})
        prepare(config)
        found.append(contents(tmp_path / "out"))
        (tmp_path / "out" / "prepare.json").unlink()
        (tmp_path / "out" / "state.json").unlink()
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 10


def test_a_killed_run_goes_on(
    run_config: Configure, make_verifier: Verifier, write_jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_ROWS", 3)
    config = run_config(make_verifier(), prepare={"data": [write_jsonl(ROWS)], "num_workers": 1})
    whole = prepare(config)
    expected = contents(tmp_path / "out")
    tokenized: list[Any] = []
    example = shards.ShardWriter.example

    def killed_at_the_eighth(self: shards.ShardWriter, row: Any) -> Any:
        tokenized.append(row)
        if len(tokenized) == 9:  # the probe has taken one
            raise KeyboardInterrupt
        return example(self, row)

    monkeypatch.setattr(shards.ShardWriter, "example", killed_at_the_eighth)
    for name in ("prepare.json", "state.json"):
        (tmp_path / "out" / name).unlink()
    with pytest.raises(KeyboardInterrupt):
        prepare(config)
    with pytest.raises(InputError, match="holds no finished rows"):
        open_prepared(tmp_path / "out")
    assert len(list((tmp_path / "out").glob(".prepare-*/shard-*.arrow"))) == 2
    assert prepare(config) == whole
    assert contents(tmp_path / "out") == expected
    assert len(tokenized) == 9 + 1 + 4  # the probe, and the rows of the two missing shards


def test_a_kill_while_swapping_leaves_no_half_folder(
    run_config: Configure, make_verifier: Verifier, write_jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(make_verifier(), prepare={"data": [write_jsonl(ROWS)]})
    prepare(config)
    write_jsonl(ROWS[:5])
    replace = shards.os.replace

    def killed(source: Path, target: Path) -> None:
        if Path(target) == tmp_path / "out" / "state.json":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(shards.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(config)
    with pytest.raises(InputError, match="holds no finished rows"):
        open_prepared(tmp_path / "out")
    monkeypatch.undo()
    prepare(config)
    assert len(contents(tmp_path / "out")) == 5


def test_long_prompts_leave_no_rows(
    run_config: Configure, make_verifier: Verifier, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_ROWS", 8)  # the first shard has no rows at all
    long = [{"prompt": "why " * 200, "response": "because"}] * 8
    verifier = make_verifier()
    with pytest.raises(
        InputError, match=r"8 x no supervised token in its first 64 tokens \(rows of up to \d{3} tokens, .* is 64\)"
    ):
        prepare(run_config(verifier, prepare={"data": [write_jsonl(long)], "seq_length": 64}))
    kept = prepare(run_config(verifier, prepare={"data": [write_jsonl([*long, *ROWS])], "seq_length": 64, "num_workers": 1}))
    assert kept["rows"] == 10
    assert kept["dropped"] == {"no supervised token in its first 64 tokens": 8}


def test_masks_that_never_match_stop_with_a_sample(run_config: Configure, make_verifier: Verifier, write_jsonl: Write) -> None:
    never = CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    with pytest.raises(InputError, match="none of the first 10 rows has a supervised token") as failure:
        prepare(run_config(make_verifier(never), prepare={"data": [write_jsonl(ROWS)]}))
    assert "the answer is 0" in str(failure.value)
    assert "supervised 0 of" in str(failure.value)
    assert "\n" not in str(failure.value)


def test_ids_beyond_the_vocabulary_are_named(
    run_config: Configure, make_verifier: Verifier, write_jsonl: Write, tmp_path: Path
) -> None:
    good, bad = {"input_ids": [5, 6], "loss_mask": [0, 1]}, {"input_ids": [5, 323, 6], "loss_mask": [0, 0, 1]}
    with pytest.raises(InputError, match="row 2: token id 323 is outside the verifier's vocabulary of 320"):
        prepare(run_config(make_verifier(), prepare={"data": [write_jsonl([good, good, bad, good])]}))
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2], [], [3]], "loss_mask": [[1, 1], [], [1]], "seq_len": [2, 0, 1]})
    validate_ids(rows, 4)
    with pytest.raises(InputError, match="row 2: token id 3"):
        validate_ids(rows, 3)


def test_folders_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no finished rows; run `prepare`"):
        open_prepared(tmp_path / "absent")
    datasets.Dataset.from_dict({"input_ids": [[1]], "loss_mask": [[1]]}).save_to_disk(str(tmp_path / "short"))
    with pytest.raises(InputError, match="lacks the columns seq_len"):
        open_prepared(tmp_path / "short")
    datasets.Dataset.from_dict({"input_ids": [["a"]], "loss_mask": [[1]], "seq_len": [1]}).save_to_disk(str(tmp_path / "text"))
    with pytest.raises(InputError, match=r"column input_ids holds .*, not lists of integers"):
        open_prepared(tmp_path / "text")
    int64 = datasets.Dataset.from_dict({"input_ids": [[1]], "loss_mask": [[1]], "seq_len": [1]})
    int64.save_to_disk(str(tmp_path / "int64"))
    assert open_prepared(tmp_path / "int64")[0]["input_ids"] == [1]


def test_verifiers_without_what_is_needed(
    run_config: Configure, make_verifier: Verifier, write_jsonl: Write, tmp_path: Path
) -> None:
    data = write_jsonl(ROWS)
    verifier = make_verifier()
    (verifier / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="has no chat template"):
        prepare(run_config(verifier, prepare={"data": [data]}))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no tokenizer"):
        prepare(run_config(tmp_path / "empty", prepare={"data": [data]}))
    with pytest.raises(InputError, match="no data files are named"):
        prepare(run_config(make_verifier(name="other"), prepare={"data": []}))
