"""The tree keeps its promises: op files in step, `kernels` importable beside the PyPI package of that name, nothing from this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_kernels_is_a_symlink_without_init() -> None:
    assert (ROOT / "eagle3_fast" / "kernels").is_symlink()
    assert (ROOT / "eagle3_fast" / "kernels").resolve() == ROOT / "kernels"
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_transformers_imports_from_the_repository_root() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import transformers.models.llama.modeling_llama"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_op_has_contract_reference_and_test() -> None:
    ops = {path.stem for path in (ROOT / "eagle3_fast" / "ops").glob("[a-z]*.py")}
    assert ops == {path.stem for path in (ROOT / "eagle3_fast" / "reference").glob("[a-z]*.py")}
    private = {path.stem.removeprefix("_") for path in (ROOT / "eagle3_fast" / "ops").glob("_[a-z]*.py")}
    assert ops == {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "ops").glob("test_*.py")} - private
    assert ops <= {path.stem.removeprefix("bench_") for path in (ROOT / "bench").glob("bench_*.py")}
    assert {path.stem for path in (ROOT / "kernels").glob("[a-z]*.py")} <= ops
    assert {path.stem for path in (ROOT / "csrc").glob("*.cpp")} - {"module"} <= ops


def test_stages_have_a_test_folder() -> None:
    for stage in ("prepare", "extract", "model", "train", "evaluate", "export", "ops"):
        assert list((ROOT / "tests" / stage).glob("test_*.py")), stage


def test_no_vague_file_names() -> None:
    vague = {"utils", "helpers", "common", "base", "manager"}
    assert not [path for path in (ROOT / "eagle3_fast").rglob("*.py") if path.stem in vague]
