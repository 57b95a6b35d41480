"""Records of a run as parts of logical tensors: what a rank saw of a step, and the whole that all ranks' parts make.

    kind         name                         logical shape
    initial      a parameter or buffer        its own
    activation   a part of the model          [samples of the global batch, sequence, hidden]; losses of tokens [samples, sequence]
    loss         lm loss                      []
    gradient     a parameter                  its own; before clipping
    norm         grad norm                    []
    weight       a parameter                  its own; main params right after the update
    final        a parameter or buffer        its own; the model's copies after the last step
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

KINDS = ("initial", "activation", "loss", "gradient", "norm", "weight", "final")


@dataclasses.dataclass(frozen=True)
class Part:
    """One box of a logical tensor. order: position in the model, in forward order; offset: of `data` in the logical tensor."""

    kind: str
    name: str
    order: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: torch.Tensor


@dataclasses.dataclass(frozen=True)
class RankStep:
    """What one rank saw of one step; step 0 is the start."""

    step: int
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class ReplicaProblem:
    """A rank that holds other numbers than another rank that should hold the same. difference: relative to the largest number."""

    kind: str
    name: str
    rank: int
    difference: float


@dataclasses.dataclass(frozen=True)
class Logical:
    """A whole logical tensor."""

    order: int
    data: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Step:
    """All ranks' parts of one step, merged. tensors: by (kind, name)."""

    step: int
    tensors: dict[tuple[str, str], Logical]
    replicas: tuple[ReplicaProblem, ...]

    def of_kind(self, kind: str) -> dict[str, torch.Tensor]:
        """The tensors of one kind by name."""
        return {name: logical.data for (own, name), logical in self.tensors.items() if own == kind}


def merge(ranks: Sequence[RankStep]) -> Step:
    """One step from every rank's parts, in rank order. Raises AssertionError where the parts leave a hole."""
    whole: dict[tuple[str, str], torch.Tensor] = {}
    filled: dict[tuple[str, str], torch.Tensor] = {}
    order: dict[tuple[str, str], int] = {}
    problems = []
    for rank, record in enumerate(ranks):
        for part in record.parts:
            key = part.kind, part.name
            target = whole.setdefault(key, torch.zeros(part.shape, dtype=part.data.dtype))
            seen = filled.setdefault(key, torch.zeros(part.shape, dtype=torch.bool))
            assert target.shape == part.shape, f"ranks disagree on the shape of {part.name}"
            order[key] = min(order.get(key, part.order), part.order)
            box = tuple(slice(start, start + size) for start, size in zip(part.offset, part.data.shape, strict=True))
            here, before = seen[box], target[box]
            gap = difference(before[here], part.data[here])
            if gap:
                problems.append(ReplicaProblem(*key, rank, gap))
            target[box] = torch.where(here, before, part.data)
            seen[box] = True
    for key, seen in filled.items():
        assert seen.all(), f"nobody holds all of {key[0]} {key[1]}"
    tensors = {key: Logical(order[key], tensor) for key, tensor in whole.items()}
    return Step(ranks[0].step, tensors, tuple(problems))


def difference(a: torch.Tensor, b: torch.Tensor, floor: float = 0.0) -> float:
    """Largest |a - b| relative to the largest |a| (at least `floor`); 0 for equal bits, inf where only one is finite."""
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    wide, other = a.double(), b.double()
    gap = torch.where((wide == other) | (wide.isnan() & other.isnan()), torch.zeros_like(wide), (wide - other).abs())
    largest = float(gap.max())
    if largest == 0.0:
        return 0.0
    scale = max(float(wide[wide.isfinite()].abs().max()) if wide.isfinite().any() else 0.0, floor)
    return largest / scale if scale and largest < float("inf") else float("inf")


# Files: one per rank and step, so that a run of any size is compared step by step


def write_step(folder: pathlib.Path, rank: int, record: RankStep) -> None:
    """Write what a rank saw of a step."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = [dataclasses.astuple(dataclasses.replace(part, data=torch.empty(0)))[:-1] for part in record.parts]
    content: dict[str, Any] = {"step": record.step, "fields": fields, "data": [part.data for part in record.parts]}
    torch.save(content, folder / _file_name(record.step, rank))


def read_step(folder: pathlib.Path, step: int, ranks: int) -> Step:
    """Read and merge all ranks' files of a step."""
    return merge([_read(folder / _file_name(step, rank)) for rank in range(ranks)])


def _read(path: pathlib.Path) -> RankStep:
    content = torch.load(path, weights_only=True)
    parts = (Part(*(*fields, data)) for fields, data in zip(content["fields"], content["data"], strict=True))
    return RankStep(content["step"], tuple(parts))


def _file_name(step: int, rank: int) -> str:
    return f"step{step}.rank{rank}.pt"


def scalar(kind: str, name: str, value: float) -> Part:
    """A number that all ranks know."""
    return Part(kind, name, 0, (), (), torch.tensor(value, dtype=torch.float64))


def boxes(kind: str, name: str, order: int, shape: tuple[int, ...], pieces: Iterable[Any]) -> list[Part]:
    """Parts of `ShardedTensor` pieces, copied."""
    return [Part(kind, name, order, shape, piece.box.offset, piece.shaped().cpu().clone()) for piece in pieces]
