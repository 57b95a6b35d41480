"""Which part of each parameter a rank's shard of a bucket holds. Pure arithmetic.

    buffer       0 ....... 128 ........ 256 ......... 384
    parameter p        [ 100 ------------------ 300 )
    bucket at 128            [ 128 ---------------------- 384 )
    shard 1 of 2                          [ 256 -------- 384 )

    gbuf_world            [256, 300)    in the buffer
    gbuf_world_in_bucket  [128, 172)    in the bucket
    gbuf_local            [0, 44)       in the shard
    param                 [156, 200)    in the flattened parameter

(The names are Megatron's. A parameter of a real layout never crosses buckets; the arithmetic doesn't care.)
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from megatron.core.distributed.param_layout import SHARD_ALIGNMENT, Range

Key = TypeVar("Key", bound=Hashable)


def build_shard_map(
    param_index_map: Mapping[Key, tuple[int, int, int]], shard: Range, bucket_offset: int
) -> dict[Key, dict[str, Range]]:
    """The four ranges of each parameter that the shard holds a part of; the others are left out.

    Args:
        param_index_map: parameter -> (start, end, bucket id), in buffer coordinates.
        shard: in buffer coordinates.
        bucket_offset: start of the shard's bucket in the buffer.
    """
    shard_map = {}
    for param, (start, end, _) in param_index_map.items():
        held = shard.intersection(Range(start, end))
        if held.size:
            shard_map[param] = {
                "gbuf_world": held,
                "gbuf_world_in_bucket": held.shifted(-bucket_offset),
                "gbuf_local": held.shifted(-shard.start),
                "param": held.shifted(-start),
            }
    return shard_map


def pack_states(
    held: Mapping[Key, Range], names: Mapping[Key, Sequence[str]]
) -> tuple[dict[Key, dict[str, Range]], dict[str, int]]:
    """Where the states of a shard's parameters lie if not all parameters have the same ones: one after the other, by name.

    Args:
        held: parameter -> the part of it that the shard holds. names: parameter -> its states' names.

    Returns each parameter's ranges by name and the elements of each name's flat tensor; a part begins at a multiple of 32.
    """
    sizes: dict[str, int] = {}
    places: dict[Key, dict[str, Range]] = {}
    for param, part in held.items():
        places[param] = {}
        for name in names[param]:
            start = sizes.get(name, 0)
            places[param][name] = Range(start, start + part.size)
            sizes[name] = start + -(-part.size // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
    return places, sizes
