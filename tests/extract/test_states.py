"""The verb `extract`, on tiny verifiers."""

from __future__ import annotations

import shutil
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.extract import states as states_module
from eagle3_fast.extract.backends import batches
from eagle3_fast.extract.self_check import check_states, decided_argmax
from eagle3_fast.extract.sources import OnlineStates, StoredStates, token_ids
from eagle3_fast.extract.states import extract
from eagle3_fast.extract.store import SampleError, read_manifest, read_sample, sample_path
from eagle3_fast.extract.verifier import Verifier
from eagle3_fast.extract.weights import verifier_weights
from eagle3_fast.files import write_json
from eagle3_fast.records import HiddenStates
from tests.verifiers import stored_weights, toy_gemma3, toy_glm5, toy_llama

LENGTHS = [5, 40, 17, 1, 17, 23, 9, 31]
LAYERS = [1, 3, 4]


def prepare(folder: Path, lengths: list[int] = LENGTHS, bad: int | None = None) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in lengths]
    if bad is not None:
        rows[bad][-1] = 64 + 3
    columns = {"input_ids": rows, "loss_mask": [[1] * n for n in lengths], "seq_len": lengths}
    dataset = Dataset.from_dict(columns)
    dataset.save_to_disk(str(folder))
    return dataset


def run_config(root: Path, **extract_section: object) -> RunConfig:
    train = {
        "verifier": {"verifier_name_or_path": str(root / "verifier")},
        "draft": {"target_layer_ids": LAYERS},
        "data": {"data_path": str(root / "data"), "hidden_states_dtype": "float32"},
    }
    return RunConfig.model_validate({"train": train, "extract": {"batch_tokens": 64, **extract_section}})


@pytest.fixture
def root(tmp_path):
    toy_llama(tmp_path / "verifier")
    prepare(tmp_path / "data")
    return tmp_path


@pytest.mark.parametrize("toy", [toy_llama, toy_gemma3, toy_glm5])
def test_files_hold_what_the_verifier_computes_alone(toy, tmp_path):
    toy(tmp_path / "verifier")
    dataset = prepare(tmp_path / "data")
    summary = extract(run_config(tmp_path))
    assert (summary.rows, summary.written, summary.tokens_written) == (8, 8, sum(LENGTHS))
    assert summary.agreement == 1.0 and summary.bytes_written == sum(LENGTHS) * 4 * 32 * 4
    verifier = Verifier(tmp_path / "verifier", LAYERS)
    folder = tmp_path / "data/hidden_states"
    stored, online = StoredStates(folder, dataset, LAYERS), OnlineStates(verifier, dataset)
    for row in range(8):
        (alone,) = verifier.hidden_states([token_ids(dataset, row)])
        torch.testing.assert_close(stored.load(row).states, alone, rtol=0, atol=1e-4)
        torch.testing.assert_close(online.load(row).states, alone, rtol=0, atol=1e-4)
    assert read_manifest(folder)["agreement"] == 1.0


def test_default_precision_is_bfloat16(root):
    config = run_config(root)
    data = config.train.data.model_copy(update={"hidden_states_dtype": "bfloat16"})
    config = config.model_copy(update={"train": config.train.model_copy(update={"data": data})})
    assert extract(config).agreement >= 0.98
    assert read_sample(root / "data/hidden_states", 1, token_ids(prepare(root / "again"), 1), 3).states.dtype == torch.bfloat16


def test_goes_on_where_it_stopped(root, monkeypatch):
    folder = root / "data/hidden_states"
    assert extract(run_config(root)).written == 8
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("hs_*")}
    sample_path(folder, 2).unlink()
    sample_path(folder, 5).write_bytes(sample_path(folder, 5).read_bytes()[:-8])
    assert extract(run_config(root)).written == 2
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("hs_*")}
    assert {name for name in after if after[name] != before[name]} == {"hs_2.safetensors", "hs_5.safetensors"}
    monkeypatch.setattr(states_module, "Verifier", None)  # nothing to do: the verifier is not even loaded
    assert extract(run_config(root)).written == 0


def test_a_folder_of_other_settings_is_refused(root):
    extract(run_config(root))
    shutil.rmtree(root / "verifier")
    toy_llama(root / "verifier", seed=1)
    with pytest.raises(InputError, match="other settings \\(verifier_fingerprint is "):
        extract(run_config(root))


def test_samples_of_an_unknown_verifier_are_not_mixed_with_ours(root):
    extract(run_config(root))
    (root / "data/hidden_states/extract.json").unlink()
    assert extract(run_config(root)).written == 0
    sample_path(root / "data/hidden_states", 4).unlink()
    with pytest.raises(InputError, match="without extract.json, of a verifier that is not known"):
        extract(run_config(root))


def test_other_prepared_rows_are_refused(root):
    extract(run_config(root))
    write_json(root / "data/prepare.json", {"key": "other", "tokenizer": "t"})
    with pytest.raises(InputError, match="prepare_key is None, now 'other'; tokenizer is None, now 't'"):
        extract(run_config(root))


def test_token_id_beyond_the_vocabulary_names_the_row(tmp_path):
    toy_llama(tmp_path / "verifier")
    dataset = prepare(tmp_path / "data", bad=6)
    with pytest.raises(InputError, match="row 6.*67"):
        extract(run_config(tmp_path))
    with pytest.raises(SampleError, match="row 6"):
        OnlineStates(Verifier(tmp_path / "verifier", LAYERS), dataset).load(6)


def test_states_of_one_layer_early_stop_before_the_first_file(root, monkeypatch):
    monkeypatch.setattr(Verifier, "_stacked", lambda self, states: torch.stack([states[j] for j in [1, 3, 4, 4]], dim=2))
    with pytest.raises(InputError, match="give the verifier's own token at [0-9.]+% of positions"):
        extract(run_config(root))
    assert not list((root / "data").glob("hidden_states/hs_*"))


def test_files_damaged_while_written_are_found_afterwards(root, monkeypatch):
    write = states_module.write_sample
    swapped = lambda folder, row, sample: write(folder, row, HiddenStates(sample.token_ids, sample.states.flip(0)))  # noqa: E731
    monkeypatch.setattr(states_module, "write_sample", swapped)
    with pytest.raises(InputError, match="stored hidden states give the verifier's own token at"):
        extract(run_config(root))
    monkeypatch.undo()
    with pytest.raises(InputError, match="stored hidden states give"):  # all files are there now, and still wrong
        extract(run_config(root))


def test_a_logit_scale_that_is_not_known_stops(root, monkeypatch):
    own = Verifier.logits
    monkeypatch.setattr(Verifier, "logits", lambda self, ids: own(self, ids) / 16)
    with pytest.raises(InputError, match="scales or caps logits in a way that is not known here"):
        extract(run_config(root))


def test_agreement_counts_positions(tmp_path):
    toy_llama(tmp_path)
    weights = verifier_weights(tmp_path)
    states = torch.randn(10, 4, 32, generator=torch.Generator().manual_seed(0))
    argmax = weights.logits(states[:, -1]).argmax(-1)
    sample = HiddenStates(torch.zeros(10, dtype=torch.int64), states)
    assert check_states([sample], weights, [argmax]) == 1.0
    other = argmax.clone()
    other[:2] = (other[:2] + 1) % 64
    assert check_states([sample], weights, [other]) == 0.8
    other[0] = -1
    assert check_states([sample], weights, [other]) == pytest.approx(8 / 9)
    assert check_states([sample], weights, [argmax[:3]]) == 1.0


def test_near_ties_are_not_counted():
    logits = torch.tensor([[1.0, 16.0, 15.95], [1.0, 16.0, 15.0]])
    assert decided_argmax(logits, torch.bfloat16).tolist() == [-1, 1]
    assert decided_argmax(logits, torch.float32).tolist() == [1, 1]


def test_batches_hold_at_most_their_tokens_and_every_row_once():
    lengths = [5, 40, 17, 1, 17, 23, 9, 100]
    found = list(batches(range(8), lengths, 64))
    assert sorted(row for batch in found for row in batch) == list(range(8))
    assert found[0] == [7]
    assert all(len(batch) * max(lengths[row] for row in batch) <= 64 for batch in found[1:])
    assert len(found) == 5


Usage = namedtuple("Usage", "total used free")


def test_too_little_disk_is_refused_before_the_verifier_is_loaded(root, monkeypatch):
    monkeypatch.setattr(states_module, "Verifier", None)
    monkeypatch.setattr(states_module.shutil, "disk_usage", lambda path: Usage(10**6, 9 * 10**5, 10**5))
    need = sum(LENGTHS) * 4 * 32 * 4
    assert need < 10**5  # it would fit, but not below 95 %
    with pytest.raises(InputError, match="need 0.00 GB, .* before the disk is 95% full"):
        extract(run_config(root))


def test_a_disk_that_fills_up_stops_the_run_cleanly(root, monkeypatch):
    folder = root / "data/hidden_states"

    def usage(path: object) -> Usage:
        written = sum(1 for _ in folder.glob("hs_*"))
        return Usage(10**9, 10**8, 9 * 10**8) if written < 3 else Usage(10**9, 96 * 10**7, 4 * 10**7)

    monkeypatch.setattr(states_module.shutil, "disk_usage", usage)
    with pytest.raises(InputError, match="95% full after 3 of 8 rows; make room and run extract again"):
        extract(run_config(root))
    monkeypatch.undo()
    assert extract(run_config(root)).written == 5


def test_stored_states_refuse_other_layers(root):
    extract(run_config(root))
    with pytest.raises(InputError, match="layer_ids is \\[1, 3, 4\\], now \\[1, 3, 5\\]"):
        StoredStates(root / "data/hidden_states", prepare(root / "again"), [1, 3, 5])


def test_ten_thousand_samples_open_at_once(tmp_path):
    dataset = Dataset.from_dict({"input_ids": [[1, 2]] * 10_000, "loss_mask": [[1, 1]] * 10_000, "seq_len": [2] * 10_000})
    start = time.monotonic()
    source = StoredStates(tmp_path, dataset, LAYERS)  # no file is there, so none can have been opened
    assert time.monotonic() - start < 1
    with pytest.raises(SampleError, match="hs_9999"):
        source.load(9999)


def test_weights_stay_as_they_were(root):
    before = stored_weights(root / "verifier")
    extract(run_config(root))
    after = stored_weights(root / "verifier")
    assert all(torch.equal(before[name], after[name]) for name in before)
