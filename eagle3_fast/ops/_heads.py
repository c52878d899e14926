"""A head's products in `linear_divergence`: logits of rows less a centre, and gradients of logits back to the hidden states.

`Head` asks PyTorch's GEMM, which on a CPU lays the head out anew for its bfloat16 instructions with every chunk of rows. `PackedHead`
keeps a frozen head in that layout, one for each direction, with a column of ones through which the product itself takes off the
centre. That saves a tenth of the time and gives full speed from a hundred rows on, so chunks can be small; it holds twice the head's
memory (once for a verifier's head) as long as the head lives. Float32 products gain nothing from it and are not packed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from eagle3_fast.log import say_once


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
    """Copies of a head in oneDNN's layout, made when first needed, and what they are copies of.

    `of` shares the head's memory: while it is held, no other tensor can stand in the same place.
    """

    of: Tensor
    version: int
    made: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def for_head(cls, weight: Tensor) -> Layouts:
        return cls(weight.detach(), weight._version)

    def current(self, weight: Tensor) -> bool:
        return self.of.is_set_to(weight) and self.version == weight._version


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
    """Products with `weight` in `dtype`: packed where it is a frozen parameter, and anew where that has moved or changed.

    Which of the two does not depend on earlier calls, so that a run that goes on after a stop computes what it would have computed.
    A change is told by the version, as autograd does: writing to a parameter's `.data` in place between two calls goes unseen.
    """
    if not _stays(weight) or weight.dtype != dtype or not packs(dtype):
        return Head(weight.to(dtype))
    if weight not in _layouts or not _layouts[weight].current(weight):
        _layouts[weight] = Layouts.for_head(weight)
    return PackedHead(weight, _layouts[weight])


def held_bytes(*heads: Tensor) -> int:
    """Memory of the packed copies of these heads."""
    made = [copy for head in heads if head in _layouts for copy in _layouts[head].made.values()]
    return sum(copy.numel() * copy.element_size() for copy in made)


def _stays(weight: Tensor) -> bool:
    """Whether the same weight will come back: a frozen parameter on the CPU, but not one of ZeRO-3, which gathers it for each call."""
    parameter = isinstance(weight, nn.Parameter) and not weight.requires_grad and weight.device.type == "cpu"
    return parameter and not weight.is_inference() and not hasattr(weight, "ds_id")  # an inference tensor has no version


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether frozen heads of this dtype are packed on this CPU."""
    ops = torch.ops.mkldnn
    if dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available() or not ops._is_mkldnn_bf16_supported():
        return False
    known = all(hasattr(ops, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    if not known:
        say_once(
            f"torch {torch.__version__} has not the packed products of other releases: heads are laid out anew for each product"
        )
    return known
