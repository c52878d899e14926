"""The user's own DeepSpeed JSON adds to the run file and never contradicts it in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.train.deepspeed_engine import deepspeed_settings

TRAINED = 12_345


def settings(folder: Path, theirs: dict[str, Any] | str | None, **section: Any) -> dict[str, Any]:
    if theirs is not None:
        (folder / "ds.json").write_text(theirs if isinstance(theirs, str) else json.dumps(theirs))
        section["config"] = str(folder / "ds.json")
    config = {"train": {"verifier": {"verifier_name_or_path": "v"}}, "deepspeed": section}
    return deepspeed_settings(RunConfig.model_validate(config), torch.bfloat16, trained=TRAINED)


def test_the_run_file_alone(tmp_path: Path) -> None:
    own = settings(tmp_path, None, stage=2, offload_optimizer=True)
    assert own["zero_optimization"]["stage"] == 2
    assert own["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert own["bf16"] == {"enabled": True}
    assert own["zero_optimization"]["reduce_bucket_size"] == TRAINED, "buffers no larger than the draft"
    assert settings(tmp_path, None, stage=0)["bf16"] == {"enabled": False}, "without ZeRO the parameters are the masters"


def test_keys_of_the_json_are_added(tmp_path: Path) -> None:
    theirs = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000},
        "wall_clock_breakdown": True,
        "gradient_clipping": "auto",
    }
    merged = settings(tmp_path, theirs)
    assert merged["zero_optimization"]["reduce_bucket_size"] == 1000
    assert merged["wall_clock_breakdown"] is True
    assert merged["gradient_clipping"] == 1.0


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"zero_optimization": {"stage": 2}}, r"zero_optimization.stage is 2, the run file makes it 3 \(deepspeed.stage\)"),
        ({"gradient_clipping": 0.5}, r"gradient_clipping is 0.5, .*engine.max_grad_norm"),
        ({"optimizer": {"type": "Adam"}}, "optimizer is set by the run file"),
        ({"fp16": {"enabled": True}}, "fp16 is set by the run file"),
        ({"train_batch_size": 8}, "engine.accumulation"),
        ("{", "not a readable DeepSpeed JSON"),
        ("[]", "a DeepSpeed JSON is a mapping"),
    ],
)
def test_what_contradicts_is_one_line(tmp_path: Path, theirs: dict[str, Any] | str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        settings(tmp_path, theirs)
