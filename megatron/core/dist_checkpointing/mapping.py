"""ShardedTensor: which boxes of which logical tensor a rank holds. Pure data; no communication, no files.

A logical tensor has a name, a global shape (without vocabulary padding) and a dtype. A rank holds some boxes of it:

    global [6, 4]          a flat shard [5, 15) of it is three boxes
    . . . .                    rows 1, columns 1..3   (tail of the first row)
    . x x x                    rows 2, columns 0..3   (whole rows)
    x x x x                    rows 3, columns 0..2   (head of the last row)
    x x x .
"""

import dataclasses
import math
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True)
class Box:
    """A half-open axis-aligned region: `offset[d] <= index[d] < offset[d] + shape[d]`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Index of this region in the tensor it is part of."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


@dataclasses.dataclass(frozen=True)
class Piece:
    """One box of a logical tensor and the local memory that holds it (`data.numel() == box.numel`; any strides)."""

    box: Box
    data: torch.Tensor


@dataclasses.dataclass(frozen=True)
class ShardedTensor:
    """This rank's part of a logical tensor.

    name: logical name, e.g. `model.decoder.layers.0.mlp.linear_fc1.weight`, `optimizer.exp_avg.<same name>`.
    global_shape: shape of the logical tensor.
    pieces: this rank's boxes; disjoint. Loading copies into each piece's memory in place.
    replicas: how many ranks hold exactly these pieces; replica_index: this rank's position among them. The store writes
        each piece once and may pick any replica.
    """

    name: str
    global_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    replicas: int = 1
    replica_index: int = 0

    @property
    def dtype(self) -> torch.dtype | None:
        """dtype of the pieces; None without pieces."""
        return self.pieces[0].data.dtype if self.pieces else None


def whole(name: str, tensor: torch.Tensor, *, replicas: int = 1, replica_index: int = 0) -> ShardedTensor:
    """A rank that holds all of a logical tensor."""
    shape = tuple(tensor.shape)
    piece = Piece(Box((0,) * len(shape), shape), tensor)
    return ShardedTensor(name, shape, (piece,), replicas, replica_index)


def flat_range_boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """The boxes that the row-major flat range [start, end) of a tensor covers, in ascending order; at most 2n - 1.

    Args:
        shape: shape of the tensor; () is a scalar with one element.
        start, end: half-open range, 0 <= start <= end <= product of shape.
    """
    assert 0 <= start <= end <= math.prod(shape), (shape, start, end)
    if start == end:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    if len(shape) == 1:
        return [Box((start,), (end - start,))]
    first, head = divmod(start, inner)
    last, tail = divmod(end, inner)
    if first == last:
        return _in_row(shape, first, head, tail)
    boxes = []
    if head:
        boxes += _in_row(shape, first, head, inner)
        first += 1
    if last > first:
        boxes.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    if tail:
        boxes += _in_row(shape, last, 0, tail)
    return boxes


def _in_row(shape: Sequence[int], row: int, start: int, end: int) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.shape)) for box in flat_range_boxes(shape[1:], start, end)]


def flat_range_pieces(shape: Sequence[int], start: int, data: torch.Tensor) -> tuple[Piece, ...]:
    """Pieces of a flat shard: `data` (1-D) holds elements [start, start + len(data)) of a tensor of this shape."""
    pieces, offset = [], 0
    for box in flat_range_boxes(shape, start, start + data.numel()):
        pieces.append(Piece(box, data[offset : offset + box.numel].view(box.shape)))
        offset += box.numel
    return tuple(pieces)
