"""`ttt_attention` through flash-attn's varlen kernels over the shared keys, own keys merged through log-sum-exps (`_own_keys`).

Causal varlen attention gives the last query of a sequence its last key, the query before it the key before that, and so on. So a
document becomes a sequence that ends at its last query, and a query whose row was trimmed becomes a place filled with zeros: only
places between a document's first and last query cost anything. Keys that no query of a document sees stand after it as a sequence
without queries, because flash-attn leaves gradients of keys outside every sequence unwritten. All of this is worked out on the host.
It was not chosen as `fused`: places between queries are computed for nothing and the merge is another pass over the output.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from eagle3_fast.errors import InputError
from eagle3_fast.ops._dispatch import import_fault
from eagle3_fast.ops._own_keys import add_gradients, merge, rows_or_zero

INTERFACE = "flash_attn.flash_attn_interface"
WIDEST_HEAD = 256
"""What flash-attn 2 takes; a width must also be a multiple of 8."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    host_range: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    own_rows: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [N, Q, D] and log-sum-exp float32 [N, Q]; arguments are those of the op, with its key_range on the CPU.

    Raises InputError where the ranges are not those of rows that see themselves and their document or window up to themselves.
    """
    if len(q) == 0:
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    at = sequences(host_range, q.device)
    out, lse, *_ = _interface()._flash_attn_varlen_forward(
        at.spread(q), k[at.keys], v[at.keys], **at.arguments, dropout_p=0.0, softmax_scale=scale
    )
    shared_out, shared_lse = at.gather(out), at.gather(lse.T)
    return merge(shared_out, shared_lse, q, own_k, own_v, own_rows, scale) if own_k else (shared_out, shared_lse.contiguous())


def backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    host_range: Tensor,
    own_k: list[Tensor],
    own_v: list[Tensor],
    own_rows: list[Tensor],
    scale: float,
) -> list[Tensor]:
    """Gradients of q, k, v, own keys and own values; the same bits every time where torch is set to deterministic algorithms."""
    grad_k, grad_v = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    if len(q) == 0:
        return [torch.zeros_like(q), grad_k, grad_v, *map(torch.zeros_like, (*own_k, *own_v))]
    at = sequences(host_range, q.device)
    places = at.spread(q)
    grad_places = torch.empty_like(places)
    # A place without a query has output gradient 0, hence no share in any gradient, whatever its weights are.
    _interface()._flash_attn_varlen_backward(
        *(at.spread(grad_out), places, k[at.keys], v[at.keys], at.spread(out), at.spread(lse).T.contiguous()),
        *(grad_places, grad_k[at.keys], grad_v[at.keys]),
        **at.arguments,
        **{"dropout_p": 0.0, "softmax_scale": scale, "softcap": 0.0, "alibi_slopes": None},
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    grad_q = at.gather(grad_places).float()
    grad_own = add_gradients(grad_q, grad_out, out, lse, q, own_k, own_v, own_rows, scale)
    return [grad_q.to(q.dtype), grad_k, grad_v, *(x.to(q.dtype) for x in grad_own)]


@dataclass(frozen=True)
class Sequences:
    """The rows of one call as flash-attn's sequences."""

    keys: slice  # from the first document's first key to the last row's own
    place: Tensor  # int32 [N], on the device: where each row stands among the P places of all sequences
    row: Tensor  # int32 [P], on the device: which row stands there, N where none does
    arguments: dict[str, Any]  # of flash-attn: borders and longest of the sequences, causality, window

    def spread(self, x_N: Tensor) -> Tensor:
        """[N, ...] as [P, ...], contiguous, zero where no row stands."""
        return x_N.contiguous() if len(self.row) == len(x_N) else rows_or_zero(x_N, self.row)

    def gather(self, x_P: Tensor) -> Tensor:
        """[P, ...] as [N, ...]."""
        return x_P if len(self.place) == len(x_P) else x_P[self.place]


def sequences(host_range_N2: Tensor, device: torch.device) -> Sequences:
    """Find documents and window in the ranges of at least one row, and lay the rows out.

    Where rows see w keys at most, a row that sees fewer shows where its document starts. One that sees w may have a document that
    starts anywhere before: what it sees is the same. If taking every row's first key for a start works, there is no window.
    """
    lo, hi = host_range_N2.long().t().contiguous()
    seen = hi - lo
    window = int(seen.max())
    if bool((seen < 1).any()) or bool((hi[1:] <= hi[:-1]).any()) or bool((lo[1:] < lo[:-1]).any()):
        raise InputError(_REFUSED.format("not every row sees itself, in ascending order"))
    first, starts, ends = _documents(lo, hi, torch.ones_like(seen, dtype=torch.bool))
    windowed = bool((ends[:-1] > starts[1:]).any())
    if windowed:
        first, starts, ends = _documents(lo, hi, seen < window)
        if bool((ends[:-1] > starts[1:]).any()):
            raise InputError(_REFUSED.format("a row begins neither at its document's start nor at its window's"))
    keys = torch.stack((starts, ends), dim=1).flatten()
    queries = torch.zeros(len(keys) - 1, dtype=torch.long)
    queries[::2] = ends - hi[first] + 1
    lengths = torch.stack((queries, keys.diff()))[:, keys.diff() > 0]  # queries and keys of documents and of what lies between
    borders = pad(lengths.cumsum(1), (1, 0))
    document = torch.searchsorted(first, torch.arange(len(lo)), right=True) - 1
    place = hi - hi[first][document] + (queries[::2].cumsum(0) - queries[::2])[document]
    row = torch.full((int(queries.sum()),), len(lo))
    row[place] = torch.arange(len(lo))
    place, row, cu_seqlens_q, cu_seqlens_k = _sent((place, row, *borders), device)
    arguments = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        # With one query a sequence at most, flash-attn takes every sequence to have exactly one.
        "max_seqlen_q": max(2, int(lengths[0].max())),
        "max_seqlen_k": int(lengths[1].max()),
        "causal": True,
        "window_size_left": window - 1 if windowed else -1,
        "window_size_right": 0 if windowed else -1,
    }
    return Sequences(slice(int(starts[0]), int(ends[-1])), place, row, arguments)


_REFUSED = "ops.impl is flash, but these key ranges are not causal attention within documents and a window: {}; use auto"


def _documents(lo: Tensor, hi: Tensor, starting: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First row, first key and end of keys of each document, if every row of `starting` sees its document's first key."""
    starts = torch.cat((lo[:1], lo[starting])).unique()
    first = torch.searchsorted(lo, starts)
    last = torch.cat((first[1:], first.new_tensor([len(lo)]))) - 1
    return first, starts, hi[last]


def _sent(parts: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """As int32 on the device, in one copy; through pinned memory, so that it does not wait for the work before it."""
    whole = torch.cat(parts).to(torch.int32)
    whole = whole.pin_memory() if device.type == "cuda" else whole
    return whole.to(device, non_blocking=True).split([len(part) for part in parts])


def lacking(q: Tensor, v: Tensor) -> str | None:
    """What keeps flash-attn from these queries and values, or from this machine; None where nothing does."""
    if fault := _device_fault(q.device):
        return fault
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn takes bfloat16 and float16, not {q.dtype}"
    if q.shape[2] != v.shape[2]:
        return f"keys and values differ in width ({q.shape[2]} and {v.shape[2]})"
    if q.shape[2] % 8 or q.shape[2] > WIDEST_HEAD:
        return f"flash-attn takes head widths up to {WIDEST_HEAD} that are multiples of 8, not {q.shape[2]}"
    return import_fault(INTERFACE, "flash-attn") or _call_fault(q.device, q.dtype, q.shape[2])


def _device_fault(device: torch.device) -> str | None:
    return None if device.type == "cuda" else f"flash-attn runs on cuda, and the tensors are on {device.type}"


@cache
def _call_fault(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Why one small forward and backward pass fails, once per kind: a build for other cards, another torch or another interface."""
    x, host_range = torch.zeros(2, 1, width, dtype=dtype, device=device), torch.tensor([[0, 1], [0, 2]])
    own: list[Tensor] = []
    try:
        out, lse = forward(x, x, x, host_range, own, own, own, 1.0)
        backward(x, out, lse, x, x, x, host_range, own, own, own, 1.0)
    except (RuntimeError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())
        return f"flash-attn, of which 2.8 or later is needed, fails at its first call ({type(error).__name__}: {said})"
    return None


def _interface() -> Any:
    return importlib.import_module(INTERFACE)
