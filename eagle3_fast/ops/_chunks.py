"""The sweep behind `linear_divergence`: chunks of draft rows and the verifier rows they are scored against, one after the other.

Draft rows are taken in the order of their verifier rows, so that each verifier row is projected once (a row whose drafts lie on both
sides of a chunk's edge twice) and serves every TTT step. For a chunk: two products give the logits, one row pass turns the draft
logits into row results and, in place, into their gradient, and one product (two with a trainable head) carries that on. The products
are the library's GEMMs, which no kernel of ours beats; the row pass is ours (C++, Triton) or plain PyTorch (`reference`).

How logits are stored between product and row pass, `storage`:
  centred   bfloat16 logits minus one number per row, subtracted inside the product's float32 accumulator. Softmax does not see it,
            and rounding is finest where probability is, so the gradient's error falls about twentyfold against `bfloat16`.
  float32   products in float32. What CPUs without bfloat16 instructions and float32 inputs take whatever was chosen.
  bfloat16  rounded as they come, as other trainers do: 4 to 39 % error in the gradient, a difference of near-equal distributions.
  reference plain PyTorch row pass on float32 logits (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3_fast.ops._heads import PackedHead, head_for
from eagle3_fast.precision import arithmetic_dtype
from eagle3_fast.reference import linear_divergence as reference

KINDS = ("kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid")
"""Order of the divergences in the row pass's weights and terms."""
CHUNK_ELEMENTS = {"cpu": 1 << 24, "packed": 1 << 23, "cuda": 1 << 27}
"""Draft logits held at a time. On a GPU the weight gradient's read-modify-write must stay small beside its product, which asks for
some 4,096 rows at a vocabulary of 32,000. On a CPU the draft's products with a packed head (`_heads`) have their full rate from a hundred
rows on, and the fewer verifier rows of a chunk are a small part; products that lay the head out anew need five hundred."""
CHUNK_ROWS = {"cpu": (128, 2048), "cuda": (2048, 16384)}
"""Fewest and most rows of a chunk."""
REFERENCE_ROWS = 128
"""Rows of a chunk under the plain row pass, which holds a handful of [rows, V] tensors beside the logits."""
HEAD_SLAB = {"cpu": 2048, "cuda": 16384}
"""Rows of the head whose gradient is formed at a time where products are in bfloat16 and their sum in float32."""

torch.library.define(
    "eagle3_fast::row_divergence_",
    "(Tensor(a!) z, Tensor(b!) t, Tensor first, Tensor row_weight, Tensor kind_weights, Tensor verifier_centre, float softcap, "
    "bool form_gradient, Tensor(c!) terms, Tensor(d!) draft_top1, Tensor(e!) verifier_top1, Tensor(f!) overlap, Tensor(g!) draft_lse, "
    "Tensor(h!) verifier_lse) -> ()",
)
torch.library.define("eagle3_fast::row_top1_", "(Tensor x, Tensor(a!) top1) -> ()")


class Results(NamedTuple):
    """Outputs of the op, filled by `sweep`; [M] or [M, E] but for the loss and the gradients."""

    loss: Tensor
    terms: Tensor
    draft_top1: Tensor
    verifier_top1: Tensor
    overlap: Tensor
    draft_lse: Tensor
    verifier_lse: Tensor
    grad_h: Tensor  # empty where no gradient is asked for
    grad_w: Tensor


class Chunk(NamedTuple):
    """Rows handled together, in the order of their verifier rows."""

    rows: Tensor  # of the caller's draft rows
    targets: Tensor  # ascending verifier rows, each once
    place: Tensor  # for each row of the chunk, where its verifier row stands in `targets`
    first: Tensor  # int32 [targets + 1]: rows first[j] .. first[j + 1] are scored against targets[j]


RowPass = Callable[[Tensor, Tensor, Chunk, Tensor, Tensor], tuple[Tensor, ...]]
"""(draft logits, verifier logits, chunk, row weights, verifier centres) -> row results in the order of `Results`; the draft logits
become their gradient times the row weight."""


def sweep(
    results: Results,
    h: Tensor,
    w: Tensor,
    t: Tensor,
    u: Tensor,
    target_row: Tensor,
    row_weight: Tensor,
    anchor: Tensor | None,
    kinds: dict[str, float],
    verifier_softcap: float,
    storage: str,
) -> None:
    """Fill `results`; arguments are those of the op."""
    wide, dtype = results.terms.dtype, product_dtype(h, storage)
    head, verifier_head = head_for(w, dtype), head_for(u, dtype)
    centred = storage == "centred" and dtype == torch.bfloat16
    run = (
        _plain_rows(kinds, verifier_softcap)
        if storage == "reference"
        else _fused_rows(kinds, verifier_softcap, h.device, bool(results.grad_h.numel()))
    )
    results.grad_w.zero_()
    for chunk in chunks(target_row, w.shape[0], storage, h.device, isinstance(head, PackedHead)):
        verifier_rows, draft_rows, weight = t[chunk.targets].to(dtype), h[chunk.rows].to(dtype), row_weight[chunk.rows].to(wide)
        verifier_centre = draft_centre = torch.zeros((), dtype=wide, device=h.device)
        if centred and anchor is not None:
            verifier_centre = _logit_at(verifier_rows, verifier_head.weight, anchor[chunk.targets])
        verifier_logits = verifier_head.logits(verifier_rows, verifier_centre)
        if centred:
            draft_centre = _logit_at(draft_rows, head.weight, _top1(verifier_logits)[chunk.place])
        z = head.logits(draft_rows, draft_centre)
        verifier_centre = verifier_centre.expand(len(chunk.targets))
        rows = run(z, verifier_logits, chunk, weight, verifier_centre)
        # Capped logits are whole again: the row pass has put their centre back.
        _store_rows(results, chunk.rows, rows, draft_centre, 0 if verifier_softcap else verifier_centre[chunk.place])
        del verifier_logits
        if results.grad_h.numel():
            results.grad_h[chunk.rows] = head.back(z).to(h.dtype)
        if results.grad_w.numel():
            add_head_gradient(results.grad_w, z, draft_rows.masked_fill_(weight[:, None] == 0, 0.0))  # such a row may be broken
        del z  # before the next chunk's logits take their place
    weights = torch.tensor(list(kinds.values()), dtype=wide).to(h.device, non_blocking=True)
    weighted = row_weight.to(wide)[:, None] * results.terms * weights
    results.loss.copy_(weighted.masked_fill(row_weight[:, None] == 0, 0.0).sum())  # such a row may be infinitely far off


def product_dtype(h: Tensor, storage: str) -> torch.dtype:
    """What the logits are computed and stored in."""
    if storage in ("reference", "float32"):
        return torch.promote_types(h.dtype, torch.float32)
    return arithmetic_dtype(h.dtype, h.device.type)


def chunks(target_row: Tensor, vocabulary: int, storage: str, device: torch.device, packed: bool = False) -> list[Chunk]:
    """Cut the rows by their verifier rows, on the CPU; index tensors are sent to `device`."""
    fewest, most = CHUNK_ROWS.get(device.type, CHUNK_ROWS["cuda"])
    elements = CHUNK_ELEMENTS["packed"] if packed else CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"])
    size = max(fewest, min(most, elements // vocabulary))
    cut = []
    for rows in target_row.argsort(stable=True).split(REFERENCE_ROWS if storage == "reference" else size):
        targets, index, counts = target_row[rows].unique_consecutive(return_inverse=True, return_counts=True)
        first = torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)
        cut.append(Chunk(*(part.to(device, non_blocking=True) for part in (rows, targets, index, first))))
    return cut if len(target_row) else []


def add_head_gradient(grad_w: Tensor, z: Tensor, h: Tensor) -> None:
    """grad_w += z^T h, accumulated in grad_w's dtype (float32 or float64) and without another tensor of the head's size."""
    if z.dtype == grad_w.dtype:
        grad_w.addmm_(z.T, h)
        return
    for rows, columns in zip(grad_w.split(HEAD_SLAB[z.device.type]), z.split(HEAD_SLAB[z.device.type], dim=1), strict=True):
        # The CPU library has no float32 result of bfloat16 factors: it rounds each chunk's product, though not the sum.
        rows += torch.ops.aten.mm.dtype(columns.T, h, grad_w.dtype) if z.is_cuda else columns.T @ h


def _top1(logits: Tensor) -> Tensor:
    """The place of each row's largest logit, int64. PyTorch's argmax of bfloat16 is not vectorised on a CPU."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    top1 = logits.new_empty(len(logits), dtype=torch.int64)
    torch.ops.eagle3_fast.row_top1_(logits, top1)
    return top1


def _logit_at(x: Tensor, head: Tensor, entry: Tensor) -> Tensor:
    """The logit of one vocabulary entry per row as the nearest number that x's dtype can hold; 0 where the entry is -1."""
    logit = (x.float() * head[entry.clamp_min(0)].float()).sum(-1)
    return torch.where(entry < 0, 0.0, logit).to(x.dtype).float()


def _plain_rows(kinds: dict[str, float], softcap: float) -> RowPass:
    """Row pass of the reference; works in every float dtype."""
    names, weights = list(kinds), list(kinds.values())

    def run(z: Tensor, t: Tensor, chunk: Chunk, row_weight: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        t = reference.softcap(t, softcap)
        if names == ["kl_div"]:
            rows, gradient = reference.forward_kl(z, t, chunk.place)
            gradient = gradient.mul_(weights[0]) if weights[0] != 1 else gradient
        else:
            rows, both = reference.row_divergences(z, t, chunk.place, names)
            gradient = reference.logit_gradient(both, names, weights)
        torch.mul(gradient, row_weight[:, None], out=z).masked_fill_(row_weight[:, None] == 0, 0.0)
        return tuple(rows)

    return run


def _fused_rows(kinds: dict[str, float], softcap: float, device: torch.device, form_gradient: bool) -> RowPass:
    """Row pass of the C++ module or of Triton, whichever the dispatcher has for `device`."""
    weights = torch.tensor([kinds.get(name, 0.0) for name in KINDS])  # on the CPU: a launch reads them
    asked = torch.tensor([KINDS.index(name) for name in kinds]).to(device, non_blocking=True)

    def run(z: Tensor, t: Tensor, chunk: Chunk, row_weight: Tensor, verifier_centre: Tensor) -> tuple[Tensor, ...]:
        terms, overlap, draft_lse = z.new_empty(len(z), len(KINDS), dtype=torch.float32), *_floats(z, len(z), 2)
        draft_top1, verifier_top1 = (x.new_empty(len(x), dtype=torch.int64) for x in (z, t))
        (verifier_lse,) = _floats(t, len(t), 1)
        torch.ops.eagle3_fast.row_divergence_(
            z, t, chunk.first, row_weight, weights, verifier_centre.contiguous(), softcap, form_gradient,
            terms, draft_top1, verifier_top1, overlap, draft_lse, verifier_lse,
        )  # fmt: skip
        return terms[:, asked], draft_top1, verifier_top1[chunk.place], overlap, draft_lse, verifier_lse[chunk.place]

    return run


@torch.library.impl("eagle3_fast::row_divergence_", "CUDA")
def _triton_rows(
    z: Tensor,
    t: Tensor,
    first: Tensor,
    row_weight: Tensor,
    kind_weights: Tensor,
    verifier_centre: Tensor,
    softcap: float,
    form_gradient: bool,
    terms: Tensor,
    draft_top1: Tensor,
    verifier_top1: Tensor,
    overlap: Tensor,
    draft_lse: Tensor,
    verifier_lse: Tensor,
) -> None:
    from eagle3_fast.kernels.linear_divergence import row_divergence

    row_divergence(
        z, t, first, row_weight, kind_weights, verifier_centre, softcap, form_gradient,
        terms, draft_top1, verifier_top1, overlap, draft_lse, verifier_lse,
    )  # fmt: skip


def _floats(like: Tensor, rows: int, count: int) -> list[Tensor]:
    return [like.new_empty(rows, dtype=torch.float32) for _ in range(count)]


def _store_rows(
    results: Results, at: Tensor, rows: tuple[Tensor, ...], draft_centre: Tensor, verifier_centre: Tensor | int
) -> None:
    """Row results to their places; log-sum-exps get back what was taken off the logits."""
    terms, draft_top1, verifier_top1, overlap, draft_lse, verifier_lse = rows
    parts = (terms, draft_top1, verifier_top1, overlap, draft_lse + draft_centre, verifier_lse + verifier_centre)
    for whole, part in zip(results[1:7], parts, strict=True):
        whole[at] = part
