"""Toy state for the checkpoint tests: logical tensors with values known from their names, cut in any way over ranks."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.mapping import Box, Piece, ShardedTensor, flat_range_pieces, whole
from megatron.core.dist_checkpointing.store import CheckpointStore

SHAPES = {"model.a": (5, 6), "model.b": (7,), "model.scale": (), "optimizer.exp_avg.a": (5, 6), "optimizer.exp_avg.b": (7,)}


def logical(name: str, shape: Sequence[int], iteration: int) -> torch.Tensor:
    """The value of a logical tensor at a step: different for every name, element and step."""
    start = sum(name.encode()) * 1000.0 + iteration * 1e6
    return torch.arange(math.prod(shape), dtype=torch.float32).add_(start).reshape(tuple(shape))


def flat_shard(name: str, shape: Sequence[int], rank: int, size: int, value: torch.Tensor) -> ShardedTensor:
    """Rank's part of a tensor that is cut flat into `size` almost equal ranges, as the distributed optimizer does."""
    total = math.prod(shape)
    start, end = (total * r // size for r in (rank, rank + 1))
    data = value.reshape(-1)[start:end].clone()
    return ShardedTensor(name, tuple(shape), flat_range_pieces(shape, start, data))


def rank_state(rank: int, size: int, iteration: int, *, filled: bool = True) -> list[ShardedTensor]:
    """A data-parallel rank's state: model replicated, optimizer cut flat, random state of its own; zeros if not `filled`."""
    tensors = []
    for name, shape in SHAPES.items():
        value = logical(name, shape, iteration) if filled else torch.zeros(shape)
        if name.startswith("model."):
            tensors.append(whole(name, value.clone(), replicas=size, replica_index=rank))
        else:
            tensors.append(flat_shard(name, shape, rank, size, value))
    rng = torch.full((9,), rank + iteration, dtype=torch.uint8) if filled else torch.zeros(9, dtype=torch.uint8)
    return [*tensors, whole(f"rng.rank{rank:05d}.cpu", rng)]


def assert_holds(tensors: Sequence[ShardedTensor], iteration: int) -> None:
    """Every piece has the logical value of the step."""
    for tensor in tensors:
        for piece in tensor.pieces:
            if tensor.name.startswith("rng."):
                assert piece.data.unique().tolist() == [int(tensor.name[8:13]) + iteration], tensor.name
            else:
                expected = logical(tensor.name, tensor.global_shape, iteration)[piece.box.slices()]
                assert torch.equal(piece.data, expected), (tensor.name, piece.box)


def save_alone(directory: Path, iteration: int, **options: int) -> CheckpointStore:
    """One process saves the toy state of a step."""
    store = CheckpointStore(directory, **options)
    store.save(iteration, rank_state(0, 1, iteration), {"step": iteration})
    return store


def load_alone(directory: Path, iteration: int) -> None:
    """One process loads a step and checks every value."""
    tensors = rank_state(0, 1, iteration, filled=False)
    CheckpointStore(directory).load(iteration, tensors)
    assert_holds(tensors, iteration)


def box_piece(value: torch.Tensor, box: Box) -> Piece:
    """A piece with its own copy of a region of `value`."""
    return Piece(box, value[box.slices()].clone())
