"""How ZeRO cuts the parameters of a group into one flat piece a rank, and how whole tensors travel to and from the pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """Elements start:stop of a flattened parameter, held from `offset` on in a rank's piece."""

    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Partition:
    """The pieces of one group of parameters over all ranks.

    names, shapes: of the parameters, in the group's order. shares: by rank, then by parameter. size: elements of a piece.
    """

    def __init__(self, names: Sequence[str], shapes: Sequence[torch.Size], shares: list[list[Share]], size: int, rank: int) -> None:
        self.names, self.shapes, self.shares, self.size, self.rank = list(names), list(shapes), shares, size, rank

    def gather(self, piece: Tensor) -> dict[str, Tensor]:
        """Whole tensors by name on the first rank, on the CPU; nothing on the others. Every rank takes part."""
        pieces: list[Tensor] | None = [torch.empty_like(piece) for _ in self.shares] if self.rank == 0 else None
        if len(self.shares) == 1:
            pieces = [piece.flatten()]  # not cut: every rank has it
        else:
            dist.gather(piece.contiguous(), pieces, dst=0)
        if pieces is None:
            return {}
        whole = {}
        for at, (name, shape) in enumerate(zip(self.names, self.shapes, strict=True)):
            flat = torch.empty(shape.numel(), dtype=piece.dtype)
            for held, shares in zip(pieces, self.shares, strict=True):
                share = shares[at]
                flat[share.start : share.stop] = held[share.offset : share.offset + share.size]
            whole[name] = flat.view(shape)
        return whole

    def scatter(self, whole: dict[str, Tensor], piece: Tensor) -> None:
        """Fill this rank's piece from whole tensors, which every rank has."""
        flat = piece.view(-1)
        for name, share in zip(self.names, self.shares[self.rank], strict=True):
            flat[share.offset : share.offset + share.size] = whole[name].flatten()[share.start : share.stop]

    def owners(self, cost: Sequence[float]) -> list[int]:
        """A rank for each parameter, so that the costs are even: dearest first, each to the least laden rank."""
        load, owner = [0.0] * len(self.shares), [0] * len(cost)
        for at in sorted(range(len(cost)), key=lambda at: -cost[at]):
            owner[at] = min(range(len(load)), key=lambda rank: load[rank])
            load[owner[at]] += cost[at]
        return owner

    def to_owners(self, piece: Tensor, owner: list[int]) -> dict[int, Tensor]:
        """Whole tensors of the parameters that this rank owns, by position in the group. Every rank takes part."""
        mine = [at for at, rank in enumerate(owner) if rank == self.rank]
        outgoing = torch.cat([piece[share.offset : share.offset + share.size] for share in self._by_owner(owner)])
        received = [self._length(rank, mine) for rank in self._ranks]
        incoming = piece.new_empty(sum(received))
        dist.all_to_all_single(incoming, outgoing, received, self._sent(owner))
        whole = {at: piece.new_empty(self.shapes[at].numel()) for at in mine}
        position = 0
        for share, at in ((self.shares[rank][at], at) for rank in self._ranks for at in mine):
            whole[at][share.start : share.stop] = incoming[position : position + share.size]
            position += share.size
        return {at: flat.view(self.shapes[at]) for at, flat in whole.items()}

    def from_owners(self, whole: dict[int, Tensor], like: Tensor, owner: list[int]) -> Tensor:
        """The piece made of what the owners computed; `whole` holds this rank's own parameters. Every rank takes part."""
        mine = [at for at, rank in enumerate(owner) if rank == self.rank]
        flat = {at: whole[at].to(like.dtype).flatten() for at in mine}
        shares = [(self.shares[rank][at], at) for rank in self._ranks for at in mine]
        outgoing = torch.cat([flat[at][share.start : share.stop] for share, at in shares]) if mine else like.new_empty(0)
        incoming = like.new_empty(sum(self._sent(owner)))
        dist.all_to_all_single(incoming, outgoing, self._sent(owner), [self._length(rank, mine) for rank in self._ranks])
        piece, position = torch.zeros_like(like), 0
        for share in self._by_owner(owner):
            piece[share.offset : share.offset + share.size] = incoming[position : position + share.size]
            position += share.size
        return piece

    @property
    def _ranks(self) -> range:
        return range(len(self.shares))

    def _length(self, rank: int, parameters: list[int]) -> int:
        """Elements that a rank holds of the given parameters."""
        return sum(self.shares[rank][at].size for at in parameters)

    def _sent(self, owner: list[int]) -> list[int]:
        """Elements that this rank holds for each owner."""
        return [self._length(self.rank, [at for at, who in enumerate(owner) if who == rank]) for rank in self._ranks]

    def _by_owner(self, owner: list[int]) -> list[Share]:
        """This rank's shares, those of the first owner first."""
        return [self.shares[self.rank][at] for at in sorted(range(len(owner)), key=lambda at: (owner[at], at))]


def each_cut(names: Sequence[str], shapes: Sequence[torch.Size], rank: int, ranks: int) -> Partition:
    """ZeRO-3: every parameter is cut into equal shares, the last ones padded; a piece is one share of each."""
    shares: list[list[Share]] = [[] for _ in range(ranks)]
    offset = 0
    for shape in shapes:
        length = -(-shape.numel() // ranks)
        for other in range(ranks):
            start = min(other * length, shape.numel())
            shares[other].append(Share(start, min(start + length, shape.numel()), offset))
        offset += length
    return Partition(names, shapes, shares, offset, rank)


def row_cut(names: Sequence[str], shapes: Sequence[torch.Size], size: int, rank: int, ranks: int) -> Partition:
    """ZeRO-1 and 2: the parameters laid end to end and cut into pieces of `size`; the last is padded."""
    shares: list[list[Share]] = [[] for _ in range(ranks)]
    position = 0
    for shape in shapes:
        for other in range(ranks):
            before = other * size - position  # elements of this parameter that lie in earlier pieces
            start, stop = (min(max(edge, 0), shape.numel()) for edge in (before, before + size))
            shares[other].append(Share(start, stop, max(-before, 0)))
        position += shape.numel()
    return Partition(names, shapes, shares, size, rank)
