"""ProcessGroupCollection: every group a rank belongs to, in one frozen value that is passed to constructors."""

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Optional

import torch.distributed

from megatron.core.rank_grid import RankGrid

Group = Optional["torch.distributed.ProcessGroup"]


@dataclasses.dataclass(frozen=True)
class ProcessGroupCollection:
    """The groups of this rank; all None where torch.distributed is not initialised (one process, nothing to communicate).

    world: all ranks. tp, pp, cp, dp: the axes. dp_cp, tp_cp, tp_dp_cp, mp (tp x pp): products. ep, expt_tp, expt_dp, tp_ep,
    tp_ep_pp: the expert grid. embd: first and last stage; pos_embd: first stage. intra_dp_cp: data x context parallel ranks of one
    optimizer instance; inter_dist_opt: equal ranks of all instances.
    """

    world: Group = None
    tp: Group = None
    pp: Group = None
    cp: Group = None
    dp: Group = None
    dp_cp: Group = None
    tp_cp: Group = None
    tp_dp_cp: Group = None
    mp: Group = None
    ep: Group = None
    expt_tp: Group = None
    expt_dp: Group = None
    tp_ep: Group = None
    tp_ep_pp: Group = None
    embd: Group = None
    pos_embd: Group = None
    intra_dp_cp: Group = None
    inter_dist_opt: Group = None

    @staticmethod
    def single_process() -> "ProcessGroupCollection":
        """Every axis of size one."""
        return ProcessGroupCollection()

    @staticmethod
    def resolve(given: Optional["ProcessGroupCollection"]) -> "ProcessGroupCollection":
        """`given`; else what `initialize_model_parallel` installed; else a single process. The one global read in core."""
        if given is not None:
            return given
        return _installed if _installed is not None else ProcessGroupCollection.single_process()

    def size(self, name: str) -> int:
        """Number of ranks in a group; 1 for None."""
        group = getattr(self, name)
        return 1 if group is None else torch.distributed.get_world_size(group)

    def rank(self, name: str) -> int:
        """This rank's position in a group; 0 for None. A rank outside (a middle stage in `embd`) gets -1."""
        group = getattr(self, name)
        return 0 if group is None else torch.distributed.get_rank(group)


_installed: ProcessGroupCollection | None = None


def install(groups: ProcessGroupCollection | None) -> None:
    """Make `groups` what `resolve(None)` returns; None forgets them."""
    global _installed
    _installed = groups


def installed() -> ProcessGroupCollection | None:
    """What was installed, if anything."""
    return _installed


def create_process_groups(
    grid: RankGrid, *, optimizer_instances: int = 1, timeout: datetime.timedelta | None = None
) -> ProcessGroupCollection:
    """All groups of this rank on `grid`; a collective that every rank calls. Equal sets of ranks share one group.

    Without torch.distributed it returns `single_process()`; the grid must then have one rank.
    """
    if not torch.distributed.is_initialized():
        assert grid.world_size == 1, "more than one rank needs torch.distributed"
        return ProcessGroupCollection.single_process()
    maker = _GroupMaker(timeout)
    intra, inter = grid.optimizer_instance_groups(optimizer_instances)
    return ProcessGroupCollection(
        world=maker.make([list(range(grid.world_size))]),
        tp=maker.make(grid.groups("tp")),
        pp=maker.make(grid.groups("pp")),
        cp=maker.make(grid.groups("cp")),
        dp=maker.make(grid.groups("dp")),
        dp_cp=maker.make(grid.groups("dp-cp")),
        tp_cp=maker.make(grid.groups("tp-cp")),
        tp_dp_cp=maker.make(grid.groups("tp-dp-cp")),
        mp=maker.make(grid.groups("tp-pp")),
        ep=maker.make(grid.groups("ep", expert=True)),
        expt_tp=maker.make(grid.groups("tp", expert=True)),
        expt_dp=maker.make(grid.groups("dp", expert=True)),
        tp_ep=maker.make(grid.groups("tp-ep", expert=True)),
        tp_ep_pp=maker.make(grid.groups("tp-ep-pp", expert=True)),
        embd=maker.make(grid.embedding_groups()),
        pos_embd=maker.make(grid.position_embedding_groups()),
        intra_dp_cp=maker.make(intra),
        inter_dist_opt=maker.make(inter),
    )


class _GroupMaker:
    """Creates each distinct set of ranks once; every rank walks the same list, as new_group demands."""

    def __init__(self, timeout: datetime.timedelta | None) -> None:
        self.timeout = timeout
        self.rank = torch.distributed.get_rank()
        everyone = tuple(range(torch.distributed.get_world_size()))
        self.made: dict[tuple[int, ...], Group] = {everyone: torch.distributed.group.WORLD}

    def make(self, groups: Sequence[Sequence[int]]) -> Group:
        """This rank's group among `groups`; None if it is in none of them."""
        own: Group = None
        for ranks in groups:
            key = tuple(ranks)
            if key not in self.made:
                self.made[key] = self._new(key)
            if self.rank in key:
                own = self.made[key]
        return own

    def _new(self, ranks: tuple[int, ...]) -> Group:
        if len(ranks) == 1 and ranks[0] != self.rank:  # a group of one concerns nobody else
            return None
        alone = len(ranks) == 1
        return torch.distributed.new_group(list(ranks), timeout=self.timeout, use_local_synchronization=alone)
