"""The row kernel of `linear_divergence`, run on the CPU by Triton's interpreter, against the float64 reference.

Whether a kernel is compiled or interpreted is decided when triton is imported, for a whole process. So pytest finds one test here,
which runs the functions called `check_*` in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KINDS = ("kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid")
MIX = {"kl_div": 0.5, "rkl": 1.0, "jsd": 2.0, "ce": 0.25, "tv": 1.5, "nla": 0.75, "lk_hybrid": 1.0}
DTYPES = (torch.float32, torch.bfloat16)
COUNTS = (3, 0, 1, 7)

if INTERPRETED:
    import triton
    import triton.language as tl

    from eagle3_fast.kernels import linear_divergence as kernel
    from eagle3_fast.reference import linear_divergence as reference
    from eagle3_fast.testing.budget import assert_within_budget

    @triton.jit
    def _products(a, b, widened, narrowed, out, SIZE: tl.constexpr):
        cells = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        x, y = tl.load(a + cells).to(tl.float32), tl.load(b + cells).to(tl.float32)
        tl.store(widened + cells, x)
        tl.store(narrowed + cells, (x * 1.01).to(tl.bfloat16))
        tl.store(out + cells, tl.dot(x, y))


def test_row_kernel_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-x", "--durations=5", "-o", "python_functions=check_*", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module", autouse=INTERPRETED)
def canary() -> None:
    """The interpreter emulates bf16: what it loads, stores and multiplies must be right before a kernel can be judged by it.

    That of triton 3.9 cuts bf16 off where a card rounds, one step of the last digit, which the budget forgives; and it multiplies
    bf16 matrices wrongly, so the products here are of float32.
    """
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=draw).bfloat16() for _ in range(2))
    widened, narrowed, out = torch.empty(16, 16), torch.empty_like(a), torch.empty(16, 16)
    _products[(1,)](a, b, widened, narrowed, out, SIZE=16)
    exact = a.float() * torch.tensor(1.01)
    assert torch.equal(widened, a.float())
    assert ((narrowed.float() - exact).abs() <= torch.finfo(torch.bfloat16).eps * exact.abs()).all()
    assert torch.allclose(out.double(), a.double() @ b.double(), atol=1e-5)


@dataclass
class Rows:
    """What `row_divergence` filled: the gradient (or the untouched logits), and its other results."""

    z_MV: Tensor
    terms_M7: Tensor
    draft_top1_M: Tensor
    verifier_top1_R: Tensor
    overlap_M: Tensor
    draft_lse_M: Tensor
    verifier_lse_R: Tensor


def normal(rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)


def run(z: Tensor, t: Tensor, counts: tuple[int, ...], kinds: dict[str, float], **options) -> Rows:
    """Outputs start as NaN or -7, so that one left unwritten shows."""
    rows, targets = len(z), len(t)
    results = Rows(
        z.clone(memory_format=torch.preserve_format),
        torch.full((rows, 7), torch.nan),
        *(torch.full((size,), -7, dtype=torch.int64) for size in (rows, targets)),
        *(torch.full((size,), torch.nan) for size in (rows, rows, targets)),
    )
    first = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    kernel.row_divergence(
        *(results.z_MV, t, first, options.get("weight", torch.linspace(0.1, 1, rows))),
        *(torch.tensor([kinds.get(kind, 0.0) for kind in KINDS]), options.get("centre", torch.full((targets,), torch.nan))),
        *(options.get("cap", 0.0), options.get("form_gradient", True), *list(vars(results).values())[1:]),
    )
    return results


def expected(
    z: Tensor, t: Tensor, counts: tuple[int, ...], kinds: dict[str, float], dtype: torch.dtype, weight: Tensor | None
) -> Rows:
    """The reference in `dtype` on the logits as stored."""
    target = torch.repeat_interleave(torch.arange(len(t)), torch.tensor(counts))
    rows, both = reference.row_divergences(z.to(dtype), t.to(dtype), target, list(KINDS))
    weight = torch.linspace(0.1, 1, len(z)) if weight is None else weight
    gradient = reference.logit_gradient(both, list(kinds), list(kinds.values())) * weight.to(dtype)[:, None]
    lse = t.to(dtype).logsumexp(-1)
    return Rows(gradient, rows.terms_ME, rows.draft_top1_M, t.argmax(-1), rows.overlap_M, rows.draft_lse_M, lse)


def assert_agrees(
    actual: Rows, z: Tensor, t: Tensor, counts: tuple[int, ...], kinds: dict[str, float], weight: Tensor | None = None
) -> None:
    """Every result within the budget; infinite divergences and, where it is not asked for, jsd apart."""
    exact, eager = (expected(z, t, counts, kinds, dtype, weight) for dtype in (torch.float64, torch.float32))
    for index, kind in enumerate(KINDS):
        if kind == "jsd" and not kinds.get(kind):
            assert actual.terms_M7[:, index].isnan().all()
            continue
        finite = exact.terms_M7[:, index].isfinite()
        assert torch.equal(actual.terms_M7[~finite, index].double(), exact.terms_M7[~finite, index]), kind
        columns = (rows.terms_M7[finite, index] for rows in (actual, exact, eager))
        assert_within_budget(*columns, kind)
    for name in ("overlap_M", "draft_lse_M", "verifier_lse_R"):
        assert_within_budget(*(getattr(rows, name) for rows in (actual, exact, eager)), name)
    assert torch.equal(actual.draft_top1_M, exact.draft_top1_M)
    assert torch.equal(actual.verifier_top1_R, exact.verifier_top1_R)
    assert_within_budget(actual.z_MV, exact.z_MV, eager.z_MV.to(z.dtype), "gradient")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def check_each_kind(kind: str, dtype: torch.dtype) -> None:
    z, t, counts = normal(3, 257, dtype), normal(2, 257, dtype, seed=1), (1, 2)
    assert_agrees(run(z, t, counts, {kind: 1.5}), z, t, counts, {kind: 1.5})


TWO_SWEEPS = {"kl_div": 1.0, "ce": 0.5}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "kinds"), [(1, MIX), (257, TWO_SWEEPS), (1026, MIX)], ids=str)
def check_verifier_rows_with_none_and_many(vocab: int, kinds: dict[str, float], dtype: torch.dtype) -> None:
    z, t = normal(11, vocab, dtype), normal(4, vocab, dtype, seed=1)
    assert_agrees(run(z, t, COUNTS, kinds), z, t, COUNTS, kinds)


@pytest.mark.parametrize("kinds", [MIX, {"kl_div": 1.0}], ids=["mix", "kl_div"])
def check_several_blocks_and_equal_maxima(kinds: dict[str, float]) -> None:
    z, t = normal(2, 5000, torch.bfloat16), normal(2, 5000, seed=1)
    z[0, [4166, 2500, 2118, 70]] = 20.0  # 2048 apart: the same lane of several blocks
    z[1, 4999] = t[0, 4999] = 30.0
    t[1, [4096, 2049, 2048]] = 19.0
    actual = run(z, t, (1, 1), kinds)
    assert actual.draft_top1_M.tolist() == [70, 4999]
    assert actual.verifier_top1_R.tolist() == [4999, 2048]
    assert_agrees(actual, z, t, (1, 1), kinds)


def check_a_draft_near_the_verifier_under_a_common_offset() -> None:
    z = normal(2, 1026) + 200
    t = z + 0.01 * normal(2, 1026, seed=1)
    assert_agrees(run(z, t, (1, 1), MIX), z, t, (1, 1), MIX)


@pytest.mark.parametrize("kinds", [MIX, *({kind: 1.0} for kind in KINDS)], ids=str)
def check_underflow_on_both_sides(kinds: dict[str, float]) -> None:
    z, t = torch.tensor([[200.0, 0.0, -200.0], [0.0, 200.0, 0.0]]), torch.tensor([[-200.0, 0.0, 200.0]])
    assert_agrees(run(z, t, (2,), kinds), z, t, (2,), kinds)


@pytest.mark.parametrize("kinds", [MIX, {"kl_div": 1.0}], ids=["mix", "kl_div"])
def check_columns_masked_on_both_sides(kinds: dict[str, float]) -> None:
    z, t = normal(2, 2300), normal(1, 2300, seed=1)
    for x in (z, t):
        x[:, :2060] = x[:, 2200:] = -torch.inf
    actual = run(z, t, (2,), kinds)
    assert actual.z_MV[:, :2060].eq(0).all()
    assert_agrees(actual, z, t, (2,), kinds)


@pytest.mark.parametrize("kinds", [{"kl_div": 1.0}, {kind: 1.0 for kind in KINDS if kind != "rkl"}], ids=["kl_div", "mix"])
def check_columns_masked_on_one_side(kinds: dict[str, float]) -> None:
    z, t = normal(2, 257), normal(2, 257, seed=1)
    z[0, 5:9] = t[1, 7:11] = -torch.inf
    actual = run(z, t, (1, 1), kinds)
    assert actual.terms_M7[0, 0] == torch.inf == actual.terms_M7[1, 1]
    assert_agrees(actual, z, t, (1, 1), kinds)


def check_an_infinite_reverse_kl_adds_nothing() -> None:
    z, t = normal(1, 257), normal(1, 257, seed=1)
    t[0, 7:11] = -torch.inf
    actual, without = (run(z, t, (1,), kinds) for kinds in ({"rkl": 1.0, "tv": 1.0}, {"tv": 1.0}))
    assert actual.terms_M7[0, 1] == torch.inf
    assert torch.equal(actual.z_MV, without.z_MV)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def check_softcap_of_centred_verifier_logits(dtype: torch.dtype) -> None:
    z, t, centre = normal(4, 257, dtype), normal(3, 257, dtype, seed=1), torch.tensor([0.5, 7.0, -21.5])
    t[:, 40:50] = z[:, 40:50] = -torch.inf
    actual = run(z, t, (2, 1, 1), MIX, cap=5.0, centre=centre)
    capped = reference.softcap(t.double() + centre[:, None].double(), 5.0).masked_fill(t == -torch.inf, -torch.inf)
    assert_agrees(actual, z, capped, (2, 1, 1), MIX)


def check_a_broken_row_is_not_a_perfect_one() -> None:
    """NaN among the logits of either side is NaN in the divergences, the overlap and the gradient of its rows, and nowhere else."""
    for side, broken in ((0, [False, True, False, False]), (1, [False, False, True, True])):
        logits = [normal(4, 300), normal(2, 300, seed=1)]
        logits[side][1, 7] = torch.nan
        for kinds in ({"kl_div": 1.0}, {"tv": 1.0}, {"lk_hybrid": 1.0}):
            actual, rows = run(*logits, (2, 2), kinds), torch.tensor(broken)
            assert torch.equal(actual.terms_M7[:, KINDS.index(next(iter(kinds)))].isnan(), rows)
            assert torch.equal(actual.overlap_M.isnan(), rows)
            assert torch.equal(actual.z_MV.isnan().any(1), rows)


def check_weights_of_zero() -> None:
    z, t = normal(3, 257), normal(2, 257, seed=1)
    weight = torch.tensor([0.5, 0.0, 0.0])
    assert_agrees(run(z, t, (1, 2), MIX, weight=weight), z, t, (1, 2), MIX, weight)
    none = run(z, t, (1, 2), {})
    assert none.z_MV.eq(0).all()
    assert torch.equal(none.terms_M7[:, :2], run(z, t, (1, 2), {"kl_div": 1.0}).terms_M7[:, :2])


@pytest.mark.parametrize("kinds", [MIX, {"kl_div": 1.0}], ids=["mix", "kl_div"])
def check_without_gradient_the_logits_stay(kinds: dict[str, float]) -> None:
    z, t = normal(3, 257, torch.bfloat16), normal(2, 257, seed=1)
    quiet, loud = (run(z, t, (1, 2), kinds, form_gradient=form) for form in (False, True))
    assert torch.equal(quiet.z_MV, z)
    for name, value in list(vars(quiet).items())[1:]:
        assert torch.equal(value.nan_to_num(), vars(loud)[name].nan_to_num()), name


def check_rows_with_gaps_between_them() -> None:
    wide, t = normal(3, 300), normal(2, 400, seed=1)[:, :257]
    z, first = wide.clone()[:, :257], torch.tensor([0, 1, 3], dtype=torch.int32)
    plain = run(wide[:, :257].contiguous(), t.contiguous(), (1, 2), MIX)
    results = list(vars(run(z, t, (1, 2), MIX)).values())
    kernel.row_divergence(
        z, t, first, torch.linspace(0.1, 1, 3), torch.tensor(list(MIX.values())), torch.zeros(2), 0.0, True, *results[1:]
    )
    assert torch.equal(z, plain.z_MV)
    assert torch.equal(results[1], plain.terms_M7)
    assert torch.equal(z._base[:, 257:], wide[:, 257:])


def check_no_rows() -> None:
    assert run(normal(0, 257), normal(0, 257), (), MIX).terms_M7.shape == (0, 7)
    t = normal(2, 257)
    assert torch.equal(run(normal(0, 257), t, (0, 0), MIX).verifier_top1_R, t.argmax(-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"t": torch.zeros(2, 9)}, r"z \[M, V\]"),
        ({"z": torch.zeros(10, 3).T}, "adjacent"),
        ({"z": torch.zeros(3, 10, dtype=torch.float16)}, "bfloat16 or float32"),
        ({"counts": (3,)}, r"first must be int32 \[3\]"),
    ],
)
def check_wrong_inputs_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**{"z": torch.zeros(3, 10), "t": torch.zeros(2, 10), "counts": (1, 2), "kinds": MIX, **change})
