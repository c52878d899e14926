"""What released speculators packages computed, against ours, through the command that users run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from eagle3_fast.testing import golden

FOLDER = Path(__file__).parent / "golden"
CASES = sorted(path for path in FOLDER.iterdir() if (path / "meta.json").is_file())


def test_nineteen_model_cases_are_here() -> None:
    assert len(CASES) == 19


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_model_case(case: Path) -> None:
    verdict = golden.compare_model(case)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("name", ["n9-data", "s3-data"])
def test_packing_and_sampler(name: str) -> None:
    verdict = golden.compare_data(FOLDER / name)
    assert verdict.passed, str(verdict)


def test_vocabulary() -> None:
    verdict = golden.compare_vocab(FOLDER / "vocab.json")
    assert verdict.passed, str(verdict)


def test_a_wrong_value_is_a_miss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(FOLDER / "n9-plain", tmp_path / "n9-plain")
    expected = load_file(tmp_path / "n9-plain" / "expected.safetensors")
    expected["grad.fc.weight"][0, 0] += 1e-3 * expected["grad.fc.weight"].norm()
    save_file(expected, tmp_path / "n9-plain" / "expected.safetensors")
    assert golden.main([str(tmp_path)]) == 1
    assert "MISS n9-plain" in capsys.readouterr().out


def test_a_wrong_mapping_is_a_miss(tmp_path: Path) -> None:
    cases = json.loads((FOLDER / "vocab.json").read_text())
    cases[0]["d2t"][-1] += 1
    (tmp_path / "vocab.json").write_text(json.dumps(cases))
    assert golden.main([str(tmp_path)]) == 1


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    assert golden.main([str(tmp_path)]) == 2
    assert golden.main([str(tmp_path / "absent")]) == 2
