"""Products with a head: the centre goes in before rounding, and a frozen head is packed once it comes back unchanged."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from eagle3_fast.ops import _heads, linear_divergence
from eagle3_fast.ops._heads import Head, Layouts, PackedHead, head_for, held_bytes
from eagle3_fast.testing.cases import LINEAR_DIVERGENCE, LinearDivergenceCase

packs = pytest.mark.skipif(not _heads._packs_bfloat16(), reason="oneDNN has no bfloat16 products on this CPU")
HEADS = [Head, pytest.param(lambda weight: PackedHead(weight, Layouts((0, 0))), marks=packs)]


@pytest.mark.parametrize("make", HEADS, ids=["plain", "packed"])
def test_logits_lose_the_centre_before_they_are_rounded(make: Callable[[torch.Tensor], Head]) -> None:
    x, weight = torch.full((1, 1), 256.0, dtype=torch.bfloat16), torch.tensor([[1.0], [1.0078125]], dtype=torch.bfloat16)
    assert make(weight).logits(x, torch.tensor([256.0])).tolist() == [[0.0, 2.0]]
    small = torch.tensor([[1.0, 2**-9]], dtype=torch.bfloat16)
    ones = torch.ones(1, 2, dtype=torch.bfloat16)
    assert make(ones).logits(small, torch.tensor([1.0])).item() == 2**-9
    assert (small @ ones.T).item() == 1.0


@packs
@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize(("vocabulary", "hidden"), [(320, 64), (77, 33), (1, 1)])
def test_packed_products_are_the_plain_ones(rows: int, vocabulary: int, hidden: int) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, x, grad = (
        torch.randn(*shape, generator=draw).bfloat16() for shape in ((vocabulary, hidden), (rows, hidden), (rows, vocabulary))
    )
    centre = torch.randn(rows, generator=draw).bfloat16().float()
    plain, packed = Head(weight), PackedHead(weight, Layouts((0, 0)))
    for shift in (centre, torch.zeros(())):
        exact = x.double() @ weight.double().T - (shift.double()[:, None] if shift.ndim else 0)
        for head in (plain, packed):
            assert torch.allclose(head.logits(x, shift).double(), exact, rtol=2**-8, atol=1e-5)
    for head in (plain, packed):
        assert torch.allclose(head.back(grad).double(), grad.double() @ weight.double(), rtol=2**-8, atol=1e-4)


@packs
def test_a_frozen_head_is_packed_when_it_comes_back_and_again_when_it_has_changed() -> None:
    weight, x = torch.randn(64, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    assert [type(head_for(weight, torch.bfloat16)) for _ in range(3)] == [Head, PackedHead, PackedHead]
    head_for(weight, torch.bfloat16).logits(x, torch.zeros(()))
    weight.mul_(2)
    assert [type(head_for(weight, torch.bfloat16)) for _ in range(2)] == [Head, PackedHead]
    logits = head_for(weight, torch.bfloat16).logits(x, torch.zeros(()))
    assert torch.equal(logits, x @ weight.T)


@pytest.mark.parametrize(
    "weight",
    [torch.randn(64, 16), torch.randn(64, 16).bfloat16().requires_grad_(), torch.randn(64, 16, device="meta").bfloat16()],
    ids=["float32", "trainable", "elsewhere"],
)
def test_other_heads_are_not_packed(weight: torch.Tensor) -> None:
    assert [type(head_for(weight, torch.bfloat16)) for _ in range(3)] == [Head] * 3


def test_a_head_of_inference_mode_is_not_packed() -> None:
    with torch.inference_mode():
        weight = torch.randn(64, 16).bfloat16()
    assert [type(head_for(weight, torch.bfloat16)) for _ in range(3)] == [Head] * 3


@packs
def test_packed_copies_go_with_their_head() -> None:
    gc.collect()
    before = held_bytes()
    weight = torch.randn(64, 16).bfloat16()
    for _ in range(2):
        head = head_for(weight, torch.bfloat16)
    head.logits(torch.randn(3, 16).bfloat16(), torch.zeros(()))
    assert held_bytes() - before == 2 * 64 * (16 + PackedHead.SPARE)
    head.back(torch.randn(3, 64).bfloat16())
    assert held_bytes() - before == 2 * 64 * (16 + PackedHead.SPARE) + 2 * 64 * 16
    del weight, head
    gc.collect()
    assert held_bytes() == before


@packs
@pytest.mark.parametrize("case", LINEAR_DIVERGENCE, ids=lambda case: case.name)
def test_the_op_gives_the_same_packed_or_not(case: LinearDivergenceCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks too, so that heads are packed in one and used in the next."""
    monkeypatch.setattr("eagle3_fast.precision.cpu_multiplies_bfloat16", lambda: True)
    monkeypatch.setattr("eagle3_fast.ops._chunks.CHUNK_ROWS", {"cpu": (7, 7), "cuda": (7, 7)})
    inputs = {name: value.detach() for name, value in case.inputs(torch.bfloat16).items()}
    inputs["anchor_R"] = torch.arange(case.targets) % (case.vocab + 1) - 1
    h = inputs.pop("h_MH").requires_grad_()
    before = held_bytes()
    results = [linear_divergence(h_MH=h, **inputs, kinds={"kl_div": 1.0, "tv": 0.5}) for _ in range(3)]
    gradients = [torch.autograd.grad(result.loss, h)[0].float() for result in results]
    assert held_bytes() > before or not case.rows
    for result, gradient in zip(results[1:], gradients[1:], strict=True):
        assert torch.allclose(result.terms_ME, results[0].terms_ME, rtol=2**-6, atol=1e-3)
        assert torch.allclose(result.draft_lse_M, results[0].draft_lse_M, rtol=2**-8, atol=1e-3)
        assert (gradient - gradients[0]).norm() <= 0.02 * gradients[0].norm()
