"""Triton kernels of `ttt_attention`: flash attention over the shared keys, own keys merged after its loop; contract in `ops`.

Online softmax and its backward pass: Dao 2023, arXiv:2307.08691. What is particular here:
 - A block of queries reads the keys between its first `lo` and its last `hi`; documents, windows and causality need no mask object.
 - Own keys come after the loop over shared keys, one step at a time and in narrow chunks: merged before it or unrolled, they took
   registers from the loop and made it spill. Their tensors have a row count each and stay where they are: the kernels find them by
   a table of addresses, so one compiled kernel serves any number of steps, and no step costs another pass over the output.
 - Every gradient element is written by one program: no atomics, the same bits every time.
 - A head size that is no power of two is two products (80 = 64 + 16) where that is less than one padded to the next power.
Each query head h reads key head h // (Q / K). Statistics are in base 2, as exp2 is what the hardware has. Sizes that change from
batch to batch are not specialised, so that a run compiles each kernel once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(math.log2(math.e))
NOTHING = tl.constexpr(-1.0e30)
"""Running maximum before the first key: finite, because minus infinity less itself is not a number."""

_COUNTS = ["queries", "keys", "query_heads", "key_heads", "steps"]


@triton.jit
def _load(base, offset, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """[R, WIDTH]: columns from FIRST of the rows at `offset` [R], zero from column SIZE. Of width 0: a stand-in that nobody reads."""
    if WIDTH == 0:
        tile = tl.zeros((offset.shape[0], 16), base.dtype.element_ty)
    else:
        column = FIRST + tl.arange(0, WIDTH)[None, :]
        address = base + offset[:, None] + column
        if FIRST + WIDTH > SIZE:
            tile = tl.load(address, mask=column < SIZE, other=0.0)
        else:
            tile = tl.load(address)
    return tile


@triton.jit
def _store(base, offset, tile, rows, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Write columns from FIRST of the rows at `offset` where `rows` holds."""
    if WIDTH > 0:
        column = FIRST + tl.arange(0, WIDTH)[None, :]
        tl.store(base + offset[:, None] + column, tile.to(base.dtype.element_ty), mask=rows[:, None] & (column < SIZE))


@triton.jit
def _zeros(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return tl.zeros((ROWS, WIDTH if WIDTH > 0 else 16), tl.float32)


@triton.jit
def _across(a1, a2, b1, b2, SECOND: tl.constexpr):
    """a b^T of tiles in two parts."""
    product = tl.dot(a1, tl.trans(b1), input_precision="ieee")
    if SECOND > 0:
        product = tl.dot(a2, tl.trans(b2), product, input_precision="ieee")
    return product


@triton.jit
def _add_mixed(total1, total2, weights, x1, x2, SECOND: tl.constexpr):
    """total + weights x, in two parts."""
    total1 = tl.dot(weights, x1, total1, input_precision="ieee")
    if SECOND > 0:
        total2 = tl.dot(weights, x2, total2, input_precision="ieee")
    return total1, total2


@triton.jit
def _row_products(a, a_offset, b, b_offset, SIZE: tl.constexpr):
    """[R] sums over SIZE columns of row times row, in float32 and in narrow chunks, because whole tiles would fill the registers."""
    CHUNK: tl.constexpr = 32 if SIZE % 32 == 0 else 16
    total = tl.zeros(a_offset.shape, tl.float32)
    for first in tl.range(0, SIZE, CHUNK, num_stages=1):
        column = first + tl.arange(0, CHUNK)[None, :]
        x = tl.load(a + a_offset[:, None] + column, mask=column < SIZE, other=0.0).to(tl.float32)
        y = tl.load(b + b_offset[:, None] + column, mask=column < SIZE, other=0.0).to(tl.float32)
        total += tl.sum(x * y, 1)
    return total


@triton.jit
def _own_tensor(table, entry, like):
    """The tensor at `entry` of the address table, which holds none that is not aligned as stated here."""
    return tl.multiple_of(tl.load(table + entry).to(like.dtype), 16)


@triton.jit
def _attend(
    q1, q2, out1, out2, top, total, k, v, start, last, lo, hi, scale2, key_heads,
    D: tl.constexpr, DV: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of shared keys from `start` into output, running maximum and running sum."""
    local = tl.arange(0, KEYS)
    row = tl.minimum(local, last - 1 - start) if MASKED else local
    k += (start * key_heads).to(tl.int64) * D
    v += (start * key_heads).to(tl.int64) * DV
    k1, k2 = _load(k, row * (key_heads * D), 0, D1, D), _load(k, row * (key_heads * D), D1, D2, D)
    scores = _across(q1, q2, k1, k2, D2) * scale2
    if MASKED:
        key = (start + local)[None, :]
        scores = tl.where((key >= lo[:, None]) & (key < hi[:, None]), scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - new_top)
    weights = tl.exp2(scores - new_top[:, None])
    total = total * shrink + tl.sum(weights, 1)
    v1, v2 = _load(v, row * (key_heads * DV), 0, V1, DV), _load(v, row * (key_heads * DV), V1, V2, DV)
    out1, out2 = _add_mixed(out1 * shrink[:, None], out2 * shrink[:, None], weights.to(v1.dtype), v1, v2, V2)
    return out1, out2, new_top, total


@triton.jit(do_not_specialize=_COUNTS)
def forward_kernel(
    q, k, v, key_range, own, own_rows, out, lse, queries, query_heads, key_heads, steps, scale,
    D: tl.constexpr, DV: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of a block of queries of one head. Late rows see most and start first."""
    first_row, head = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS, tl.program_id(1)
    key_head = head // (query_heads // key_heads)
    unbound = first_row + tl.arange(0, ROWS)
    row = tl.minimum(unbound, queries - 1)  # rows beyond the end repeat the last one and are not stored
    lo, hi = tl.load(key_range + 2 * row), tl.load(key_range + 2 * row + 1)
    offset = row.to(tl.int64) * query_heads + head
    q1, q2 = _load(q, offset * D, 0, D1, D), _load(q, offset * D, D1, D2, D)
    out1, out2 = _zeros(ROWS, V1), _zeros(ROWS, V2)
    top, total = tl.full((ROWS,), NOTHING, tl.float32), tl.zeros((ROWS,), tl.float32)
    scale2 = scale * LOG2_E

    # Both ends of a range grow with the row: all rows see the keys of the body, some rows those of the head before and the tail after.
    first, last = tl.min(lo, 0), tl.max(hi, 0)
    head_blocks = tl.cdiv(tl.maximum(tl.minimum(tl.max(lo, 0), last) - first, 0), KEYS)
    body = first + head_blocks * KEYS
    tail = body + tl.maximum(tl.min(hi, 0) - body, 0) // KEYS * KEYS
    edge_blocks = head_blocks + tl.cdiv(tl.maximum(last - tail, 0), KEYS)
    shared_k, shared_v = k + key_head * D, v + key_head * DV
    for start in range(body, tail, KEYS):
        out1, out2, top, total = _attend(
            q1, q2, out1, out2, top, total, shared_k, shared_v, start, last, lo, hi, scale2, key_heads,
            D, DV, D1, D2, V1, V2, KEYS, False,
        )  # fmt: skip
    for block in range(0, edge_blocks):
        start = tl.where(block < head_blocks, first + block * KEYS, tail + (block - head_blocks) * KEYS)
        out1, out2, top, total = _attend(
            q1, q2, out1, out2, top, total, shared_k, shared_v, start, last, lo, hi, scale2, key_heads,
            D, DV, D1, D2, V1, V2, KEYS, True,
        )  # fmt: skip

    for step in tl.range(0, steps, num_stages=1):
        own_offset = tl.load(own_rows + step * queries + row).to(tl.int64) * key_heads + key_head
        score = _row_products(q, offset * D, _own_tensor(own, step, k), own_offset * D, D) * scale2
        new_top = tl.maximum(top, score)
        shrink, weight = tl.exp2(top - new_top), tl.exp2(score - new_top)
        own_v = _own_tensor(own, steps + step, v)
        out1 = out1 * shrink[:, None] + weight[:, None] * _load(own_v, own_offset * DV, 0, V1, DV).to(tl.float32)
        out2 = out2 * shrink[:, None] + weight[:, None] * _load(own_v, own_offset * DV, V1, V2, DV).to(tl.float32)
        top, total = new_top, total * shrink + weight

    share = (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    stored = unbound < queries
    _store(out, offset * DV, out1 * share, stored, 0, V1, DV)
    _store(out, offset * DV, out2 * share, stored, V1, V2, DV)
    tl.store(lse + offset, tl.where(total > 0.0, (top + tl.log2(total)) / LOG2_E, 0.0), mask=stored)


@triton.jit(do_not_specialize=_COUNTS)
def statistics_kernel(grad_out, out, lse, statistics, queries, query_heads, DV: tl.constexpr, ROWS: tl.constexpr):
    """[2, Q, N]: log-sum-exp in base 2 and delta = rowsum(dO O), side by side in the order in which the other kernels read them."""
    head = tl.program_id(1)
    unbound = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offset = tl.minimum(unbound, queries - 1).to(tl.int64) * query_heads + head
    delta = _row_products(grad_out, offset * DV, out, offset * DV, DV)
    at = statistics + head * queries + unbound
    tl.store(at, tl.load(lse + offset) * LOG2_E, mask=unbound < queries)
    tl.store(at + query_heads * queries, delta, mask=unbound < queries)


@triton.jit(do_not_specialize=_COUNTS)
def own_gradients_kernel(
    q, grad_out, statistics, own, own_rows, grad_score, queries, query_heads, key_heads, steps, scale,
    D: tl.constexpr, DV: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of one step's own keys and values for a block of rows of one key head, summed over its query heads.

    Leaves the gradients of the scores [steps, Q, N] for the gradient of the queries.
    """
    step, key_head, group = tl.program_id(0), tl.program_id(1), query_heads // key_heads
    unbound = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row, stored = tl.minimum(unbound, queries - 1), unbound < queries
    own_offset = tl.load(own_rows + step * queries + row).to(tl.int64) * key_heads + key_head
    own_k, own_v = _own_tensor(own, step, q), _own_tensor(own, steps + step, q)
    k1, k2 = _load(own_k, own_offset * D, 0, D1, D).to(tl.float32), _load(own_k, own_offset * D, D1, D2, D).to(tl.float32)
    v1, v2 = _load(own_v, own_offset * DV, 0, V1, DV).to(tl.float32), _load(own_v, own_offset * DV, V1, V2, DV).to(tl.float32)
    grad_k1, grad_k2, grad_v1, grad_v2 = _zeros(ROWS, D1), _zeros(ROWS, D2), _zeros(ROWS, V1), _zeros(ROWS, V2)
    for head in tl.range(key_head * group, key_head * group + group, num_stages=1):
        offset = row.to(tl.int64) * query_heads + head
        q1, q2 = _load(q, offset * D, 0, D1, D).to(tl.float32), _load(q, offset * D, D1, D2, D).to(tl.float32)
        g1, g2 = _load(grad_out, offset * DV, 0, V1, DV).to(tl.float32), _load(grad_out, offset * DV, V1, V2, DV).to(tl.float32)
        score, grad_weight = tl.sum(q1 * k1, 1), tl.sum(g1 * v1, 1)
        score += tl.sum(q2 * k2, 1) if D2 > 0 else 0.0
        grad_weight += tl.sum(g2 * v2, 1) if V2 > 0 else 0.0
        at = statistics + head * queries + row
        weight = tl.exp2(score * (scale * LOG2_E) - tl.load(at))
        change = weight * (grad_weight - tl.load(at + query_heads * queries))
        tl.store(grad_score + (step * query_heads + head) * queries + unbound, change, mask=stored)
        grad_k1, grad_k2 = grad_k1 + change[:, None] * q1, grad_k2 + change[:, None] * q2
        grad_v1, grad_v2 = grad_v1 + weight[:, None] * g1, grad_v2 + weight[:, None] * g2
    grad_k, grad_v = _own_tensor(own, 2 * steps + step, q), _own_tensor(own, 3 * steps + step, q)
    _store(grad_k, own_offset * D, grad_k1 * scale, stored, 0, D1, D)
    _store(grad_k, own_offset * D, grad_k2 * scale, stored, D1, D2, D)
    _store(grad_v, own_offset * DV, grad_v1, stored, 0, V1, DV)
    _store(grad_v, own_offset * DV, grad_v2, stored, V1, V2, DV)


@triton.jit(do_not_specialize=_COUNTS)
def key_gradients_kernel(
    q, k, v, grad_out, statistics, lo_hi, seen_by, grad_k, grad_v, queries, keys, query_heads, key_heads, scale,
    D: tl.constexpr, DV: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of shared keys and values of one key head, over its query heads and the rows that see the block."""
    block, key_head, group = tl.program_id(0), tl.program_id(1), query_heads // key_heads
    key = block * KEYS + tl.arange(0, KEYS)
    key_offset = tl.minimum(key, keys - 1).to(tl.int64) * key_heads + key_head
    k1, k2 = _load(k, key_offset * D, 0, D1, D), _load(k, key_offset * D, D1, D2, D)
    v1, v2 = _load(v, key_offset * DV, 0, V1, DV), _load(v, key_offset * DV, V1, V2, DV)
    grad_k1, grad_k2, grad_v1, grad_v2 = _zeros(KEYS, D1), _zeros(KEYS, D2), _zeros(KEYS, V1), _zeros(KEYS, V2)
    first, last = tl.load(seen_by + block), tl.load(seen_by + tl.num_programs(0) + block)
    scale2 = scale * LOG2_E
    for head in range(key_head * group, key_head * group + group):
        for start in range(first, last, ROWS):
            unbound = start + tl.arange(0, ROWS)
            row = tl.minimum(unbound, last - 1)
            local = (row - start) * query_heads
            at_q = q + (start * query_heads + head).to(tl.int64) * D
            at_g = grad_out + (start * query_heads + head).to(tl.int64) * DV
            q1, q2 = _load(at_q, local * D, 0, D1, D), _load(at_q, local * D, D1, D2, D)
            g1, g2 = _load(at_g, local * DV, 0, V1, DV), _load(at_g, local * DV, V1, V2, DV)
            lo, hi = tl.load(lo_hi + row)[None, :], tl.load(lo_hi + queries + row)[None, :]
            at = statistics + head * queries + row
            visible = (key[:, None] >= lo) & (key[:, None] < hi) & (unbound < last)[None, :]
            scores = _across(k1, k2, q1, q2, D2) * scale2 - tl.load(at)[None, :]
            weights = tl.where(visible, tl.exp2(scores), 0.0)
            grad_v1, grad_v2 = _add_mixed(grad_v1, grad_v2, weights.to(g1.dtype), g1, g2, V2)
            change = weights * (_across(v1, v2, g1, g2, V2) - tl.load(at + query_heads * queries)[None, :])
            grad_k1, grad_k2 = _add_mixed(grad_k1, grad_k2, change.to(q1.dtype), q1, q2, D2)
    stored = key < keys
    _store(grad_k, key_offset * D, grad_k1 * scale, stored, 0, D1, D)
    _store(grad_k, key_offset * D, grad_k2 * scale, stored, D1, D2, D)
    _store(grad_v, key_offset * DV, grad_v1, stored, 0, V1, DV)
    _store(grad_v, key_offset * DV, grad_v2, stored, V1, V2, DV)


@triton.jit(do_not_specialize=_COUNTS)
def query_gradients_kernel(
    q, k, v, grad_out, statistics, key_range, own, own_rows, grad_score, grad_q, queries, query_heads, key_heads, steps, scale,
    D: tl.constexpr, DV: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries of one head, from shared keys and then from own keys."""
    first_row, head = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS, tl.program_id(1)
    key_head = head // (query_heads // key_heads)
    unbound = first_row + tl.arange(0, ROWS)
    row = tl.minimum(unbound, queries - 1)
    lo, hi = tl.load(key_range + 2 * row), tl.load(key_range + 2 * row + 1)
    offset = row.to(tl.int64) * query_heads + head
    q1, q2 = _load(q, offset * D, 0, D1, D), _load(q, offset * D, D1, D2, D)
    g1, g2 = _load(grad_out, offset * DV, 0, V1, DV), _load(grad_out, offset * DV, V1, V2, DV)
    at = statistics + head * queries + row
    lse2, delta = tl.load(at)[:, None], tl.load(at + query_heads * queries)[:, None]
    grad_q1, grad_q2 = _zeros(ROWS, D1), _zeros(ROWS, D2)
    scale2, first, last = scale * LOG2_E, tl.min(lo, 0), tl.max(hi, 0)
    for start in range(first, last, KEYS):
        key = (start + tl.arange(0, KEYS))[None, :]
        local = tl.minimum(tl.arange(0, KEYS), last - 1 - start) * key_heads
        at_k = k + (start * key_heads + key_head).to(tl.int64) * D
        at_v = v + (start * key_heads + key_head).to(tl.int64) * DV
        k1, k2 = _load(at_k, local * D, 0, D1, D), _load(at_k, local * D, D1, D2, D)
        v1, v2 = _load(at_v, local * DV, 0, V1, DV), _load(at_v, local * DV, V1, V2, DV)
        scores = _across(q1, q2, k1, k2, D2) * scale2 - lse2
        weights = tl.where((key >= lo[:, None]) & (key < hi[:, None]), tl.exp2(scores), 0.0)
        change = weights * (_across(g1, g2, v1, v2, V2) - delta)
        grad_q1, grad_q2 = _add_mixed(grad_q1, grad_q2, change.to(k1.dtype), k1, k2, D2)
    for step in tl.range(0, steps, num_stages=1):
        own_offset = (tl.load(own_rows + step * queries + row).to(tl.int64) * key_heads + key_head) * D
        own_k = _own_tensor(own, step, k)
        change = tl.load(grad_score + (step * query_heads + head) * queries + row)[:, None]
        grad_q1 += change * _load(own_k, own_offset, 0, D1, D).to(tl.float32)
        grad_q2 += change * _load(own_k, own_offset, D1, D2, D).to(tl.float32)
    _store(grad_q, offset * D, grad_q1 * scale, unbound < queries, 0, D1, D)
    _store(grad_q, offset * D, grad_q2 * scale, unbound < queries, D1, D2, D)


@dataclass(frozen=True)
class Tile:
    """Query rows and keys that a program of one kernel holds at a time, and its launch options."""

    rows: int
    keys: int
    warps: int
    stages: int


TILES = {
    90: {
        64: (Tile(128, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
        80: (Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 4, 2)),
        96: (Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
        128: (Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
        192: (Tile(64, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
        256: (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(64, 32, 8, 2)),
    },
    120: {
        64: (Tile(128, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
        80: (Tile(128, 64, 8, 2), Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)),
        96: (Tile(128, 64, 8, 2), Tile(32, 64, 4, 2), Tile(64, 64, 8, 2)),
        128: (Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
        192: (Tile(32, 64, 4, 2), Tile(32, 32, 8, 2), Tile(64, 32, 8, 2)),
        256: (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(64, 32, 8, 1)),
    },
}
"""By architecture and largest head size: tiles of the forward, key-gradient and query-gradient kernel. Chosen from compiled code, not
timed: they fit the shared memory, spill nothing in their loops, and use wgmma on sm_90 (not for key gradients at 256, where the 64
keys it needs would spill); `tests/kernels/test_ttt_attention_aot.py` holds them to that. Every architecture but sm_90 takes the
tiles of sm_120, whose shared memory is the smallest in use."""

EXACT_TILE = Tile(32, 32, 4, 1)
"""Float32 products are exact and run without matrix units: speed is not what they are for."""


def tiles(head_size: int, element_bytes: int, arch: int) -> tuple[Tile, Tile, Tile]:
    """Tiles of the forward, key-gradient and query-gradient kernel; arch: 10 x compute capability."""
    if element_bytes == 4:
        return EXACT_TILE, EXACT_TILE, EXACT_TILE
    table = TILES[90 if arch == 90 else 120]
    return table[min(size for size in table if size >= head_size)]


def parts(size: int) -> tuple[int, int]:
    """Widths of the two parts of a head, powers of two from 16 up, the second 0 where one part does."""
    first = max(16, 1 << (size.bit_length() - 1))
    if size <= first:
        return first, 0
    second = max(16, triton.next_power_of_2(size - first))
    return (first, second) if second < first else (2 * first, 0)


def sizes(key_size: int, value_size: int) -> dict[str, int]:
    """Compile-time constants of both widths."""
    (d1, d2), (v1, v2) = parts(key_size), parts(value_size)
    return {"D": key_size, "DV": value_size, "D1": d1, "D2": d2, "V1": v1, "V2": v2}


def forward(
    q_NQD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    key_range_N2: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    own_rows: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [N, Q, Dv] in q's dtype and log-sum-exp [N, Q] in float32. Reads no value from the device.

    Raises ValueError for other dtypes than float32 and bfloat16, and head sizes over 256.
    """
    _check(q_NQD, v_TKD)
    (queries, query_heads, key_size), (_, key_heads, value_size) = q_NQD.shape, v_TKD.shape
    out = q_NQD.new_empty(queries, query_heads, value_size)
    lse = q_NQD.new_empty(queries, query_heads, dtype=torch.float32)
    if queries == 0:
        return out, lse
    q, k, v, key_range = (x.contiguous() for x in (q_NQD, k_TKD, v_TKD, key_range_N2))
    own = [_aligned(x) for x in (*own_k, *own_v)]
    chosen, _, _ = tiles(max(key_size, value_size), q.element_size(), _arch(q.device))
    with torch.cuda.device_of(q):
        forward_kernel[triton.cdiv(queries, chosen.rows), query_heads](
            *(q, k, v, key_range, _addresses(own, q), _stacked(own_rows, q), out, lse),
            *(queries, query_heads, key_heads, len(own_k), scale),
            **sizes(key_size, value_size),
            **_options(chosen),
        )
    return out, lse


def backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q_NQD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    key_range_N2: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    own_rows: list[Tensor],
    scale: float,
) -> list[Tensor]:
    """Gradients of q, k, v, own keys and own values in q's dtype, each summed in float32."""
    inputs = *(x.contiguous() for x in (q_NQD, k_TKD, v_TKD)), *map(_aligned, (*own_k, *own_v))
    queries = q_NQD.shape[0]
    if queries == 0:
        return [torch.zeros_like(x) for x in inputs]
    # Rows of own keys that no query owns are written by nobody.
    make = [torch.empty_like if len(x) == queries else torch.zeros_like for x in (*own_k, *own_v)]
    gradients = [*map(torch.empty_like, inputs[:3]), *(new(x) for new, x in zip(make, inputs[3:], strict=True))]
    (q, k, v, *own), (grad_q, grad_k, grad_v, *grad_own), grad = inputs, gradients, grad_out.contiguous()
    (_, query_heads, key_size), (keys, key_heads, value_size), steps = q.shape, v.shape, len(own_k)
    constants = sizes(key_size, value_size)
    _, key_tile, query_tile = tiles(max(key_size, value_size), q.element_size(), _arch(q.device))
    statistics = q.new_empty(2, query_heads, queries, dtype=torch.float32)
    grad_score = q.new_empty(steps, query_heads, queries, dtype=torch.float32)
    addresses, rows, counts = _addresses([*own, *grad_own], q), _stacked(own_rows, q), (query_heads, key_heads)
    with torch.cuda.device_of(q):
        statistics_kernel[triton.cdiv(queries, STATISTICS_ROWS), query_heads](
            grad, out, lse, statistics, queries, query_heads, DV=value_size, ROWS=STATISTICS_ROWS
        )
        if steps:
            own_gradients_kernel[steps, key_heads, triton.cdiv(queries, OWN_ROWS)](
                q, grad, statistics, addresses, rows, grad_score, queries, *counts, steps, scale, **constants, ROWS=OWN_ROWS
            )
        if keys:
            lo_hi = key_range_N2.t().contiguous()
            key_gradients_kernel[triton.cdiv(keys, key_tile.keys), key_heads](
                *(q, k, v, grad, statistics, lo_hi, _seen_by(lo_hi, keys, key_tile.keys), grad_k, grad_v),
                *(queries, keys, *counts, scale),
                **constants,
                **_options(key_tile),
            )
        query_gradients_kernel[triton.cdiv(queries, query_tile.rows), query_heads](
            *(q, k, v, grad, statistics, key_range_N2.contiguous(), addresses, rows, grad_score, grad_q),
            *(queries, *counts, steps, scale),
            **constants,
            **_options(query_tile),
        )
    return gradients


STATISTICS_ROWS = 32
OWN_ROWS = 16
"""Few, because a program holds four inputs and two gradients of all its rows in float32."""


def _check(q: Tensor, v: Tensor) -> None:
    widest, limit = max(q.shape[2], v.shape[2]), max(TILES[120])
    if widest > limit or q.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"ttt_attention: the kernels take float32 and bfloat16 and head sizes up to {limit}, "
            f"got {q.dtype} and {widest}; set ops.impl to reference"
        )


def _arch(device: torch.device) -> int:
    """Compute capability times 10; interpreted on the CPU, the one with the smaller tiles."""
    if device.type != "cuda":
        return 120
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _options(chosen: Tile) -> dict[str, int]:
    return {"ROWS": chosen.rows, "KEYS": chosen.keys, "num_warps": chosen.warps, "num_stages": chosen.stages}


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, and at an address that 128-bit loads can take: a view may start anywhere in its storage."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _addresses(tensors: list[Tensor], like: Tensor) -> Tensor:
    """Device addresses, int64; through pinned memory, so that the copy does not wait for the work before it."""
    if not tensors:
        return torch.empty(0, dtype=torch.int64, device=like.device)
    pinned = torch.tensor([x.data_ptr() for x in tensors], dtype=torch.int64, pin_memory=like.is_cuda)
    return pinned.to(like.device, non_blocking=True)


def _stacked(own_rows: list[Tensor], like: Tensor) -> Tensor:
    """int32 [steps, N]"""
    if not own_rows:
        return torch.empty(0, dtype=torch.int32, device=like.device)
    return torch.stack([rows.to(torch.int32) for rows in own_rows])


def _seen_by(lo_hi_2N: Tensor, keys: int, block: int) -> Tensor:
    """int32 [2, blocks]: first and one past the last row that sees a key of each block; both columns grow, so a search finds them."""
    first_key = torch.arange(0, keys, block, dtype=torch.int32, device=lo_hi_2N.device)
    first = torch.searchsorted(lo_hi_2N[1], first_key, right=True, out_int32=True)
    last = torch.searchsorted(lo_hi_2N[0], first_key + block, out_int32=True)
    return torch.stack((first, last))
