"""`ttt_attention`, forward and backward: the call of the last TTT step, on the rows that a training step gives it.

There is no `compile` here: the reference reads its block borders from tensors, which a compiler cannot trace as one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from batches import key_ranges, row_plan, ttt_attention_inputs
from measure import Local, Unavailable, require_memory
from presets import SMOKE, Case
from torch import Tensor
from torch.nn import functional as F

from eagle3_fast import ops
from eagle3_fast.reference.ttt_attention import query_blocks
from eagle3_fast.reference.ttt_attention import ttt_attention as reference
from eagle3_fast.testing.budget import assert_within_budget

AXES = ("ttt_steps", "supervised", "rows", "document")


def _fused(**inputs: Any) -> Tensor:
    ops.select("fused")
    return ops.ttt_attention(**inputs)


def _reference(**inputs: Any) -> Tensor:
    """Block by block in float32, gradients by autograd."""
    return reference(**inputs)[0]


def _sdpa(**inputs: Any) -> Tensor:
    """What speculators' `sdpa` does: one dense mask over the keys of all steps."""
    ranges, rows = inputs["key_range_N2"], len(inputs["q_NQD"])
    index = torch.arange(len(inputs["k_TKD"]), device=ranges.device)
    shared = (index >= ranges[:, :1]) & (index < ranges[:, 1:])
    diagonal = torch.eye(rows, dtype=torch.bool, device=ranges.device)
    mask = torch.cat((shared, *[diagonal] * len(inputs["own_k"])), dim=1)
    q, k, v = _all_keys(inputs)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=inputs["scale"], enable_gqa=True)[0].transpose(0, 1)


def _all_keys(inputs: dict[str, Any]) -> list[Tensor]:
    """Queries, and keys and values of step 0 followed by those of each later step for the same rows, [1, heads, rows, D]."""
    own_k, own_v = ([own[at] for own, at in zip(inputs[name], inputs["own_rows"], strict=True)] for name in ("own_k", "own_v"))
    whole = inputs["q_NQD"], torch.cat((inputs["k_TKD"], *own_k)), torch.cat((inputs["v_TKD"], *own_v))
    return [x.transpose(0, 1)[None] for x in whole]


def flex(inputs: dict[str, Any]) -> Callable[..., Tensor]:
    """What speculators does by default on a GPU: flex attention under one block mask over the keys of all steps, made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ranges, rows, shared = inputs["key_range_N2"], len(inputs["q_NQD"]), len(inputs["k_TKD"])

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        inside = (key >= ranges[row, 0]) & (key < ranges[row, 1])
        return torch.where(key < shared, inside, (key - shared) % rows == row)

    device = ranges.device.type
    keys = shared + rows * len(inputs["own_k"])
    mask = create_block_mask(sees, None, None, rows, keys, device, _compile=device == "cuda")
    attend = torch.compile(flex_attention) if device == "cuda" else flex_attention

    def call(**inputs: Any) -> Tensor:
        q, k, v = _all_keys(inputs)
        return attend(q, k, v, block_mask=mask, scale=inputs["scale"], enable_gqa=True)[0].transpose(0, 1)

    return call


PROVIDERS: dict[str, Callable[..., Tensor]] = {"fused": _fused, "reference": _reference, "sdpa": _sdpa}


def make(provider: str, case: Case, dtype: torch.dtype, device: str) -> Local:
    if provider == "gemm":
        return Local(_gemm(case, dtype, device), device)
    if provider == "flex" and device != "cuda":
        raise Unavailable("flex attention has no backward pass on a CPU")
    error = check(_call(provider, ttt_attention_inputs(SMOKE, dtype, device)), dtype, device)
    require_memory(_scores(case, dense=provider == "sdpa") * 4, device)
    inputs = ttt_attention_inputs(case, dtype, device)
    call = _call(provider, inputs)
    probe = torch.randn_like(inputs["q_NQD"])
    return Local(lambda: torch.autograd.grad(call(**inputs), _leaves(inputs), probe), device, error)


def _call(provider: str, inputs: dict[str, Any]) -> Callable[..., Tensor]:
    return flex(inputs) if provider == "flex" else PROVIDERS[provider]


def _scores(case: Case, dense: bool) -> int:
    """Attention weights and their kin that autograd keeps for one pass: of every pair, or of the pairs that see each other."""
    heads = case.model.heads[0]
    return 3 * heads * case.rows * (case.rows * case.ttt_steps if dense else case.document)


def _leaves(inputs: dict[str, Any]) -> list[Tensor]:
    return [inputs["q_NQD"], inputs["k_TKD"], inputs["v_TKD"], *inputs["own_k"], *inputs["own_v"]]


def check(call: Callable[..., Tensor], dtype: torch.dtype, device: str) -> float:
    """Relative error of all gradients against float64 on the smoke case; fails where output or a gradient is beyond its budget."""
    inputs = ttt_attention_inputs(SMOKE, dtype, device)
    exact, eager, own = (
        _output_and_gradients(f, _cast(inputs, to)) for f, to in ((_reference, torch.float64), (_reference, dtype), (call, dtype))
    )
    for position, values in enumerate(zip(own, exact, eager, strict=True)):
        assert_within_budget(*values, "output" if position == 0 else f"gradient {position - 1}")
    own_all, exact_all = (torch.cat([x.double().flatten() for x in values[1:]]) for values in (own, exact))
    return float((own_all - exact_all).norm() / exact_all.norm())


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {name: _cast(item, dtype) for name, item in value.items()}
    if isinstance(value, list):
        return [_cast(item, dtype) for item in value]
    return value.detach().to(dtype).requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value


def _output_and_gradients(call: Callable[..., Tensor], inputs: dict[str, Any]) -> list[Tensor]:
    out = call(**inputs)
    probe = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, _leaves(inputs), probe)]


def _gemm(case: Case, dtype: torch.dtype, device: str) -> Callable[[], None]:
    """The bare products of one pass, block by block: scores and output; scores again, their gradient, and those of q, k, v."""
    inputs = ttt_attention_inputs(case, dtype, device)
    groups = case.model.heads[1]

    def grouped(x: Tensor) -> Tensor:
        return x.detach().unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2).contiguous()

    blocks = []
    for rows, keys in query_blocks(inputs["key_range_N2"]):
        q, k = grouped(inputs["q_NQD"][rows]), inputs["k_TKD"][keys].detach().transpose(0, 1).contiguous()
        blocks.append((q, k, torch.empty(groups, q.shape[1], k.shape[1], dtype=dtype, device=device)))

    def call() -> None:
        for q, k, scores in blocks:
            for _ in range(3):
                torch.bmm(q, k.mT, out=scores)
            for _ in range(2):
                torch.bmm(scores, k)
                torch.bmm(scores.mT, q)

    return call


def gemm_flops(case: Case) -> int:
    """Of `_gemm`: seven products a block."""
    blocks = query_blocks(key_ranges(case, row_plan(case).active[-1]))
    pairs = sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys in blocks)
    return 7 * 2 * pairs * case.model.heads[0] * case.model.head_dim


def test_ttt_attention(compare, case: Case) -> None:
    compare("ttt_attention", [*PROVIDERS, "flex", "gemm"], case, gemm_flops(case))
