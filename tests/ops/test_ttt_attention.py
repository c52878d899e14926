"""`ttt_attention` against dense masked attention in float64, and the properties that need no reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from eagle3_fast.ops import select, ttt_attention
from eagle3_fast.testing.budget import assert_within_budget
from eagle3_fast.testing.cases import TTT_ATTENTION, TTTAttentionCase


def dense(inputs: dict, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """The same attention with one dense mask over [shared keys, own keys of step 1, of step 2, ...], and its gradients by autograd."""
    cast = {name: _cast(value, dtype) for name, value in inputs.items()}
    q, n, total = cast["q_NQD"], len(cast["q_NQD"]), len(cast["k_TKD"])
    group = q.shape[1] // cast["k_TKD"].shape[1]
    own_k, own_v = ([own[rows] for own, rows in zip(cast[name], inputs["own_rows"], strict=True)] for name in ("own_k", "own_v"))
    keys = torch.cat((cast["k_TKD"], *own_k)).repeat_interleave(group, dim=1)
    values = torch.cat((cast["v_TKD"], *own_v)).repeat_interleave(group, dim=1)
    index = torch.arange(total, device=q.device)
    mask = (index >= inputs["key_range_N2"][:, :1]) & (index < inputs["key_range_N2"][:, 1:])
    mask = torch.cat((mask, *(torch.eye(n, dtype=torch.bool, device=q.device) for _ in cast["own_k"])), dim=1)
    scores = torch.einsum("nhd,thd->hnt", q, keys) * inputs["scale"]
    out = torch.einsum("hnt,thd->nhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), values)
    leaves = [q, cast["k_TKD"], cast["v_TKD"], *cast["own_k"], *cast["own_v"]]
    return out.detach(), list(torch.autograd.grad((out * _probe(out)).sum(), leaves))


def _cast(value: object, dtype: torch.dtype) -> object:
    if isinstance(value, list):
        return [_cast(item, dtype) for item in value]
    return value.detach().to(dtype).requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value


def _probe(out: Tensor) -> Tensor:
    """A fixed, uneven weight of each output element."""
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)


def ours(inputs: dict) -> tuple[Tensor, list[Tensor]]:
    out = ttt_attention(**inputs)
    leaves = [inputs["q_NQD"], inputs["k_TKD"], inputs["v_TKD"], *inputs["own_k"], *inputs["own_v"]]
    return out.detach(), list(torch.autograd.grad((out * _probe(out)).sum(), leaves))


@pytest.fixture(params=["fused", "reference"])
def impl(request: pytest.FixtureRequest) -> Iterator[None]:
    select("auto" if request.param == "fused" else request.param)
    yield
    select("auto")


@pytest.mark.usefixtures("impl")
@pytest.mark.parametrize("case", TTT_ATTENTION, ids=lambda case: case.name)
def test_output_and_gradients(case: TTTAttentionCase) -> None:
    inputs = case.inputs(torch.float32)
    out, gradients = ours(inputs)
    exact_out, exact = dense(inputs, torch.float64)
    eager_out, eager = dense(inputs, torch.float32)
    assert_within_budget(out, exact_out, eager_out, "output")
    for position, (gradient, exact_gradient, eager_gradient) in enumerate(zip(gradients, exact, eager, strict=True)):
        assert_within_budget(gradient, exact_gradient, eager_gradient, f"gradient {position}")


def test_a_row_that_sees_nothing_gives_zero_and_no_nan() -> None:
    inputs = TTTAttentionCase("none", (5,), steps=0).inputs(torch.float32)
    inputs["key_range_N2"][2] = torch.tensor([2, 2])
    out, gradients = ours(inputs)
    assert (out[2] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][2] == 0).all()


def test_no_queries() -> None:
    inputs = TTTAttentionCase("few", (5,), steps=1).inputs(torch.float32)
    empty = {**inputs, "q_NQD": inputs["q_NQD"][:0], "key_range_N2": inputs["key_range_N2"][:0]}
    empty["own_rows"] = [x[:0] for x in inputs["own_rows"]]
    assert ttt_attention(**empty).shape == (0, 4, 16)


def test_rows_that_no_query_owns_get_no_gradient() -> None:
    inputs = TTTAttentionCase("spare", (9,), spare=4).inputs(torch.float32)
    _, gradients = ours(inputs)
    for gradient, rows in zip(gradients[3:], inputs["own_rows"] * 2, strict=True):
        unused = torch.ones(len(gradient), dtype=torch.bool)
        unused[rows.cpu()] = False
        assert unused.sum() >= 4 and (gradient[unused] == 0).all() and (gradient[~unused] != 0).any()


def test_packed_documents_equal_documents_apart() -> None:
    packed = TTTAttentionCase("both", (6, 9), steps=1).inputs(torch.float64)
    whole = ttt_attention(**packed)
    for rows in (slice(0, 6), slice(6, 15)):
        alone = packed | {name: packed[name][rows] for name in ("q_NQD", "k_TKD", "v_TKD")}
        alone["own_rows"] = [x[rows] for x in packed["own_rows"]]
        alone["key_range_N2"] = packed["key_range_N2"][rows] - rows.start
        assert torch.allclose(ttt_attention(**alone), whole[rows], rtol=1e-12)


def test_long_sequences_hold_no_square_tensor() -> None:
    """Peak of one backward pass at 4x the rows is at most about 4x, with documents of fixed length."""
    peaks = []
    for documents in (8, 32):
        case = TTTAttentionCase("long", (64,) * documents, heads=(2, 1), steps=2)
        inputs = case.inputs(torch.float32)
        with torch.profiler.profile(profile_memory=True) as trace:
            ours(inputs)
        peaks.append(_peak(trace))
    assert peaks[1] < 5 * peaks[0]


def _peak(trace: torch.profiler.profile) -> int:
    """Largest sum of live allocations, in bytes."""
    live = peak = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def test_opcheck() -> None:
    inputs = TTTAttentionCase("small", (4, 3), spare=2).inputs(torch.float32)
    torch.library.opcheck(torch.ops.eagle3_fast.ttt_attention, (*inputs.values(), True))
    torch.library.opcheck(torch.ops.eagle3_fast.ttt_attention, (*inputs.values(), False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_TKD": torch.zeros(17, 3, 16), "v_TKD": torch.zeros(17, 3, 16)}, "not a multiple"),
        ({"k_TKD": torch.zeros(17, 2, 8)}, r"q \[N, Q, D\]"),
        ({"key_range_N2": torch.zeros(17, 2)}, "key_range"),
        ({"own_v": []}, "own values"),
        ({"own_k": [torch.zeros(16, 2, 16)] * 2}, "own_k"),
        ({"own_v": [torch.zeros(18, 2, 16)] * 2}, "own_v"),
        ({"own_rows": []}, "own rows"),
        ({"own_rows": [torch.zeros(16, dtype=torch.int32)] * 2}, "own_rows"),
        ({"own_rows": [torch.zeros(17)] * 2}, "own_rows"),
        ({"q_NQD": torch.zeros(17, 4, 16).bfloat16()}, "share a dtype"),
    ],
)
def test_wrong_inputs_are_named(change: dict, message: str) -> None:
    inputs = TTTAttentionCase("ordinary", (17,)).inputs(torch.float32)
    with pytest.raises((ValueError, TypeError), match=message):
        ttt_attention(**{**inputs, **change})


def test_strided_inputs(impl: None) -> None:
    inputs = TTT_ATTENTION[3].inputs(torch.float32)
    expected, gradients = ours(inputs)
    for name in ("q_NQD", "k_TKD", "v_TKD"):
        value = inputs[name].detach()
        inputs[name] = value.permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
        assert inputs[name].stride(-1) != 1
    out, strided = ours(inputs)
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-6)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(strided, gradients, strict=True))
