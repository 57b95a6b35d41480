"""Where each parameter lies in the flat buffers: buffer, bucket, offset, padding, shard. Pure arithmetic.

Parameters are laid out in reverse registration order, since that is roughly the order in which the backward finishes their
gradients. A bucket ends as soon as it holds `bucket_size` elements; rank r of d owns the r-th of its d equal parts.

    registered    embedding  layer0  layer1  head
    buffer        | head        layer1 . . | layer0       embedding . |     . = padding
    bucket        |<------- bucket 0 ----->|<------- bucket 1 ------->|
    shards, d=2   |  rank 0   |   rank 1   |   rank 0    |   rank 1   |

A parameter starts at a multiple of 64 elements (128 bytes in 16 bit) and a shard at a multiple of 32, so that vector kernels
treat each element alike wherever a shard begins. Gaps are never written and stay zero.
"""

import dataclasses
import math
from collections.abc import Sequence

PARAM_ALIGNMENT = 64  # elements
SHARD_ALIGNMENT = 32  # elements
BUCKET_ALIGNMENT = 128  # elements


@dataclasses.dataclass(frozen=True)
class Range:
    """Half-open range of elements [start, end)."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.end - self.start

    def normalize(self, start: int = 0) -> "Range":
        """The range of the same size that begins at `start`."""
        return Range(start, start + self.size)

    def shifted(self, offset: int) -> "Range":
        """The range moved by `offset`."""
        return Range(self.start + offset, self.end + offset)

    def intersection(self, other: "Range") -> "Range":
        """The common elements; of size 0 if there are none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.end, other.end)))

    def slice(self) -> slice:
        """As an index."""
        return slice(self.start, self.end)

    def __len__(self) -> int:
        return self.size

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What the layout needs to know of a parameter.

    own_bucket: no other parameter shares its bucket (tied embeddings, whose gradient is also summed across stages: the shards
    of both copies must then lie alike).
    """

    name: str
    numel: int
    own_bucket: bool = False


@dataclasses.dataclass(frozen=True)
class BucketLayout:
    """A bucket: `range` in the buffer (end padding included) and its parameters' indices, in buffer order."""

    index: int
    range: Range
    params: tuple[int, ...]
    numel_unpadded: int

    def shard(self, rank: int, size: int) -> Range:
        """The part of the buffer that rank `rank` of `size` owns."""
        assert self.range.size % size == 0, (self.range, size)
        length = self.range.size // size
        return Range(self.range.start + rank * length, self.range.start + (rank + 1) * length)


@dataclasses.dataclass(frozen=True)
class BufferLayout:
    """A buffer. `params[i]` is the range of the i-th registered parameter, `bucket_of[i]` its bucket."""

    specs: tuple[ParamSpec, ...]
    params: tuple[Range, ...]
    bucket_of: tuple[int, ...]
    buckets: tuple[BucketLayout, ...]

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1].range.end if self.buckets else 0

    @property
    def numel_unpadded(self) -> int:
        """Elements of parameters."""
        return sum(spec.numel for spec in self.specs)


def bucket_multiple(shards: int) -> int:
    """What a bucket's size is a multiple of: lcm(shards, 128), and enough for aligned shards."""
    return math.lcm(shards * SHARD_ALIGNMENT, BUCKET_ALIGNMENT)


def plan_buffer(specs: Sequence[ParamSpec], bucket_size: int | None, shards: int) -> BufferLayout:
    """Lay out parameters of one dtype.

    Args:
        specs: in registration order.
        bucket_size: elements after which a bucket ends; None = one bucket.
        shards: ranks that share each bucket; 1 = not shared.
    """
    multiple = bucket_multiple(shards) if shards > 1 else PARAM_ALIGNMENT
    ranges, bucket_of = [Range(0, 0)] * len(specs), [0] * len(specs)
    buckets: list[BucketLayout] = []
    bucket: list[int] = []
    bucket_start = cursor = 0

    def close() -> None:
        nonlocal bucket, bucket_start, cursor
        cursor = _round_up(cursor, multiple)
        numel = sum(specs[index].numel for index in bucket)
        buckets.append(BucketLayout(len(buckets), Range(bucket_start, cursor), tuple(bucket), numel))
        bucket, bucket_start = [], cursor

    for index in reversed(range(len(specs))):
        spec = specs[index]
        if spec.own_bucket and bucket:
            close()
        start = _round_up(cursor, PARAM_ALIGNMENT)
        cursor = start + spec.numel
        ranges[index], bucket_of[index] = Range(start, cursor), len(buckets)
        bucket.append(index)
        if spec.own_bucket or (bucket_size is not None and cursor - bucket_start >= bucket_size):
            close()
    if bucket:
        close()
    return BufferLayout(tuple(specs), tuple(ranges), tuple(bucket_of), tuple(buckets))


def default_bucket_size(data_parallel_size: int) -> int:
    """Elements per bucket without an option: larger for more ranks, so that each message stays large."""
    return max(40_000_000, 1_000_000 * data_parallel_size)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
