"""A head's products in `linear_divergence`: logits of rows less a centre, and gradients of logits back to the hidden states.

`Head` asks PyTorch's GEMM, which on a CPU lays the head out anew for its bfloat16 instructions with every chunk of rows. `PackedHead`
keeps a head that does not change in that layout, one for each direction, with a column of ones through which the product itself
takes off the centre. That saves a tenth of the time and gives full speed from a hundred rows on, so chunks can be small; it holds
twice the head's memory (once for a verifier's head) as long as the head lives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary


class Head:
    """Products with `weight` [V, H]. Logits live until the next call."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        # One buffer for all chunks: fresh memory for each would be touched for the first time by the product.
        self.space = weight.new_empty(0, len(weight))

    def logits(self, x: Tensor, centre: Tensor) -> Tensor:
        """x weight^T - centre of each row (of all rows where it has no axis), [rows, V].

        The GEMM takes off the centre before it rounds, so a bfloat16 result is rounded once.
        """
        if len(self.space) < len(x):
            self.space = self.weight.new_empty(len(x), len(self.weight))
        out = self.space[: len(x)]
        if centre.ndim == 0:
            return torch.mm(x, self.weight.T, out=out)
        return torch.addmm((-centre).to(x.dtype)[:, None].expand_as(out), x, self.weight.T, out=out)

    def back(self, grad_logits: Tensor) -> Tensor:
        """grad_logits weight, [rows, H]."""
        return grad_logits @ self.weight


@dataclass
class Layouts:
    """A head's copies in oneDNN's layout, made when first needed, and what tells whether they still are copies."""

    state: tuple[int, int]
    made: dict[str, Tensor] = field(default_factory=dict)


class PackedHead(Head):
    """`Head` by oneDNN's packed products. A centre must be a bfloat16 number, whatever its dtype."""

    SPARE = 2
    """Columns beyond the weight's: the ones, and zeros because bfloat16 factors go in pairs."""

    def __init__(self, weight: Tensor, layouts: Layouts) -> None:
        self.weight, self.made = weight, layouts.made

    def logits(self, x: Tensor, centre: Tensor) -> Tensor:
        if "logits" not in self.made:
            ones = F.pad(self.weight.new_ones(len(self.weight), 1), (0, self.SPARE - 1))
            self.made["logits"] = torch.ops.mkldnn._reorder_linear_weight(torch.cat((self.weight, ones), 1))
        x = F.pad(x, (0, self.SPARE))
        x[:, -self.SPARE] = -centre
        return torch.ops.mkldnn._linear_pointwise(x, self.made["logits"], None, "none", [], "")

    def back(self, grad_logits: Tensor) -> Tensor:
        if "back" not in self.made:
            self.made["back"] = torch.ops.mkldnn._reorder_linear_weight(self.weight.T.contiguous())
        return torch.ops.mkldnn._linear_pointwise(grad_logits, self.made["back"], None, "none", [], "")


_layouts = WeakTensorKeyDictionary()


def head_for(weight: Tensor, dtype: torch.dtype) -> Head:
    """Products with `weight` in `dtype`: packed where the same frozen tensor comes back as it was the last time.

    A tensor made for one call, one that training moves, and one that ZeRO-3 gathers to a new place are not packed. Whether a tensor
    has changed is told by its version, as autograd does: writing to its `.data` between two calls goes unseen.
    """
    if not _packable(weight, dtype):
        return Head(weight.to(dtype))
    state = weight.data_ptr(), weight._version
    known = _layouts.get(weight)
    if known is None or known.state != state:
        _layouts[weight] = Layouts(state)
        return Head(weight)
    return PackedHead(weight, known)


def held_bytes() -> int:
    """Memory of all packed heads that are alive."""
    return sum(copy.numel() * copy.element_size() for layouts in _layouts.values() for copy in layouts.made.values())


def _packable(weight: Tensor, dtype: torch.dtype) -> bool:
    frozen = not weight.requires_grad and not weight.is_inference()  # an inference tensor has no version
    return frozen and weight.device.type == "cpu" and weight.dtype == dtype == torch.bfloat16 and _packs_bfloat16()


@cache
def _packs_bfloat16() -> bool:
    ops = torch.ops.mkldnn
    return all(hasattr(ops, name) for name in ("_linear_pointwise", "_reorder_linear_weight")) and bool(
        ops._is_mkldnn_bf16_supported()
    )
