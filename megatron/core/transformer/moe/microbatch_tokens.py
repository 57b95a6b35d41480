"""MicrobatchTokens: which tokens of a microbatch a rank holds. What is defined over a microbatch is the same however it is cut."""

import dataclasses
import functools

import torch

from megatron.core import collectives
from megatron.core.collectives import Group


@dataclasses.dataclass(frozen=True)
class MicrobatchTokens:
    """A microbatch of `rows` sequences, cut over tensor and context parallelism.

    place: int64 [n], of each own token its position in its sequence x rows + its row: the same numbers in every layout.
    total: tokens of the whole microbatch. group: the ranks that share it (tp_cp).
    """

    place: torch.Tensor
    total: int
    rows: int
    group: Group

    @functools.cached_property
    def sequence(self) -> torch.Tensor:
        """int64 [n]: the row of each own token."""
        return self.place % self.rows

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place, without a gradient."""
        collectives.all_reduce(tensor, self.group)  # sum over tp_cp
        return tensor

    def whole(self, own: torch.Tensor, below: float) -> torch.Tensor:
        """own: [n, E], all above `below` -> [total, E] of the whole microbatch, by place, on every rank. Without a gradient."""
        whole = torch.full((self.total, own.size(1)), below, dtype=own.dtype, device=own.device)
        whole[self.place] = own
        collectives.all_reduce(whole, self.group, op="max")  # each row is one rank's
        return whole
