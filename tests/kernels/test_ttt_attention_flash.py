"""`ops.impl: flash`: the path through flash-attn against float64, on a stand-in for flash-attn that runs on the CPU; and its refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest
import torch
from model.drafts import random_batch, random_draft
from ops.test_ttt_attention import dense, ours
from torch import Tensor

from eagle3_fast.errors import InputError
from eagle3_fast.model import ttt
from eagle3_fast.model.ttt import Objective, run_ttt
from eagle3_fast.ops import _dispatch, _flash_attention, linear_divergence, select, ttt_attention
from eagle3_fast.testing.budget import assert_within_budget
from eagle3_fast.testing.cases import LINEAR_DIVERGENCE, TTTAttentionCase

Calls = list[dict[str, Any]]


class StandIn(ModuleType):
    """The two functions of flash_attn.flash_attn_interface that are called, with flash-attn 2.8's signatures, checks and conventions.

    Conventions: the last query of a sequence is at its last key; a window of (left, 0) shows `left` keys before one's own; lse is
    float32 [heads, queries]; what belongs to no sequence is left unwritten, here NaN.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__(_flash_attention.INTERFACE)
        self.calls = calls

    def _flash_attn_varlen_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
        block_table: Tensor | None = None,
        leftpad_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
        zero_tensors: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert dropout_p == 0.0
        self._record(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size_left, window_size_right)
        out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan)
        for rows, keys, hidden in sequences(cu_seqlens_q, cu_seqlens_k, window_size_left):
            scores = scaled(q[rows], k[keys], softmax_scale).masked_fill(hidden, -torch.inf)
            lse[:, rows] = scores.logsumexp(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), beside(v[keys], q)).to(q.dtype)
        return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
        zero_tensors: bool = False,
    ) -> Tensor:
        assert dropout_p == softcap == 0.0 and alibi_slopes is None
        assert softmax_lse.shape == (q.shape[1], len(q)) and softmax_lse.dtype == torch.float32 and softmax_lse.is_contiguous()
        assert out.shape == dout.shape == dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape
        self._record(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size_left, window_size_right)
        self.calls[-1]["deterministic"] = deterministic
        for gradient in (dq, dk, dv):
            gradient.fill_(torch.nan)
        for rows, keys, hidden in sequences(cu_seqlens_q, cu_seqlens_k, window_size_left):
            grad, value, key = dout[rows].float(), beside(v[keys], q), beside(k[keys], q)
            weights = (scaled(q[rows], k[keys], softmax_scale) - softmax_lse[:, rows, None]).exp().masked_fill(hidden, 0.0)
            delta = (grad * out[rows].float()).sum(-1).T[..., None]
            scores = softmax_scale * weights * (torch.einsum("qhd,khd->hqk", grad, value) - delta)
            dq[rows] = torch.einsum("hqk,khd->qhd", scores, key).to(q.dtype)
            dk[keys] = grouped(torch.einsum("hqk,qhd->khd", scores, q[rows].float()), k).to(q.dtype)
            dv[keys] = grouped(torch.einsum("hqk,qhd->khd", weights, grad), v).to(q.dtype)
        return torch.empty(0)

    def _record(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        causal: bool,
        left: int,
        right: int,
    ) -> None:
        assert {q.dtype, k.dtype, v.dtype} <= {torch.bfloat16} or {q.dtype, k.dtype, v.dtype} <= {torch.float16}
        assert (
            cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.shape == cu_k.shape and cu_q.is_contiguous() and cu_k.is_contiguous()
        )
        assert q.stride(-1) == 1 and q.shape[2] % 8 == 0 and k.shape == v.shape and q.shape[1] % k.shape[1] == 0
        assert int(cu_q.diff().max()) <= max_q and int(cu_k.diff().max()) <= max_k
        # Of sequences of one query at most it makes a batch of queries, one each.
        assert max_q > 1 or len(q) == len(cu_q) - 1
        assert causal and (left, right) in ((-1, -1), (left, 0))
        self.calls.append({"queries": len(q), "keys": len(k), "sequences": len(cu_q) - 1, "window": left})


def sequences(cu_q: Tensor, cu_k: Tensor, left: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries, keys, and which keys are hidden from which query."""
    for (q0, q1), (k0, k1) in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist(), strict=True):
        at, key = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0), torch.arange(k1 - k0)
        yield slice(q0, q1), slice(k0, k1), (key > at) | (key < at - left if left >= 0 else torch.zeros_like(key > at))


def beside(x: Tensor, q: Tensor) -> Tensor:
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def scaled(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return torch.einsum("qhd,khd->hqk", q.float(), beside(k, q)) * scale


def grouped(x: Tensor, like: Tensor) -> Tensor:
    return x.unflatten(1, (like.shape[1], -1)).sum(2)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`flash` is asked for, tensors on the CPU pass for a card's, nothing is known of flash-attn yet."""
    monkeypatch.setattr(_flash_attention, "_device_fault", lambda device: None)
    caches = (_dispatch.import_fault, _flash_attention._call_fault)
    for cache in caches:
        cache.cache_clear()
    select("flash")
    yield
    select("auto")
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def calls(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The stand-in's calls."""
    stand_in = StandIn([])
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, _flash_attention.INTERFACE, stand_in)
    return stand_in.calls


CASES = (
    TTTAttentionCase("one row", (1,), steps=0),
    TTTAttentionCase("one row, one own key", (1,), steps=1),
    TTTAttentionCase("three query heads a key head", (37,), heads=(9, 3), head_dim=64, steps=0),
    TTTAttentionCase("seven query heads a key head", (37,), heads=(28, 4), head_dim=128, steps=1),
    TTTAttentionCase("one head a key", (65,), heads=(2, 2), head_dim=80),
    TTTAttentionCase("documents", (3, 1, 40, 7), head_dim=64, steps=3),
    TTTAttentionCase("one-row documents", (1, 1, 1, 1), steps=1),
    TTTAttentionCase("gaps", (70, 20), heads=(9, 3), head_dim=64, stride=3, steps=3, spare=5),
    TTTAttentionCase("a row a document", (5, 5, 5), stride=5),
    TTTAttentionCase("documents between rows", (2, 2, 9, 1, 1, 30), stride=7, steps=1),
    TTTAttentionCase("window", (60,), window=9, head_dim=80, steps=1),
    TTTAttentionCase("window in documents, gaps", (30, 3, 50, 9), window=9, heads=(28, 4), head_dim=64, stride=4, steps=3, spare=2),
    TTTAttentionCase("window of one", (9,), window=1),
    TTTAttentionCase("window of no one", (9, 4), window=20),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_and_gradients(case: TTTAttentionCase, calls: Calls) -> None:
    inputs = case.inputs(torch.bfloat16)
    compare(inputs, ours(inputs))
    assert len(calls) == 4  # once to see whether it works, once for the inputs, forward and backward each
    assert (calls[-1]["window"] >= 0) == (case.name in ("window", "window in documents, gaps"))


def compare(inputs: dict[str, Any], results: tuple[Tensor, list[Tensor]]) -> None:
    (exact_out, exact), (eager_out, eager) = dense(inputs, torch.float64), dense(inputs, inputs["q_NQD"].dtype)
    assert_within_budget(results[0], exact_out, eager_out, "output")
    for position, gradients in enumerate(zip(results[1], exact, eager, strict=True)):
        assert_within_budget(*gradients, f"gradient {position}")


def test_float16(calls: Calls) -> None:
    inputs = CASES[7].inputs(torch.float16)
    compare(inputs, ours(inputs))


@pytest.mark.parametrize("rows", [[60, 61, 65, 80], [3], [3, 4, 5, 40, 41], [10, 70]])
@pytest.mark.parametrize("window", [None, 8])
def test_any_rows_of_documents(rows: list[int], window: int | None, calls: Calls) -> None:
    """Documents without a row, rows that see a whole window only, keys behind the last row and before the first."""
    inputs = TTTAttentionCase("some rows", (40, 15, 35), window=window, spare=1).inputs(torch.bfloat16)
    for name in ("q_NQD", "key_range_N2"):
        inputs[name] = inputs[name].detach()[rows]
    inputs["q_NQD"].requires_grad_()
    inputs["own_rows"] = [index[: len(rows)] for index in inputs["own_rows"]]
    compare(inputs, ours(inputs))


def test_queries_cost_from_a_documents_first_to_its_last(calls: Calls) -> None:
    inputs = TTTAttentionCase("prompt and reply", (100,), steps=0).inputs(torch.bfloat16)
    ours({**inputs, "q_NQD": inputs["q_NQD"].detach()[60:90:3].requires_grad_(), "key_range_N2": inputs["key_range_N2"][60:90:3]})
    assert calls[-1]["queries"] == 28 and calls[-1]["keys"] == 88 and calls[-1]["sequences"] == 1


def test_no_queries(calls: Calls) -> None:
    inputs = TTTAttentionCase("few", (5,), steps=1).inputs(torch.bfloat16)
    empty = inputs | {"q_NQD": inputs["q_NQD"].detach()[:0].requires_grad_(), "key_range_N2": inputs["key_range_N2"][:0]}
    empty["own_rows"] = [index[:0] for index in inputs["own_rows"]]
    out, gradients = ours(empty)
    assert out.shape == (0, 4, 16) and all((gradient == 0).all() for gradient in gradients)


def test_strided_inputs(calls: Calls) -> None:
    inputs = CASES[5].inputs(torch.bfloat16)
    expected, _ = ours(inputs)
    for name in ("q_NQD", "k_TKD", "v_TKD"):
        inputs[name] = inputs[name].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert torch.equal(ours(inputs)[0], expected)


@pytest.mark.parametrize("asked", [True, False])
def test_deterministic_where_torch_is(asked: bool, calls: Calls) -> None:
    torch.use_deterministic_algorithms(asked)
    try:
        ours(CASES[0].inputs(torch.bfloat16))
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls[-1]["deterministic"] == asked


def test_opcheck(calls: Calls) -> None:
    inputs = TTTAttentionCase("small", (4, 3), stride=2, spare=2).inputs(torch.bfloat16)
    torch.library.opcheck(torch.ops.eagle3_fast.ttt_attention, (*inputs.values(), False), {"flash": True})


def test_the_host_copy_is_what_flash_reads(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """With it nothing is read from the device; the device's own ranges can as well be wrong."""
    inputs = CASES[7].inputs(torch.bfloat16)
    expected, _ = ours(inputs)
    host_range = inputs["key_range_N2"]
    inputs |= {"key_range_N2": torch.zeros_like(host_range), "host_range_N2": host_range}
    assert torch.equal(ours(inputs)[0], expected)


@pytest.mark.parametrize(
    "host_range", [torch.zeros(4, 2, dtype=torch.int32), torch.zeros(5, 2), torch.zeros(5, 2, dtype=torch.int32, device="meta")]
)
def test_wrong_host_range_is_named(host_range: Tensor) -> None:
    with pytest.raises(ValueError, match="host_range must be int32"):
        ttt_attention(**TTTAttentionCase("few", (5,)).inputs(torch.float32), host_range_N2=host_range)


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ([[0, 1], [1, 1]], "not every row sees itself"),
        ([[0, 2], [0, 2]], "not every row sees itself"),
        ([[0, 1], [1, 3], [0, 4]], "not every row sees itself"),
        ([[0, 3], [1, 4], [2, 6], [5, 7]], "neither at its document's start nor at its window's"),
    ],
)
def test_other_ranges_are_refused(ranges: list[list[int]], said: str, calls: Calls) -> None:
    inputs = TTTAttentionCase("few", (7,), steps=0).inputs(torch.bfloat16)
    inputs |= {"q_NQD": inputs["q_NQD"][: len(ranges)], "key_range_N2": torch.tensor(ranges, dtype=torch.int32)}
    with pytest.raises(InputError, match=f"ops.impl is flash, but .*{said}.*use auto"):
        ttt_attention(**inputs)


SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 5}


@pytest.mark.parametrize("layer", [{}, {"num_hidden_layers": 2}, SLIDING], ids=["one layer", "two layers", "window"])
def test_the_calls_of_a_training_step(layer: dict[str, Any], calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on its own: the random draft magnifies an input's error so much that loss and gradients of the whole step show nothing."""
    seen: list[dict[str, Any]] = []

    def recorded(*arguments: Any) -> Tensor:
        seen.append(dict(zip(signature(ttt_attention).parameters, map(_leaves, arguments), strict=True)))
        return ttt_attention(*arguments)

    monkeypatch.setattr(ttt, "ttt_attention", recorded)
    draft = random_draft(layer, dtype=torch.bfloat16)
    run_ttt(draft, random_batch((40, 30), 80, dtype=torch.bfloat16), Objective(ttt_steps=3)).loss.backward()
    assert all(value.grad.isfinite().all() for value in draft.parameters() if value.grad is not None)
    assert len(seen) == 3 * layer.get("num_hidden_layers", 1) and len(calls) == 2 + 2 * len(seen)
    for inputs in seen:
        assert torch.equal(inputs["host_range_N2"], inputs["key_range_N2"])
        compare(inputs, ours(inputs))


def _leaves(value: Any) -> Any:
    """An argument as it is now, apart from the graph that it came from."""
    if isinstance(value, list):
        return [_leaves(item) for item in value]
    return value.detach().clone().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value


def refused(said: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> None:
    inputs = TTTAttentionCase("few", (5,), **sizes).inputs(dtype)
    with pytest.raises(InputError, match=f"ops.impl is flash, but ttt_attention cannot run so: .*{said}.*use auto") as refusal:
        ttt_attention(**inputs)
    assert "\n" not in str(refusal.value)


def test_unfit_tensors_are_refused(calls: Calls) -> None:
    refused("bfloat16 and float16, not torch.float32", torch.float32)
    refused("differ in width", head_dim=24, value_dim=16)
    refused("multiples of 8, not 20", head_dim=20)
    refused("up to 256 that are multiples of 8, not 264", head_dim=264)
    assert not calls


def test_other_devices_are_refused(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    refused("flash-attn runs on cuda, and the tensors are on cpu")


def test_missing_flash_attn_is_refused(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    refused("flash-attn cannot be imported")


@pytest.mark.parametrize(
    "body",
    [
        'raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c10")',
        'raise OSError("libcudart.so.12: undefined symbol")',
        'raise RuntimeError("registered twice: undefined symbol")',
    ],
)
def test_broken_flash_attn_is_refused(body: str, fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, module)
    (tmp_path / "flash_attn.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    refused("flash-attn cannot be imported .*undefined symbol")


def raising(error: Exception) -> Callable[..., None]:
    def function(*_: Any, **__: Any) -> None:
        raise error

    return function


@pytest.mark.parametrize("function", ["_flash_attn_varlen_forward", "_flash_attn_varlen_backward"])
def test_flash_attn_for_another_card_is_refused(function: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with `TORCH_USE_CUDA_DSA`")
    monkeypatch.setattr(sys.modules[_flash_attention.INTERFACE], function, raising(fault))
    refused(r"2\.8 or later .*first call \(RuntimeError: CUDA error: no kernel image")


def test_flash_attn_of_another_interface_is_refused(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = TypeError("unexpected keyword argument 'window_size_left'")
    monkeypatch.setattr(sys.modules[_flash_attention.INTERFACE], "_flash_attn_varlen_forward", raising(fault))
    refused(r"2\.8 or later .*first call \(TypeError: unexpected keyword")


def test_the_divergence_takes_flash_for_auto(calls: Calls) -> None:
    inputs = LINEAR_DIVERGENCE[0].inputs(torch.float32)
    loss = linear_divergence(**inputs, kinds={"kl_div": 1.0}).loss
    select("auto")
    assert torch.equal(linear_divergence(**inputs, kinds={"kl_div": 1.0}).loss, loss)


def test_nothing_else_imports_flash_attn(tmp_path: Path) -> None:
    (tmp_path / "flash_attn.py").write_text("raise SystemExit('flash_attn was imported')")
    code = """
        import torch
        from eagle3_fast.ops import select, ttt_attention
        from eagle3_fast.testing.cases import TTT_ATTENTION

        for impl in ("auto", "fused", "reference"):
            select(impl)
            ttt_attention(**TTT_ATTENTION[3].inputs(torch.bfloat16)).sum().backward()
    """
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", dedent(code)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
