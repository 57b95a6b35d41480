"""Reshard plans against brute force over all elements."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.mapping import (
    Box,
    Placement,
    flat_range_boxes,
    intersect,
    placed_flat_pieces,
    placed_pieces,
    placements,
)
from megatron.core.dist_checkpointing.reshard import (
    HeldPiece,
    assign_writers,
    cover_problem,
    flat_span,
    plan_transfers,
    split_by_span,
    whole_box,
)

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def cuts(draw, shape):
    """A random partition of a shape into boxes: by flat ranges, or by halving along random dims."""
    if draw(st.booleans()):
        total = math.prod(shape)
        ends = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=4))})
        return [box for a, b in itertools.pairwise(ends) for box in flat_range_boxes(shape, a, b)]
    boxes = [whole_box(shape)]
    for _ in range(draw(st.integers(0, 4))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [d for d, n in enumerate(box.shape) if n > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.shape[dim] - 1))
        for offset, size in ((0, at), (at, box.shape[dim] - at)):
            where = tuple(o + offset * (d == dim) for d, o in enumerate(box.offset))
            boxes.append(Box(where, tuple(size if d == dim else n for d, n in enumerate(box.shape))))
    return boxes


@st.composite
def shape_and_cuts(draw, number):
    shape = draw(shapes)
    return shape, [draw(cuts(shape)) for _ in range(number)]


def counts(shape, boxes):
    count = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        count[box.slices()] += 1
    return count


@given(shape_and_cuts(1))
def test_partitions_are_accepted_and_losing_or_doubling_a_box_is_not(case):
    shape, (boxes,) = case
    assert (counts(shape, boxes) == 1).all()
    assert cover_problem(shape, boxes) is None
    assert "in no piece" in cover_problem(shape, boxes[1:])
    assert "overlap" in cover_problem(shape, [*boxes, boxes[-1]])


@given(shapes.filter(len), st.data())
def test_boxes_outside_of_the_shape_are_refused(shape, data):
    box = whole_box(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    shift = data.draw(st.sampled_from([-1, 1]))
    moved = Box(tuple(o + shift * (d == dim) for d, o in enumerate(box.offset)), box.shape)
    assert "outside" in cover_problem(shape, [moved])


@given(shape_and_cuts(2))
def test_transfers_rebuild_every_wanted_box_from_any_partition(case):
    shape, (stored, wanted) = case
    value = torch.arange(math.prod(shape)).reshape(shape)
    result = torch.full(shape, -1)
    for box in wanted:
        for transfer in plan_transfers(box, stored):
            assert intersect(transfer.region, stored[transfer.source]) == transfer.region
            assert intersect(transfer.region, box) == transfer.region
            assert (result[transfer.region.slices()] == -1).all()
            result[transfer.region.slices()] = value[transfer.region.slices()]
    assert torch.equal(result, value)


@given(shape_and_cuts(1), st.integers(1, 12))
def test_split_regions_cover_the_region_and_respect_the_span_limit(case, limit):
    shape, (boxes,) = case
    for box in boxes:
        parts = split_by_span(box, shape, limit)
        assert torch.equal(counts(shape, parts), counts(shape, [box]))
        for part in parts:
            start, end = flat_span(part, shape)
            positions = torch.arange(math.prod(shape)).reshape(shape)[part.slices()]
            assert (start, end) == (positions.min().item(), positions.max().item() + 1)
            assert end - start <= limit


@st.composite
def held_pieces(draw):
    """Pieces of some sizes, each on a random non-empty set of 1 to 4 ranks."""
    ranks = draw(st.integers(1, 4))
    held = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(0, 20))):
        piece = HeldPiece(f"t{number}", Box((0,), (1,)), draw(st.integers(0, 50)))
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append(piece)
    return held


@given(held_pieces())
def test_every_piece_has_one_writer_that_holds_it(held):
    written = [held[rank][position].name for rank, mine in enumerate(assign_writers(held)) for position in mine]
    assert sorted(written) == sorted({piece.name for rank in held for piece in rank})


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 4))
def test_fully_replicated_pieces_are_balanced_within_the_largest_piece(sizes, ranks):
    held = [[HeldPiece(f"t{n}", Box((0,), (1,)), size) for n, size in enumerate(sizes)]] * ranks
    loads = [sum(held[0][position].nbytes for position in mine) for mine in assign_writers(held)]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@settings(max_examples=50)
@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.sampled_from([0, 1]), st.data()
)
def test_split_parameters_and_their_flat_shards_cover_the_logical_tensor(size, part, other, blocks, padding, dim, data):
    padding = min(padding, size * part - 1) if blocks == 1 else 0
    full = [0, 0]
    full[dim], full[1 - dim] = blocks * size * part, other
    value = torch.arange(math.prod(full)).reshape(full)
    logical = list(full)
    logical[dim] -= padding
    pieces = []
    for rank in range(size):
        local = torch.cat([value.narrow(dim, (b * size + rank) * part, part) for b in range(blocks)], dim)
        where = placements(tuple(local.shape), tuple(logical), dim, rank, size, blocks)
        own = placed_pieces(where, local)
        cut = data.draw(st.integers(0, local.numel()))
        flat = local.reshape(-1)
        shards = [placed_flat_pieces(where, local.shape, s, flat[s:e]) for s, e in ((0, cut), (cut, local.numel()))]
        assert sum(p.box.numel for shard in shards for p in shard) == sum(p.box.numel for p in own)
        for group in (own, *shards):
            for piece in group:
                assert torch.equal(piece.data, value[piece.box.slices()])
        pieces += own
    assert cover_problem(logical, [piece.box for piece in pieces]) is None


def test_unsplit_parameter_lies_at_the_origin_without_its_padding():
    box = Box((0, 0), (101, 4))
    assert placements((104, 4), (101, 4), None, 0, 1) == (Placement(box, box),)
