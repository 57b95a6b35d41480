"""Reshard plans: who writes which box, which stored boxes a wanted box needs, and what byte span that is. Pure arithmetic.

    stored pieces of [6, 4]        wanted box [1:5, 0:4]         transfers
    +---------+                                                  piece A, rows 1..2
    | A  0..2 |                    rows 1..4              =>     piece B, rows 3..4
    +---------+
    | B  3..5 |
    +---------+
"""

import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence

from megatron.core.dist_checkpointing.mapping import Box, intersect


@dataclasses.dataclass(frozen=True)
class HeldPiece:
    """A box of a logical tensor that a rank holds, and its size."""

    name: str
    box: Box
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Transfer:
    """`region` (global coordinates) is read from stored piece number `source`."""

    source: int
    region: Box


def whole_box(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def cover_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not cover a tensor of this shape exactly once, or None when they do."""
    for box in boxes:
        if len(box.offset) != len(shape) or any(
            o < 0 or n < 0 or o + n > size for o, n, size in zip(box.offset, box.shape, shape, strict=False)
        ):
            return f"piece {describe(box)} lies outside of shape {list(shape)}"
    filled = [box for box in boxes if box.numel]
    overlap = _first_overlap(filled)
    if overlap is not None:
        return f"pieces {describe(overlap[0])} and {describe(overlap[1])} overlap"
    missing = math.prod(shape) - sum(box.numel for box in filled)
    return f"{missing} of {math.prod(shape)} elements are in no piece" if missing else None


def describe(box: Box) -> str:
    """`[1:3, 0:4]`"""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(box.offset, box.shape, strict=True)) + "]"


def _first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that meet: a sweep along the dim with the most distinct offsets, so that stripes cost n log n."""
    if len(boxes) < 2:
        return None
    dims = len(boxes[0].offset)
    if dims == 0:
        return boxes[0], boxes[1]
    dim = max(range(dims), key=lambda d: len({box.offset[d] for box in boxes}))
    ordered = sorted(boxes, key=lambda box: box.offset[dim])
    for index, box in enumerate(ordered):
        end = box.offset[dim] + box.shape[dim]
        for other in _while_before(ordered, index + 1, dim, end):
            if intersect(box, other) is not None:
                return box, other
    return None


def _while_before(ordered: Sequence[Box], start: int, dim: int, end: int) -> Iterator[Box]:
    for position in range(start, len(ordered)):
        if ordered[position].offset[dim] >= end:
            return
        yield ordered[position]


def assign_writers(held: Sequence[Sequence[HeldPiece]]) -> list[list[int]]:
    """Choose one writer for every distinct piece, so that ranks write about the same number of bytes.

    Args:
        held: for each rank the pieces it holds; the same (name, box) on several ranks is a replica of one piece.
    Returns:
        for each rank the ascending positions (in its own list) of the pieces it writes.

    Pieces with one holder are fixed; then the largest replicated piece goes to its least loaded holder, and so on
    (longest-processing-time rule). Every rank computes the same answer.
    """
    holders: dict[Hashable, list[tuple[int, int]]] = {}
    for rank, pieces in enumerate(held):
        for position, piece in enumerate(pieces):
            places = holders.setdefault((piece.name, piece.box), [])
            if not places or places[-1][0] != rank:
                places.append((rank, position))
    load = [0] * len(held)
    written: list[list[int]] = [[] for _ in held]

    def size(places: list[tuple[int, int]]) -> int:
        return held[places[0][0]][places[0][1]].nbytes

    for places in sorted(holders.values(), key=lambda places: (len(places) > 1, -size(places), places)):
        rank, position = min(places, key=lambda place: (load[place[0]], place[0]))
        load[rank] += size(places)
        written[rank].append(position)
    return [sorted(positions) for positions in written]


def plan_transfers(wanted: Box, stored: Sequence[Box]) -> list[Transfer]:
    """The regions of `stored` pieces that make up `wanted`; complete if the pieces cover the tensor once."""
    met = ((source, intersect(wanted, box)) for source, box in enumerate(stored))
    return [Transfer(source, region) for source, region in met if region is not None]


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def flat_span(region: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Half-open range of row-major element positions from the first to the last element of `region` in a tensor of `shape`."""
    strides = row_major_strides(shape)
    first = sum(o * s for o, s in zip(region.offset, strides, strict=True))
    last = sum((o + n - 1) * s for o, n, s in zip(region.offset, region.shape, strides, strict=True))
    return first, last + 1


def split_by_span(region: Box, shape: Sequence[int], limit: int) -> list[Box]:
    """Cut `region` of a tensor of `shape` along its outer dims until no part spans more than `limit` elements.

    A part that is a single run of the innermost dim and still too long is cut there, so the bound always holds.
    """
    start, end = flat_span(region, shape)
    dim = next((d for d, n in enumerate(region.shape) if n > 1), None)
    if end - start <= limit or dim is None:
        return [region]
    half = region.shape[dim] // 2
    parts = []
    for offset, size in ((0, half), (half, region.shape[dim] - half)):
        where = tuple(o + offset if d == dim else o for d, o in enumerate(region.offset))
        parts.append(Box(where, tuple(size if d == dim else n for d, n in enumerate(region.shape))))
    return [piece for part in parts for piece in split_by_span(part, shape, limit)]
