"""Who may import whom (CONTRIBUTING.md), read from the source; and an import of the package that costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "eagle3_fast"
PLAIN = {"records", "config", "spellings", "endpoint", "errors", "files", "log", "precision"}
ALLOWED = {
    "reference": set(),
    "ops": {"reference", *PLAIN},
    "prepare": {"prepare", "extract", *PLAIN},
    "extract": {"extract", "prepare", *PLAIN},
    "model": {"model", "ops", *PLAIN},
    "train": {"train", "model", "ops", "prepare", "extract", *PLAIN},
    "evaluate": {"evaluate", "model", "ops", "prepare", "extract", "train", *PLAIN},
    "export": {"export", "model", "prepare", "extract", *PLAIN},
}
OUTSIDE = {"reference": {"torch"}, "ops": {"torch"}}


def imports(path: Path) -> set[str]:
    """Modules imported at the top of a file, type-checking blocks and functions left out."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("stage", ALLOWED)
def test_stage_imports(stage: str) -> None:
    for path in (PACKAGE / stage).glob("*.py"):
        names = imports(path)
        inside = {name.split(".")[1] for name in names if name.startswith("eagle3_fast.")}
        assert inside <= ALLOWED[stage] | {stage}, f"{path.name} imports {inside - ALLOWED[stage]}"
        if stage in OUTSIDE:
            outside = {name.split(".")[0] for name in names} - {"eagle3_fast", "__future__"} - set(sys.stdlib_module_names)
            assert outside <= OUTSIDE[stage], f"{path.name} imports {outside}"


@pytest.mark.parametrize("module", ["errors", "files", "log", "records", "cli"])
def test_plain_modules_need_no_stage_and_no_torch(module: str) -> None:
    names = imports(PACKAGE / f"{module}.py")
    assert not {name for name in names if name.split(".")[0] in {"torch", "transformers", "datasets"}}
    assert {name.split(".")[1] for name in names if name.startswith("eagle3_fast.")} <= PLAIN | {"__version__"}


def test_importing_the_package_loads_nothing() -> None:
    heavy = ("torch", "transformers", "datasets", "numpy")
    code = f"import sys, eagle3_fast, eagle3_fast.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_one_file_knows_deepspeed() -> None:
    knowing = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if any(n.startswith("deepspeed") for n in imports(path))
    }
    assert knowing == {"train/deepspeed_engine.py"}


def test_one_file_knows_vllm_and_nothing_knows_that_file() -> None:
    """vLLM's server imports it; this package needs no vLLM."""
    found = {path.relative_to(PACKAGE): imports(path) for path in PACKAGE.rglob("*.py")}
    assert [str(path) for path, names in found.items() if any(name.startswith("vllm.") for name in names)] == [
        "extract/vllm_connector.py"
    ]
    assert not any(name.startswith("eagle3_fast.extract.vllm_connector") for names in found.values() for name in names)
