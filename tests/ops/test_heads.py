"""Products with a head: the centre goes in before rounding, and a frozen head is packed until it moves or changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from eagle3_fast.ops import _heads, linear_divergence
from eagle3_fast.ops._heads import Head, Layouts, PackedHead, head_for, held_bytes
from eagle3_fast.testing.cases import DEVICE, LINEAR_DIVERGENCE, LinearDivergenceCase

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="heads are packed on CPUs")
bfloat16_packs = pytest.mark.skipif(not _heads.packs(torch.bfloat16), reason="oneDNN has no bfloat16 products on this CPU")
HEADS = [Head, pytest.param(lambda weight: PackedHead(weight, Layouts.for_head(weight)), marks=bfloat16_packs)]


@pytest.fixture
def packed_dtype(monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """What is packed: bfloat16, or for the test's sake float32 on a CPU without bfloat16 products."""
    if _heads.packs(torch.bfloat16):
        return torch.bfloat16
    monkeypatch.setattr(_heads, "packs", lambda dtype: dtype == torch.float32)
    return torch.float32


def frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=dtype), requires_grad=False)


@pytest.mark.parametrize("make", HEADS, ids=["plain", "packed"])
def test_logits_lose_the_centre_before_they_are_rounded(make: Callable[[torch.Tensor], Head]) -> None:
    x, weight = torch.full((1, 1), 256.0, dtype=torch.bfloat16), torch.tensor([[1.0], [1.0078125]], dtype=torch.bfloat16)
    assert make(weight).logits(x, torch.tensor([256.0])).tolist() == [[0.0, 2.0]]
    small = torch.tensor([[1.0, 2**-9]], dtype=torch.bfloat16)
    ones = torch.ones(1, 2, dtype=torch.bfloat16)
    assert make(ones).logits(small, torch.tensor([1.0])).item() == 2**-9
    assert (small @ ones.T).item() == 1.0


@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize(("vocabulary", "hidden"), [(320, 64), (77, 33), (1, 1)])
def test_packed_products_are_the_plain_ones(packed_dtype: torch.dtype, rows: int, vocabulary: int, hidden: int) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, x, grad = (
        torch.randn(*shape, generator=draw).to(packed_dtype) for shape in ((vocabulary, hidden), (rows, hidden), (rows, vocabulary))
    )
    centre = torch.randn(rows, generator=draw).bfloat16().float()
    plain, packed = Head(weight), PackedHead(weight, Layouts.for_head(weight))
    for shift in (centre, torch.zeros(())):
        exact = x.double() @ weight.double().T - (shift.double()[:, None] if shift.ndim else 0)
        for head in (plain, packed):
            assert torch.allclose(head.logits(x, shift).double(), exact, rtol=2**-8, atol=1e-5)
    for head in (plain, packed):
        assert torch.allclose(head.back(grad).double(), grad.double() @ weight.double(), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("change", ["values", "place", "size"])
def test_a_frozen_head_is_packed_once_and_again_when_it_changes(packed_dtype: torch.dtype, change: str) -> None:
    weight, x = frozen(64, 16, dtype=packed_dtype), torch.randn(3, 16).to(packed_dtype)
    for _ in range(2):
        head_for(weight, packed_dtype).logits(x, torch.zeros(()))
    made = head_for(weight, packed_dtype).made
    assert made == head_for(weight, packed_dtype).made != {}
    if change == "values":
        weight.mul_(2)
    else:
        weight.data = 2 * weight.data if change == "place" else weight.data[:40]
    head = head_for(weight, packed_dtype)
    assert head.made == {}
    assert torch.allclose(head.logits(x, torch.zeros(())).float(), (x @ weight.T).float(), rtol=2**-7, atol=1e-5)


def test_what_will_not_come_back_as_it_was_is_not_packed(packed_dtype: torch.dtype) -> None:
    gathered = frozen(64, 16, dtype=packed_dtype)
    gathered.ds_id = 0
    with torch.inference_mode():
        inferred = frozen(64, 16, dtype=packed_dtype)
    trained, elsewhere = nn.Parameter(torch.randn(64, 16, dtype=packed_dtype)), frozen(64, 16, dtype=packed_dtype).to("meta")
    for weight in (gathered, inferred, trained, elsewhere, torch.randn(64, 16, dtype=packed_dtype)):
        assert type(head_for(weight, packed_dtype)) is Head
    assert type(head_for(frozen(64, 16, dtype=torch.float64), torch.float64)) is Head
    assert type(head_for(frozen(64, 16, dtype=packed_dtype), torch.float64)) is Head


def test_packed_copies_go_with_their_head(packed_dtype: torch.dtype) -> None:
    weight, item = frozen(64, 16, dtype=packed_dtype), packed_dtype.itemsize
    assert held_bytes(weight) == 0
    head = head_for(weight, packed_dtype)
    head.logits(torch.randn(3, 16).to(packed_dtype), torch.zeros(()))
    assert held_bytes(weight) == item * 64 * (16 + PackedHead.SPARE)
    head.back(torch.randn(3, 64).to(packed_dtype))
    assert held_bytes(weight) == item * 64 * (16 + PackedHead.SPARE) + item * 64 * 16
    copies = [weakref.ref(copy) for copy in head.made.values()]
    del weight, head
    gc.collect()
    assert [copy() for copy in copies] == [None, None]


@pytest.mark.parametrize("case", LINEAR_DIVERGENCE, ids=lambda case: case.name)
def test_the_op_gives_the_same_packed_or_not(
    case: LinearDivergenceCase, packed_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small chunks too, so that heads are packed in one and used in the next; twice, with the same bits."""
    monkeypatch.setattr("eagle3_fast.precision.cpu_multiplies_bfloat16", lambda: True)
    monkeypatch.setattr("eagle3_fast.ops._chunks.CHUNK_ROWS", {"cpu": (7, 7), "cuda": (7, 7)})
    inputs = {name: value.detach() for name, value in case.inputs(packed_dtype).items()}
    inputs["anchor_R"] = torch.arange(case.targets) % (case.vocab + 1) - 1
    h = inputs.pop("h_MH").requires_grad_()
    heads = {name: nn.Parameter(inputs[name], requires_grad=False) for name in ("w_VH", "u_VG")}
    plain, *packed = (linear_divergence(h_MH=h, **(inputs | own), kinds={"kl_div": 1.0, "tv": 0.5}) for own in ({}, heads, heads))
    gradient, *gradients = (torch.autograd.grad(result.loss, h)[0].float() for result in (plain, *packed))
    assert held_bytes(*heads.values()) or not case.rows
    assert torch.equal(gradients[0], gradients[1])
    for result in packed:
        assert torch.allclose(result.terms_ME, plain.terms_ME, rtol=2**-6, atol=1e-3)
        assert torch.allclose(result.draft_lse_M, plain.draft_lse_M, rtol=2**-8, atol=1e-3)
    assert (gradients[0] - gradient).norm() <= 0.02 * gradient.norm()
