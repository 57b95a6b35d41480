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

from megatron.core.param_meta import param_meta


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

    def shaped(self) -> torch.Tensor:
        """The memory in the box's shape, without autograd; always a view."""
        data = self.data.detach()
        return data if data.shape == self.box.shape else data.view(self.box.shape)


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


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a block of a rank's local tensor lies in the logical tensor; both boxes have the same shape."""

    local: Box
    logical: Box


def placements(
    local_shape: Sequence[int], logical_shape: Sequence[int], dim: int | None, rank: int, size: int, blocks: int = 1
) -> tuple[Placement, ...]:
    """Blocks of a tensor that is split over `size` ranks along `dim`, without what is padding.

    Args:
        local_shape: shape on this rank, padding included. logical_shape: global shape without padding.
        dim: the split dim; None = every rank holds all of it.
        rank, size: position in and size of the group that shares the tensor.
        blocks: number of equal blocks along `dim` that are split each for itself: 2 for [gate; up], of which a rank holds
            [its part of gate; its part of up].
    """
    clipped = tuple(min(n, m) for n, m in zip(local_shape, logical_shape, strict=True))
    if dim is None:
        box = Box((0,) * len(clipped), clipped)
        return (Placement(box, box),)
    part = local_shape[dim] // blocks
    assert part * blocks == local_shape[dim], (local_shape, dim, blocks)
    found = []
    for block in range(blocks):
        start = (block * size + rank) * part
        extent = max(0, min(part, logical_shape[dim] - start))
        if extent:
            shape = (*clipped[:dim], extent, *clipped[dim + 1 :])
            offsets = [tuple(o if d == dim else 0 for d in range(len(shape))) for o in (block * part, start)]
            found.append(Placement(Box(offsets[0], shape), Box(offsets[1], shape)))
    return tuple(found)


def logical_shape(param: torch.Tensor, tp_size: int) -> tuple[int, ...]:
    """Shape of the logical tensor that a local parameter is part of, as its `ParamMeta` says."""
    meta = param_meta(param)
    if meta.logical_shape is not None:
        return tuple(meta.logical_shape)
    return tuple(n * tp_size if dim == meta.tp_dim else n for dim, n in enumerate(param.shape))


def param_placements(param: torch.Tensor, tp_rank: int, tp_size: int) -> tuple[Placement, ...]:
    """Where a local parameter lies in its logical tensor."""
    meta, shape = param_meta(param), tuple(param.shape)
    return placements(shape, logical_shape(param, tp_size), meta.tp_dim, tp_rank, tp_size, meta.tp_blocks)


def placed_pieces(where: Sequence[Placement], tensor: torch.Tensor) -> tuple[Piece, ...]:
    """Pieces of a rank's local tensor."""
    return tuple(Piece(place.logical, tensor.detach()[place.local.slices()]) for place in where)


def placed_flat_pieces(
    where: Sequence[Placement], local_shape: Sequence[int], start: int, data: torch.Tensor
) -> tuple[Piece, ...]:
    """Pieces of a flat shard of a rank's local tensor: `data` (1-D) holds its row-major elements [start, start + len(data)).

    Elements that lie in no placement (padding) are left out.
    """
    pieces = []
    for part in flat_range_pieces(local_shape, start, data):
        for place in where:
            common = intersect(part.box, place.local)
            if common is not None:
                shift = zip(common.offset, place.local.offset, place.logical.offset, strict=True)
                logical = Box(tuple(o - a + b for o, a, b in shift), common.shape)
                pieces.append(Piece(logical, part.data[relative(common, part.box).slices()]))
    return tuple(pieces)


def intersect(a: Box, b: Box) -> Box | None:
    """The common region of two boxes of one tensor, or None if it is empty. Scalars (0 dims) always meet."""
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    ends = (min(x + n, y + m) for x, n, y, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
    return None if any(n <= 0 for n in shape) else Box(offset, shape)


def relative(box: Box, origin: Box) -> Box:
    """`box` in the coordinates of `origin` (both given in global coordinates)."""
    return Box(tuple(a - b for a, b in zip(box.offset, origin.offset, strict=True)), box.shape)


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
