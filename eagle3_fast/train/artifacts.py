"""What a run leaves beside its checkpoints so that it can be run again: its run file and its command."""

from __future__ import annotations

import os
import shlex
from importlib.metadata import version
from pathlib import Path

from eagle3_fast.config import RunConfig, run_file
from eagle3_fast.files import written_aside


def record_run(config: RunConfig, arguments: list[str], save_path: Path) -> None:
    """Write `run.yaml` and `train_command.txt` (the command as given, then versions and ranks as a comment) into `save_path`."""
    with written_aside(save_path / "run.yaml") as partial:
        partial.write_text(run_file(config), encoding="utf-8")
    versions = ", ".join(f"{package} {version(package)}" for package in ("eagle3_fast", "torch", "transformers"))
    about = f"# {versions}, ranks {os.environ.get('WORLD_SIZE', '1')}\n"
    with written_aside(save_path / "train_command.txt") as partial:
        partial.write_text(f"{shlex.join(arguments)}\n{about}", encoding="utf-8")
