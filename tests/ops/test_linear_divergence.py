"""`linear_divergence` against float64 autograd, and the properties that need no reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from eagle3_fast.config import LOSS_TERMS
from eagle3_fast.ops import linear_divergence, select
from eagle3_fast.ops._chunks import KINDS, _top1, add_head_gradient
from eagle3_fast.reference import linear_divergence as reference
from eagle3_fast.testing.budget import assert_within_budget
from eagle3_fast.testing.cases import DEVICE, LINEAR_DIVERGENCE, LinearDivergenceCase

ORDINARY = LINEAR_DIVERGENCE[0]
MIX = {"kl_div": 0.25, "tv": 2.0, "jsd": 1.0}
FUSED_AND_WIDE = pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["fused", "float64"]
)
"""Properties hold for the fused row pass and, float64 being always its, for the reference."""


def by_autograd(inputs: dict, kinds: dict[str, float], dtype: torch.dtype) -> tuple:
    """Loss, rows and gradients of the reference, computed in `dtype`."""
    cast = {name: value.detach().to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    cast["h_MH"].requires_grad_()
    cast["w_VH"].requires_grad_()
    loss, rows = reference.linear_divergence(*cast.values(), list(kinds), list(kinds.values()))
    gradients = torch.autograd.grad(loss, (cast["h_MH"], cast["w_VH"])) if loss.requires_grad else (None, None)
    return loss.detach(), rows, gradients


@pytest.mark.parametrize("case", LINEAR_DIVERGENCE, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", LOSS_TERMS)
def test_value_and_gradients(case: LinearDivergenceCase, kind: str) -> None:
    inputs, kinds = case.inputs(torch.float32), {kind: 1.0}
    result = linear_divergence(**inputs, kinds=kinds)
    result.loss.backward()
    exact_loss, exact_rows, exact = by_autograd(inputs, kinds, torch.float64)
    eager_loss, eager_rows, eager = by_autograd(inputs, kinds, torch.float32)
    assert_within_budget(result.loss.detach(), exact_loss, eager_loss, "loss")
    assert_within_budget(result.terms_ME, exact_rows.terms_ME.detach(), eager_rows.terms_ME, "divergences")
    assert_within_budget(result.overlap_M, exact_rows.overlap_M, eager_rows.overlap_M, "overlap", scale=1.0)
    assert_within_budget(result.draft_lse_M, exact_rows.draft_lse_M, eager_rows.draft_lse_M, "draft log-sum-exp")
    for name, exact_gradient, eager_gradient in zip(("h_MH", "w_VH"), exact, eager, strict=True):
        assert_within_budget(inputs[name].grad, exact_gradient, eager_gradient, f"gradient of {name}")


@FUSED_AND_WIDE
def test_weighted_mix_is_the_sum_of_its_terms(dtype: torch.dtype, rtol: float) -> None:
    inputs = ORDINARY.inputs(dtype)
    parts = [weight * linear_divergence(**inputs, kinds={kind: 1.0}).loss for kind, weight in MIX.items()]
    whole = linear_divergence(**inputs, kinds=MIX)
    assert torch.allclose(whole.loss, sum(parts), rtol=rtol)
    assert whole.terms_ME.shape == (ORDINARY.rows, 3)


def bf16_gradient_error(kind: str, scale: float, apart: float = 0.05) -> float:
    """Relative error of dL/dh for bf16 inputs with a draft `apart` from its verifier; `scale` sets how sharp the distributions are.

    The heads are frozen parameters, as in training.
    """
    draw = torch.Generator().manual_seed(0)
    t = torch.randn(64, 256, generator=draw)
    u = torch.randn(1024, 256, generator=draw) * 256**-0.5 * scale
    h = (t + apart * torch.randn(64, 256, generator=draw)).to(DEVICE, torch.bfloat16).requires_grad_()
    u, t = nn.Parameter(u.to(DEVICE, torch.bfloat16), requires_grad=False), t.to(DEVICE, torch.bfloat16)
    row, weight, anchor = torch.arange(64), torch.full((64,), 1 / 64, device=DEVICE), (t.float() @ u.float().T).argmax(-1)
    linear_divergence(h, u, t, u, row, weight, {kind: 1.0}, anchor_R=anchor).loss.backward()
    exact = h.detach().double().requires_grad_()
    loss, _ = reference.linear_divergence(exact, u.double(), t.double(), u.double(), row, weight.double(), [kind], [1.0])
    loss.backward()
    return float((h.grad.double() - exact.grad).norm() / exact.grad.norm())


@pytest.fixture
def impl() -> Iterator[Callable[..., None]]:
    """`ops.select`, undone afterwards."""
    yield select
    select("auto")


@pytest.mark.parametrize("kind", LOSS_TERMS)
def test_bf16_inputs_lose_less_than_one_percent_near_convergence(kind: str) -> None:
    """At a KL of 0.09. The gradients of the total-variation kinds jump where the two distributions cross, whatever the storage."""
    jumps = kind in ("tv", "nla", "lk_hybrid")
    assert bf16_gradient_error(kind, 3.0, apart=0.15) <= (0.04 if jumps else 0.01)


@pytest.mark.parametrize("kind", LOSS_TERMS)
def test_float32_logits_of_bf16_inputs_lose_nothing_but_their_last_rounding(kind: str, impl: Callable[..., None]) -> None:
    impl("fused", "float32")
    assert bf16_gradient_error(kind, 3.0) <= 0.003


@pytest.mark.parametrize("kind", ["kl_div", "lk_hybrid"])
def test_centred_logits_carry_a_tenth_of_the_error_of_plain_ones(
    kind: str, impl: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3_fast.precision.cpu_multiplies_bfloat16", lambda: True)
    errors = {}
    for storage in ("centred", "bfloat16", "float32"):
        impl("fused", storage)
        errors[storage] = bf16_gradient_error(kind, 8.0)
    assert errors["float32"] <= errors["centred"] <= 0.02
    assert errors["centred"] <= 0.1 * errors["bfloat16"], errors


def test_centring_changes_no_result(impl: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Any anchor, a wild one too, gives the same divergences and log-sum-exps up to bf16 rounding of the logits."""
    monkeypatch.setattr("eagle3_fast.precision.cpu_multiplies_bfloat16", lambda: True)
    inputs = ORDINARY.inputs(torch.bfloat16)
    draw = torch.Generator().manual_seed(2)
    wild = torch.randint(-1, ORDINARY.vocab, (ORDINARY.targets,), generator=draw).to(DEVICE)
    impl("fused", "float32")
    expected = linear_divergence(**inputs, kinds=MIX)
    impl("fused", "centred")
    for anchor in (None, wild):
        result = linear_divergence(**inputs, kinds=MIX, anchor_R=anchor)
        assert torch.allclose(result.terms_ME, expected.terms_ME, rtol=0.05, atol=0.02)
        assert torch.allclose(result.verifier_lse_M, expected.verifier_lse_M, atol=0.05)
        assert torch.allclose(result.draft_lse_M, expected.draft_lse_M, atol=0.05)


@pytest.mark.parametrize("case", LINEAR_DIVERGENCE, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", LOSS_TERMS)
def test_reference_behind_the_same_contract(case: LinearDivergenceCase, kind: str, impl: Callable[..., None]) -> None:
    impl("reference")
    test_value_and_gradients(case, kind)


def test_a_row_scored_by_many_chunks_of_one_verifier_row(impl: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks smaller than a verifier row's drafts change nothing."""
    inputs = ORDINARY.inputs(torch.float32)
    inputs["target_row_M"] = inputs["target_row_M"] // 7
    whole = linear_divergence(**inputs, kinds=MIX)
    whole.loss.backward()
    gradients = [inputs[name].grad.clone() for name in ("h_MH", "w_VH")]
    monkeypatch.setattr("eagle3_fast.ops._chunks.CHUNK_ROWS", {"cpu": (1, 3), "cuda": (1, 3)})
    inputs["h_MH"].grad = inputs["w_VH"].grad = None
    cut = linear_divergence(**inputs, kinds=MIX)
    cut.loss.backward()
    assert torch.allclose(cut.terms_ME, whole.terms_ME, rtol=1e-5)
    for name, gradient in zip(("h_MH", "w_VH"), gradients, strict=True):
        assert torch.allclose(inputs[name].grad, gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 2, 29])
def test_head_gradient_is_accumulated_in_float32(rows: int) -> None:
    """256 chunks of bf16 products add up as one does: nothing is lost to a bf16 running sum."""
    draw = torch.Generator().manual_seed(0)
    z, h = torch.rand(256 * rows, 5, generator=draw).bfloat16(), torch.rand(256 * rows, 3, generator=draw).bfloat16()
    total = torch.zeros(5, 3)
    for part_z, part_h in zip(z.split(rows), h.split(rows), strict=True):
        add_head_gradient(total, part_z, part_h)
    exact = z.double().T @ h.double()
    assert ((total - exact).abs() / exact).max() < 2 * torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize("vocab", [40, 5000])
@pytest.mark.parametrize("kind", [kind for kind in LOSS_TERMS if kind != "ce"])
@FUSED_AND_WIDE
def test_a_draft_equal_to_the_verifier_has_nothing_to_learn(dtype: torch.dtype, rtol: float, kind: str, vocab: int) -> None:
    draw = torch.Generator().manual_seed(0)
    h, w = (torch.randn(rows, 8, generator=draw, dtype=dtype).to(DEVICE) for rows in (6, vocab))
    h.requires_grad_()
    result = linear_divergence(h, w, h.detach(), w, torch.arange(6), torch.ones(6, dtype=dtype, device=DEVICE), {kind: 1.0})
    result.loss.backward()
    assert abs(result.loss.item()) < rtol
    assert h.grad.abs().max() < rtol
    assert torch.equal(result.draft_top1_M, result.verifier_top1_M)


@FUSED_AND_WIDE
def test_rows_do_not_depend_on_each_other(dtype: torch.dtype, rtol: float) -> None:
    inputs = ORDINARY.inputs(dtype)
    order = torch.randperm(ORDINARY.rows, generator=torch.Generator().manual_seed(1))
    whole = linear_divergence(**inputs, kinds=MIX)
    mixed = {**inputs, **{name: inputs[name][order] for name in ("h_MH", "target_row_M", "row_weight_M")}}
    permuted = linear_divergence(**mixed, kinds=MIX)
    assert torch.allclose(permuted.terms_ME, whole.terms_ME[order], rtol=rtol)
    single = {**inputs, **{name: inputs[name][4:5] for name in ("h_MH", "target_row_M", "row_weight_M")}}
    assert torch.allclose(linear_divergence(**single, kinds=MIX).terms_ME, whole.terms_ME[4:5], rtol=rtol)


@FUSED_AND_WIDE
def test_permuting_the_vocabulary_changes_nothing(dtype: torch.dtype, rtol: float) -> None:
    inputs = ORDINARY.inputs(dtype)
    order = torch.randperm(ORDINARY.vocab, generator=torch.Generator().manual_seed(1))
    permuted = linear_divergence(**{**inputs, "w_VH": inputs["w_VH"][order], "u_VG": inputs["u_VG"][order]}, kinds=MIX)
    assert torch.allclose(permuted.loss, linear_divergence(**inputs, kinds=MIX).loss, rtol=rtol)


def test_a_frozen_head_gets_no_gradient_and_no_buffer() -> None:
    inputs = ORDINARY.inputs(torch.float32)
    frozen = {**inputs, "w_VH": inputs["w_VH"].detach()}
    linear_divergence(**frozen, kinds=MIX).loss.backward()
    raw = torch.ops.eagle3_fast.linear_divergence(*frozen.values(), None, "kl_div", [1.0], 0.0, "centred", True, False)
    assert frozen["w_VH"].grad is None
    assert raw[-1].numel() == 0


@FUSED_AND_WIDE
def test_two_losses_of_the_same_tensors_add_their_gradients(dtype: torch.dtype, rtol: float) -> None:
    inputs = ORDINARY.inputs(dtype)
    before = inputs["h_MH"].detach().clone()
    first, second = (linear_divergence(**inputs, kinds={kind: 1.0}).loss for kind in ("kl_div", "tv"))
    (first + second).backward(retain_graph=True)
    once = inputs["h_MH"].grad.clone()
    (first + second).backward()
    assert torch.allclose(inputs["h_MH"].grad, 2 * once, rtol=rtol)
    assert torch.equal(inputs["h_MH"].detach(), before)


def test_loss_is_the_same_without_gradients() -> None:
    inputs = ORDINARY.inputs(torch.float32)
    with torch.no_grad():
        quiet = linear_divergence(**inputs, kinds=MIX)
    assert torch.equal(quiet.loss, linear_divergence(**inputs, kinds=MIX).loss.detach())


def test_autocast_outside_does_not_reach_the_products() -> None:
    inputs = ORDINARY.inputs(torch.float32)
    plain = linear_divergence(**inputs, kinds=MIX).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear_divergence(**inputs, kinds=MIX).loss, plain)


def test_strided_inputs() -> None:
    inputs = ORDINARY.inputs(torch.float32)
    wide = torch.stack((inputs["h_MH"], torch.zeros_like(inputs["h_MH"])), dim=1).detach()[:, 0]
    tall = inputs["w_VH"].detach().T.contiguous().T
    result = linear_divergence(**{**inputs, "h_MH": wide.requires_grad_(), "w_VH": tall}, kinds=MIX)
    result.loss.backward()
    plain = {**inputs, "w_VH": inputs["w_VH"].detach()}
    expected = linear_divergence(**plain, kinds=MIX)
    expected.loss.backward()
    assert torch.allclose(result.loss, expected.loss)
    assert torch.allclose(wide.grad, inputs["h_MH"].grad)


@pytest.mark.parametrize("gap", [400.0, 102.0, 88.5, 86.0])  # e^-86 is a normal number, a hundredth of it is not
@pytest.mark.parametrize("kind", ["kl_div", "rkl", "jsd", "tv", "nla", "lk_hybrid"])
def test_underflow_on_both_sides_stays_finite(kind: str, gap: float) -> None:
    many, one = torch.tensor([0.0] * 100 + [-gap]), torch.tensor([-gap] * 100 + [0.0])
    z, t, eye = torch.stack((many, one)).to(DEVICE), torch.stack((one, many)).to(DEVICE), torch.eye(101, device=DEVICE)
    h = z.clone().requires_grad_()
    result = linear_divergence(h, eye, t, eye, torch.arange(2), torch.ones(2, device=DEVICE), {kind: 1.0})
    result.loss.backward()
    exact, gradient = _exact_of_logits(z, t, kind)
    assert result.loss.isfinite()
    assert h.grad.isfinite().all()
    assert math.isclose(result.loss.item(), exact, rel_tol=1e-5, abs_tol=1e-6)
    assert torch.allclose(h.grad.double(), gradient, rtol=1e-5, atol=1e-6)


def _exact_of_logits(z: torch.Tensor, t: torch.Tensor, kind: str) -> tuple[float, torch.Tensor]:
    wide = z.double().requires_grad_()
    terms = reference.row_divergences(wide, t.double(), torch.arange(len(z)), [kind])[0].terms_ME
    terms.sum().backward()
    return terms.sum().item(), wide.grad


def test_a_common_offset_of_the_logits_changes_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    z, t = torch.randn(4, 50, generator=draw), torch.randn(4, 50, generator=draw)
    losses = []
    for offset in (0.0, 1e2, 1e4):
        rows, _ = reference.row_divergences(z + offset, t + offset, torch.arange(4), ["kl_div"])
        losses.append(rows.terms_ME)
    assert all((loss - losses[0]).abs().max() < 1e-3 for loss in losses)


def test_masked_vocabulary_entries_add_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    z, t = torch.randn(4, 50, generator=draw), torch.randn(4, 50, generator=draw)
    masked = [torch.cat((x, torch.full((4, 7), -torch.inf)), dim=1) for x in (z, t)]
    for kind in LOSS_TERMS:
        whole, both = reference.row_divergences(*masked, torch.arange(4), [kind])
        part, plain = reference.row_divergences(z, t, torch.arange(4), [kind])
        assert torch.allclose(whole.terms_ME, part.terms_ME, atol=1e-6), kind
        gradient = reference.logit_gradient(both, [kind], [1.0])
        assert torch.allclose(gradient[:, :50], reference.logit_gradient(plain, [kind], [1.0]), atol=1e-6)
        assert (gradient[:, 50:] == 0).all()


@FUSED_AND_WIDE
def test_softcap_bends_verifier_logits_only(dtype: torch.dtype, rtol: float) -> None:
    inputs = ORDINARY.inputs(dtype)
    capped = linear_divergence(**inputs, kinds={"kl_div": 1.0}, verifier_softcap=2.0)
    logits = 2.0 * torch.tanh(inputs["t_RG"] @ inputs["u_VG"].T / 2.0)
    rows, _ = reference.row_divergences(inputs["h_MH"] @ inputs["w_VH"].T, logits, inputs["target_row_M"], ["kl_div"])
    assert torch.allclose(capped.terms_ME, rows.terms_ME, rtol=10 * rtol)


def test_many_rows_do_not_overflow_the_mean() -> None:
    rows = 65_536
    h, w = torch.ones(rows, 1, dtype=torch.bfloat16), torch.tensor([[0.0], [8.0]], dtype=torch.bfloat16)
    t, u = torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([[100.0], [0.0]], dtype=torch.bfloat16)
    weight = torch.full((rows,), 1 / rows)
    loss = linear_divergence(h, w, t, u, torch.zeros(rows, dtype=torch.int64), weight, {"kl_div": 1.0}).loss
    assert math.isclose(loss.item(), math.log1p(math.exp(8)), rel_tol=1e-5)


def test_ties_take_the_lowest_index() -> None:
    w = torch.zeros(1026, 4)
    result = linear_divergence(
        torch.ones(3, 4), w - 1, torch.ones(1, 4), w - 1, torch.zeros(3, dtype=torch.int64), torch.ones(3), {"ce": 1.0}
    )
    assert result.draft_top1_M.tolist() == [0, 0, 0] == result.verifier_top1_M.tolist()


def test_opcheck() -> None:
    inputs = LinearDivergenceCase("small", 5, 3, 11, hidden=4, verifier_hidden=6).inputs(torch.float32)
    torch.library.opcheck(
        torch.ops.eagle3_fast.linear_divergence, (*inputs.values(), None, "kl_div,tv", [1.0, 0.5], 0.0, "centred", True, True)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w_VH": torch.zeros(7, 32)}, "map the vocabulary first"),
        ({"w_VH": torch.zeros(0, 32)}, "ZeRO-3"),
        ({"w_VH": torch.zeros(101, 31)}, r"h \[M, H\]"),
        ({"t_RG": torch.zeros(19, 47)}, r"t \[R, G\]"),
        ({"target_row_M": torch.zeros(37)}, "target_row"),
        ({"row_weight_M": torch.zeros(36)}, "row_weight"),
        ({"t_RG": torch.zeros(19, 48).bfloat16()}, "share a float dtype"),
    ],
)
def test_wrong_inputs_are_named(change: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        linear_divergence(**{**ORDINARY.inputs(torch.float32), **change}, kinds={"kl_div": 1.0})


@pytest.mark.parametrize("side", ["h_MH", "t_RG"])
@pytest.mark.parametrize("kind", LOSS_TERMS)
@pytest.mark.parametrize("name", ["fused", "reference"])
def test_a_broken_row_is_not_a_perfect_one(side: str, kind: str, name: str, impl: Callable[..., None]) -> None:
    """NaN in a hidden state is NaN in every divergence of its rows, and nowhere else."""
    impl("auto" if name == "fused" else name)
    inputs = ORDINARY.inputs(torch.float32)
    inputs[side].data[3, 5] = math.nan
    rows = torch.arange(ORDINARY.rows) == 3 if side == "h_MH" else inputs["target_row_M"] == 3
    result = linear_divergence(**inputs, kinds={kind: 1.0})
    assert torch.equal(result.overlap_M.isnan().cpu(), rows)
    if kind == "ce" and side == "t_RG":
        return  # reads nothing of the verifier but its top token
    assert torch.equal(result.terms_ME[:, 0].isnan().cpu(), rows)
    assert result.loss.isnan() or not rows.any()
    assert result.draft_top1_M.max() < ORDINARY.vocab
    assert result.verifier_top1_M.max() < ORDINARY.vocab


@pytest.mark.skipif(DEVICE != "cpu", reason="GPUs take torch's argmax")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 64, 1000, 4099])
def test_top1_is_the_first_of_the_largest(dtype: torch.dtype, size: int) -> None:
    linear_divergence(**ORDINARY.inputs(torch.float32), kinds={"kl_div": 1.0})  # loads the C++ module
    logits = torch.randn(5, size + 3, generator=torch.Generator().manual_seed(size)).to(dtype)[:, :size]
    logits[1] = 2.0
    logits[2, size // 2 :] = 9.0
    logits[3], logits[4] = math.nan, -math.inf
    first = int((logits[0] == logits[0].max()).nonzero()[0])
    assert _top1(logits).tolist() == [first, 0, size // 2, 0, 0]


@pytest.mark.parametrize("side", ["h_MH", "t_RG"])
@pytest.mark.parametrize("kinds", [{"kl_div": 1.0}, MIX], ids=["kl_div", "mix"])
@pytest.mark.parametrize("name", ["fused", "reference"])
def test_a_row_of_weight_zero_adds_nothing_however_far_off(
    name: str, kinds: dict[str, float], side: str, impl: Callable[..., None]
) -> None:
    impl("auto" if name == "fused" else name)
    inputs = ORDINARY.inputs(torch.float32)
    broken = torch.arange(ORDINARY.rows) == 3 if side == "h_MH" else inputs["target_row_M"] == 3
    inputs["row_weight_M"][broken] = 0
    trained = inputs["h_MH"], inputs["w_VH"]
    expected = linear_divergence(**inputs, kinds=kinds).loss
    expected_gradients = torch.autograd.grad(expected, trained)
    inputs[side].data[3] = math.nan
    loss = linear_divergence(**inputs, kinds=kinds).loss
    assert torch.equal(loss, expected)
    for found, wanted in zip(torch.autograd.grad(loss, trained), expected_gradients, strict=True):
        assert torch.equal(found, wanted)


def test_kinds_stand_in_one_order_everywhere() -> None:
    assert LOSS_TERMS == KINDS
    kernels = pytest.importorskip("eagle3_fast.kernels.linear_divergence", reason="Triton is not installed", exc_type=ImportError)
    assert kernels.KINDS == KINDS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_row_M": torch.full((37,), -1)}, "target_row must lie in 0..18"),
        ({"target_row_M": torch.full((37,), 19)}, "target_row must lie in 0..18"),
        ({"kinds": {"foo": 1.0}}, "kinds must give"),
        ({"kinds": {"kl_div": 1.0, "jsd": 0.0}}, "weights other than 0"),
    ],
)
def test_indices_and_kinds_are_checked(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_divergence(**{**ORDINARY.inputs(torch.float32), "kinds": {"kl_div": 1.0}, **change})
