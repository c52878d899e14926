"""Which parameter goes to which optimizer, and the schedules by hand."""

from __future__ import annotations

import pytest
import torch
from model.drafts import random_draft

from eagle3_fast.config import OptimizerSection, SchedulerSection
from eagle3_fast.errors import InputError
from eagle3_fast.train.muon import Muon
from eagle3_fast.train.optim import build_optimizers, build_schedule


def names(draft: torch.nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    held = {id(value) for group in optimizer.param_groups for value in group["params"]}
    return {name for name, value in draft.named_parameters() if id(value) in held}


def test_muon_takes_matrices_and_adamw_the_rest() -> None:
    draft = random_draft(train_head=True)
    muon, adamw = build_optimizers(draft.named_parameters(), OptimizerSection())
    matrices = {f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"} | {
        f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")
    }
    assert names(draft, muon) == matrices | {"fc.weight"}
    norms = {f"layers.0.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    assert names(draft, adamw) == norms | {"norm.weight", "input_norm.weight", "lm_head.weight"}


def test_adamw_takes_all() -> None:
    draft = random_draft()
    (adamw,) = build_optimizers(draft.named_parameters(), OptimizerSection(optimizer="adamw"))
    assert names(draft, adamw) == {name for name, value in draft.named_parameters() if value.requires_grad}


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(InputError, match="no trainable"):
        build_optimizers([("x", torch.nn.Parameter(torch.ones(1), requires_grad=False))], OptimizerSection())


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"scheduler_type": "linear", "scheduler_warmup_steps": 2}, [0, 0.5, 1, 0.75, 0.5, 0.25, 0]),
        ({"scheduler_type": "linear", "scheduler_warmup_steps": 0}, [1, 5 / 6, 4 / 6, 0.5, 2 / 6, 1 / 6, 0]),
        ({"scheduler_type": "cosine", "scheduler_warmup_ratio": 0.34}, [0, 0.5, 1, 0.853553, 0.5, 0.146447, 0]),
        ({"scheduler_type": "none"}, [1] * 7),
    ],
)
def test_schedule(section: dict, expected: list[float]) -> None:
    schedule = build_schedule(SchedulerSection(**section), 6)
    assert [schedule(step) for step in range(len(expected))] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("shape", [(24, 10), (10, 24)])
def test_muon_takes_the_steps_of_torch(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 bit for bit; in float32, for CPUs that only emulate bfloat16, within its rounding."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    gradients = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))

    def run(kind: type[torch.optim.Muon], native: bool) -> torch.Tensor:
        monkeypatch.setattr("eagle3_fast.precision.cpu_multiplies_bfloat16", lambda: native)
        weight = torch.nn.Parameter(start.clone())
        optimizer = kind([weight], lr=0.05, weight_decay=0.1)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        return weight.detach()

    torchs = run(torch.optim.Muon, True)
    assert torch.equal(run(Muon, True), torchs)
    single = run(Muon, False)
    assert not torch.equal(single, torchs)
    assert torch.allclose(single, torchs, atol=4 * 0.05 * 2**-5)
