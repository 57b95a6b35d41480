"""Layout and shard arithmetic: properties of any model, bucket size and group size."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.param_layout import (
    PARAM_ALIGNMENT,
    ParamSpec,
    Range,
    bucket_multiple,
    default_bucket_size,
    plan_buffer,
)
from megatron.core.optimizer.shard_map import build_shard_map

specs = st.lists(st.tuples(st.integers(0, 700), st.booleans()), max_size=12).map(
    lambda items: [ParamSpec(f"p{index}", numel, own) for index, (numel, own) in enumerate(items)]
)
sizes = st.one_of(st.integers(1, 9), st.integers(10, 1100))  # the large ones exceed many a model's elements
bucket_sizes = st.one_of(st.none(), st.integers(1, 3000))


@given(specs, bucket_sizes, sizes)
def test_parameters_lie_in_reverse_order_without_overlap_and_aligned(specs, bucket_size, size):
    layout = plan_buffer(specs, bucket_size, size)
    cursor = 0
    for index in reversed(range(len(specs))):
        held = layout.params[index]
        assert held.size == specs[index].numel
        assert held.start >= cursor
        assert held.start % 64 == 0
        bucket = layout.buckets[layout.bucket_of[index]]
        assert held.size == 0 or held.intersection(bucket.range) == held
        assert index in bucket.params
        cursor = held.end
    assert layout.numel_unpadded == sum(spec.numel for spec in specs) <= layout.numel


@given(specs, bucket_sizes, sizes)
def test_buckets_tile_the_buffer_and_end_when_full(specs, bucket_size, size):
    layout = plan_buffer(specs, bucket_size, size)
    cursor = 0
    for position, bucket in enumerate(layout.buckets):
        assert (bucket.index, bucket.range.start) == (position, cursor)
        cursor = bucket.range.end
        assert size == 1 or bucket.range.size % math.lcm(size, 128) == 0
        assert bucket.numel_unpadded == sum(specs[index].numel for index in bucket.params)
        own = [index for index in bucket.params if specs[index].own_bucket]
        assert not own or len(bucket.params) == 1
        if bucket_size is not None:  # without its last parameter it was not full yet
            before_last = [layout.params[index] for index in bucket.params[:-1]]
            assert not before_last or before_last[-1].end - bucket.range.start < bucket_size
    assert cursor == layout.numel


@given(specs, bucket_sizes, sizes)
def test_padding_stays_below_the_stated_bound(specs, bucket_size, size):
    layout = plan_buffer(specs, bucket_size, size)
    unit = bucket_multiple(size) if size > 1 else PARAM_ALIGNMENT
    between = sum(PARAM_ALIGNMENT - 1 for bucket in layout.buckets for _ in bucket.params[1:])
    assert layout.numel - layout.numel_unpadded <= between + len(layout.buckets) * (unit - 1)
    if bucket_size == 1:  # every parameter with elements has its own bucket
        assert all(sum(specs[index].numel > 0 for index in bucket.params) <= 1 for bucket in layout.buckets)


@settings(max_examples=200, deadline=None)
@given(specs, bucket_sizes, st.one_of(st.integers(1, 9), st.integers(10, 40)))
def test_shards_cover_each_element_once_and_ranges_map_back(specs, bucket_size, size):
    layout = plan_buffer(specs, bucket_size, size)
    index_map = {i: (held.start, held.end, layout.bucket_of[i]) for i, held in enumerate(layout.params)}
    covered = {index: [] for index in index_map}
    for bucket in layout.buckets:
        own = {index: index_map[index] for index in bucket.params}
        for rank in range(size):
            shard = bucket.shard(rank, size)
            assert size == 1 or shard.start % 32 == 0
            for index, ranges in build_shard_map(own, shard, bucket.range.start).items():
                part = ranges["param"]
                covered[index].append(part)
                assert len({held.size for held in ranges.values()}) == 1
                assert ranges["gbuf_world"] == part.shifted(layout.params[index].start)
                assert ranges["gbuf_world"] == ranges["gbuf_local"].shifted(shard.start)
                assert ranges["gbuf_world"] == ranges["gbuf_world_in_bucket"].shifted(bucket.range.start)
                assert 0 <= ranges["gbuf_local"].start < ranges["gbuf_local"].end <= shard.size
    for index, parts in covered.items():
        cursor = 0
        for part in sorted(parts, key=lambda held: held.start):
            assert part.start == cursor
            cursor = part.end
        assert cursor == specs[index].numel


def test_the_picture_of_the_shard_map():
    ranges = build_shard_map({"p": (100, 300, 0), "q": (300, 384, 0), "r": (0, 90, 0)}, Range(256, 384), 128)
    assert list(ranges) == ["p", "q"]
    assert {key: str(held) for key, held in ranges["p"].items()} == {
        "gbuf_world": "[256, 300)",
        "gbuf_world_in_bucket": "[128, 172)",
        "gbuf_local": "[0, 44)",
        "param": "[156, 200)",
    }


def test_a_tied_embedding_closes_the_bucket_before_it():
    layout = plan_buffer([ParamSpec("tied", 100, own_bucket=True), ParamSpec("a", 10), ParamSpec("b", 10)], None, 2)
    assert [bucket.params for bucket in layout.buckets] == [(2, 1), (0,)]


@pytest.mark.parametrize(("size", "expected"), [(1, 40_000_000), (40, 40_000_000), (64, 64_000_000)])
def test_default_bucket_size(size, expected):
    assert default_bucket_size(size) == expected


def test_range_is_half_open():
    held = Range(3, 7)
    assert (held.size, len(held), str(held), held.normalize(), held.normalize(2)) == (4, 4, "[3, 7)", Range(0, 4), Range(2, 6))
    assert held.intersection(Range(7, 9)).size == 0
