"""Optimizer state as logical tensors: which boxes of them a flat shard is, and the gather to data-parallel rank 0.

    parameter [6, 4] on tp rank 1 of 2, split along dim 0        logical [11, 4] (12 rows, the last is vocabulary padding)
    shard = flat elements [5, 15) of it                          boxes in rows 6 + (1, 2, 3)
"""

import dataclasses
from collections.abc import Mapping

import torch

from megatron.core import collectives
from megatron.core.collectives import Group
from megatron.core.dist_checkpointing.mapping import ShardedTensor, logical_shape, param_placements, placed_flat_pieces


@dataclasses.dataclass(frozen=True)
class Replication:
    """Where a rank's part lies: position on the tensor-parallel axis, and how many ranks hold the same part."""

    tp_rank: int = 0
    tp_size: int = 1
    replicas: int = 1
    replica_index: int = 0


def logical_tensor(
    name: str, param: torch.nn.Parameter, start: int, data: torch.Tensor, replication: Replication
) -> ShardedTensor:
    """A value that belongs to elements [start, start + len(data)) of a local parameter, as part of the logical tensor.

    data: 1-D; the pieces are views of it. Elements in vocabulary padding belong to no piece.
    """
    where = param_placements(param, replication.tp_rank, replication.tp_size)
    pieces = placed_flat_pieces(where, tuple(param.shape), start, data)
    return ShardedTensor(
        name, logical_shape(param, replication.tp_size), pieces, replication.replicas, replication.replica_index
    )


def gather_flat(shard: torch.Tensor, group: Group) -> torch.Tensor | None:
    """A bucket's flat tensor from all shards, on the group's rank 0 (a collective); None on the others."""
    parts = collectives.gather_to(shard.contiguous(), group)
    return None if parts is None else torch.cat(parts)


def scatter_flat(whole: torch.Tensor | None, shard: torch.Tensor, group: Group) -> None:
    """Inverse of `gather_flat`: fills `shard` on every rank from rank 0's flat tensor (a collective)."""
    size = collectives.group_size(group)
    parts = None if whole is None else [part.contiguous() for part in whole.view(size, -1)]
    received = torch.empty_like(shard)
    collectives.scatter_from(parts, received, group)
    shard.copy_(received)


def cut_params(
    flat: torch.Tensor, ranges: Mapping[str, tuple[int, torch.Size]], bucket_offset: int
) -> dict[str, torch.Tensor]:
    """Each parameter's part of a bucket's flat tensor, in its own shape (views). ranges: name -> (start in buffer, shape)."""
    return {
        name: flat[start - bucket_offset : start - bucket_offset + shape.numel()].view(shape)
        for name, (start, shape) in ranges.items()
    }
