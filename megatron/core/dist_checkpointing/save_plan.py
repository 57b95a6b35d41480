"""Save plan: from what every rank holds, which rank writes which piece into which file. Pure; every rank computes the same."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from megatron.core.dist_checkpointing.manifest import FileEntry, PieceEntry, TensorEntry
from megatron.core.dist_checkpointing.mapping import Box
from megatron.core.dist_checkpointing.reshard import HeldPiece, assign_writers, cover_problem, describe
from megatron.core.dist_checkpointing.serialization import WrittenFile, item_size


@dataclasses.dataclass(frozen=True)
class HeldTensor:
    """A rank's part of a logical tensor without its data. dtype: the file format's name; None when the rank holds no piece."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    boxes: tuple[Box, ...]


@dataclasses.dataclass(frozen=True)
class PlannedPiece:
    """One piece of a file. position: (tensor, box) position in the writer's own list; key: its name in the file."""

    name: str
    key: str
    box: Box
    position: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class SavePlan:
    """dtype and shape of every logical tensor, aliases, and per rank the pieces it writes. problems: why it cannot be saved."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    aliases: Mapping[str, str]
    pieces: Sequence[Sequence[PlannedPiece]]
    problems: Sequence[str]


def rank_file(rank: int) -> str:
    """Name of a rank's data file."""
    return f"rank_{rank:05d}.safetensors"


def plan_save(held: Sequence[Sequence[HeldTensor]], aliases: Mapping[str, str]) -> SavePlan:
    """Assign writers and check that the pieces of all ranks cover every logical tensor exactly once.

    Args:
        held: for each rank its tensors. Equal boxes on several ranks are replicas and written once.
        aliases: further name -> name of a saved tensor with the same values.
    """
    problems: list[str] = []
    tensors = _agree(held, problems)
    flat = [[(t, b) for t, tensor in enumerate(rank) for b in range(len(tensor.boxes))] for rank in held]
    pieces = [
        [HeldPiece(rank[t].name, rank[t].boxes[b], _nbytes(rank[t], b)) for t, b in positions]
        for rank, positions in zip(held, flat, strict=True)
    ]
    planned = []
    for rank, positions, chosen in zip(held, flat, assign_writers(pieces), strict=True):
        mine = [(positions[index], rank[positions[index][0]]) for index in chosen]
        planned.append([_planned(tensor, at, tensors[tensor.name][1]) for at, tensor in mine])
    problems += _cover_problems(tensors, planned)
    for alias, base in aliases.items():
        if base not in tensors or alias in tensors:
            problems.append(f"{alias} cannot be an alias of {base}: {'it is saved itself' if alias in tensors else 'which is not saved'}")
    return SavePlan(tensors, aliases, planned, problems)


def _agree(held: Sequence[Sequence[HeldTensor]], problems: list[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of each name; a disagreement between ranks or a name used twice on one rank is a problem."""
    found: dict[str, tuple[str | None, tuple[int, ...]]] = {}
    for rank, tensors in enumerate(held):
        if len({tensor.name for tensor in tensors}) < len(tensors):
            problems.append(f"rank {rank} passed a tensor name twice")
        for tensor in tensors:
            dtype, shape = found.get(tensor.name, (None, tensor.shape))
            if shape != tensor.shape or (None not in (dtype, tensor.dtype) and dtype != tensor.dtype):
                problems.append(
                    f"tensor {tensor.name}: rank {rank} has {tensor.dtype} {list(tensor.shape)}, another rank {dtype} {list(shape)}"
                )
            found[tensor.name] = (dtype or tensor.dtype, shape)
    return {name: (dtype or "F32", shape) for name, (dtype, shape) in sorted(found.items())}


def _nbytes(tensor: HeldTensor, box: int) -> int:
    return tensor.boxes[box].numel * (item_size(tensor.dtype) if tensor.dtype else 0)


def _planned(tensor: HeldTensor, position: tuple[int, int], shape: tuple[int, ...]) -> PlannedPiece:
    box = tensor.boxes[position[1]]
    key = tensor.name if box.shape == shape else f"{tensor.name}{describe(box)}"
    return PlannedPiece(tensor.name, key, box, position)


def _cover_problems(tensors: Mapping[str, tuple[str, tuple[int, ...]]], planned: Sequence[Sequence[PlannedPiece]]) -> list[str]:
    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    for rank in planned:
        for piece in rank:
            boxes[piece.name].append(piece.box)
    found = ((name, cover_problem(tensors[name][1], boxes[name])) for name in tensors)
    return [f"tensor {name}: {problem}" for name, problem in found if problem is not None]


def manifest_entries(
    plan: SavePlan, written: Sequence[WrittenFile | None]
) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
    """Files and tensors of the manifest, from the plan and what each rank wrote (None: a rank without pieces)."""
    files, pieces = {}, {name: list[PieceEntry]() for name in plan.tensors}
    for rank, (file, planned) in enumerate(zip(written, plan.pieces, strict=True)):
        if file is None:
            continue
        files[rank_file(rank)] = FileEntry(file.bytes, file.sha256, file.header_crc32)
        for piece in planned:
            pieces[piece.name].append(PieceEntry(rank_file(rank), piece.key, piece.box, file.checksums[piece.key]))
    tensors = {name: TensorEntry(dtype, shape, tuple(pieces[name])) for name, (dtype, shape) in plan.tensors.items()}
    for alias, base in plan.aliases.items():
        tensors[alias] = TensorEntry(*plan.tensors[base], alias_of=base)
    return files, tensors


def bytes_of(plan: SavePlan) -> int:
    """Size of all tensor data of the plan."""
    return sum(math.prod(shape) * item_size(dtype) for dtype, shape in plan.tensors.values())
