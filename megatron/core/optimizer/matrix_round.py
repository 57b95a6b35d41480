"""MatrixRound: whole matrices out of shards for one step of Muon, each orthogonalised once in the group that shares it.

    rank 0   A[:4] B[:2]       all-to-all     A[:4] A[4:]   orthogonalise A    all-to-all    A[:4] B[:2]
    rank 1   A[4:] B[2:]       -------->      B[:2] B[2:]   orthogonalise B    -------->     A[4:] B[2:]

Momentum and main params stay in the shards. The owner sees the same matrix in every layout, so the update has the same bits.
Where tensor parallelism splits a matrix and muon_tp_mode is duplicated, the owners of its parts gather it among themselves.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core import collectives
from megatron.core.collectives import Group
from megatron.core.dist_checkpointing.mapping import logical_shape, param_placements
from megatron.core.distributed.param_layout import Range
from megatron.core.optimizer.matrix_owners import assign_owners, orthogonalization_cost
from megatron.core.optimizer.muon import Muon
from megatron.core.param_meta import param_meta


@dataclasses.dataclass(eq=False)
class SharedMatrix:
    """A parameter [rows, cols] (the local part under tensor parallelism) whose state is spread over a group.

    held: for each rank of the group, which elements of the flattened parameter it keeps (maybe none). main, grad, momentum: this
    rank's, 1-D, of these elements. group: parameter group. tp_group: ranks among which the matrix is to be made whole; None =
    it is orthogonalised as it is.
    """

    param: torch.nn.Parameter
    held: tuple[Range, ...]
    main: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    group: dict[str, Any]
    tp_group: Group = None

    @property
    def cost(self) -> int:
        """Relative cost of orthogonalising it."""
        return orthogonalization_cost(*self.whole_shape)

    @property
    def whole_shape(self) -> tuple[int, int]:
        """Shape of what is orthogonalised."""
        rows, cols = logical_shape(self.param, collectives.group_size(self.tp_group)) if self.tp_group else self.param.shape
        return rows, cols


class MatrixRound:
    """Some matrices (at least one) and their owners. `start`, then other work, then `finish`; all ranks of `group` alike.

    group: ranks that share the matrices; None = this process keeps all of them whole.
    """

    def __init__(self, rule: Muon, matrices: Sequence[SharedMatrix], group: Group) -> None:
        self.rule, self.matrices, self.group = rule, list(matrices), group
        self.size, self.rank = collectives.group_size(group), collectives.group_rank(group)
        self.owners = assign_owners([matrix.cost for matrix in self.matrices], self.size)
        self._owned = [matrix for matrix, owner in zip(self.matrices, self.owners, strict=True) if owner == self.rank]
        self._moving: _Exchange | None = None

    def start(self, divisor: float) -> None:
        """Update the momenta and send them off. Gradients are divided by `divisor` first."""
        assert self._moving is None
        grads, momenta = [m.grad for m in self.matrices], [m.momentum for m in self.matrices]
        parts = self.rule.directions(grads, momenta, divisor)
        outgoing = [self._of_owner(parts, owner) for owner in range(self.size)]
        lengths = [[matrix.held[peer].size for matrix in self._owned] for peer in range(self.size)]
        self._moving = _Exchange(outgoing, lengths, self.matrices[0].main, self.group)

    def finish(self) -> None:
        """Orthogonalise the owned matrices, send the updates back and take the step."""
        assert self._moving is not None
        wholes = [torch.cat(parts) for parts in zip(*self._moving.wait(), strict=True)]
        self._moving = None
        updates = self._orthogonalized(wholes)
        outgoing = [
            [update[matrix.held[peer].slice()] for matrix, update in zip(self._owned, updates, strict=True)]
            for peer in range(self.size)
        ]
        lengths = [
            [matrix.held[self.rank].size for matrix in self._of_owner(self.matrices, owner)] for owner in range(self.size)
        ]
        returned = [iter(parts) for parts in _Exchange(outgoing, lengths, self.matrices[0].main, self.group).wait()]
        self._apply([next(returned[owner]) for owner in self.owners])

    def _of_owner(self, values: Sequence[Any], owner: int) -> list[Any]:
        return [value for value, its in zip(values, self.owners, strict=True) if its == owner]

    def _apply(self, updates: Sequence[torch.Tensor]) -> None:
        groups = {id(matrix.group): matrix.group for matrix in self.matrices}
        for key, group in groups.items():
            members = [(m.main, u) for m, u in zip(self.matrices, updates, strict=True) if id(m.group) == key]
            self.rule.apply([main for main, _ in members], [update for _, update in members], group)

    def _orthogonalized(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Flat updates of the owned matrices (local parts)."""
        wholes = self._gathered_over_tp(flats)
        updates = []
        for matrix, whole in zip(self._owned, wholes, strict=True):
            update = self.rule.orthogonalize(whole, param_meta(matrix.param).qkv_rows)
            updates.append(_own_part(matrix, update).reshape(-1))
        return updates

    def _gathered_over_tp(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The matrices in the shape in which they are orthogonalised; one gather per tensor-parallel group."""
        wholes = [flat.view(matrix.param.shape) for matrix, flat in zip(self._owned, flats, strict=True)]
        groups = {id(matrix.tp_group): matrix.tp_group for matrix in self._owned if matrix.tp_group is not None}
        for key, group in groups.items():
            members = [index for index, matrix in enumerate(self._owned) if id(matrix.tp_group) == key]
            local, size = torch.cat([flats[index] for index in members]), collectives.group_size(group)
            gathered = local.new_empty(size * local.numel())
            collectives.all_gather(gathered, local, group)
            by_rank = [part.split([flats[index].numel() for index in members]) for part in gathered.view(size, -1)]
            for position, index in enumerate(members):
                matrix = self._owned[index]
                wholes[index] = local.new_zeros(matrix.whole_shape)
                for tp_rank in range(size):
                    part = by_rank[tp_rank][position].view(matrix.param.shape)
                    for place in param_placements(matrix.param, tp_rank, size):
                        wholes[index][place.logical.slices()] = part[place.local.slices()]
        return wholes


def _own_part(matrix: SharedMatrix, whole: torch.Tensor) -> torch.Tensor:
    """What of the whole matrix is this tensor-parallel rank's."""
    if matrix.tp_group is None:
        return whole
    part = whole.new_zeros(matrix.param.shape)
    for place in param_placements(matrix.param, collectives.group_rank(matrix.tp_group), collectives.group_size(matrix.tp_group)):
        part[place.local.slices()] = whole[place.logical.slices()]
    return part


class _Exchange:
    """One all-to-all of messages made of pieces.

    outgoing: pieces for each rank, 1-D. lengths: of the pieces that come from each rank. like: a tensor of their dtype and device.
    """

    def __init__(
        self, outgoing: Sequence[Sequence[torch.Tensor]], lengths: Sequence[Sequence[int]], like: torch.Tensor, group: Group
    ) -> None:
        pieces = [piece for message in outgoing for piece in message]
        self.lengths, self.received = lengths, [sum(message) for message in lengths]
        sent = [sum(piece.numel() for piece in message) for message in outgoing]
        self.output = like.new_empty(sum(self.received))
        source = torch.cat(pieces) if pieces else like.new_empty(0)
        self.work = collectives.all_to_all(self.output, source, self.received, sent, group, async_op=True)

    def wait(self) -> list[list[torch.Tensor]]:
        """The pieces from each rank."""
        assert self.work is not None
        self.work.wait()
        messages = self.output.split(self.received)
        return [list(message.split(list(sizes))) for message, sizes in zip(messages, self.lengths, strict=True)]
