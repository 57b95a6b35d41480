"""ProcessGroupCollection: the process groups of this rank, in one frozen value that is passed to constructors.

`create_process_groups` makes them from a `RankGrid`. Groups of the same ranks are one group (with cp=1, `dp` and `dp_cp` are the
same object), and all groups of one rank share one. Groups live until torch.distributed is shut down: a peer may still be reading
from a group that this rank is done with, so they are kept and reused rather than closed.
"""

import dataclasses
import datetime
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.errors import ParallelStateError
from megatron.core.rank_grid import Groups, RankGrid

Group = dist.ProcessGroup | None


@dataclasses.dataclass(frozen=True)
class ProcessGroupCollection:
    """This rank's group along each axis; None = this rank alone (or not a member).

    tp, cp, dp, pp: the axes of the grid; dp_cp, tp_cp, tp_dp, tp_dp_cp: their combinations. mp: all ranks of one copy of the
        model (tp x pp).
    ep, expt_tp, expt_dp, tp_ep, tp_ep_pp: the same for the expert grid.
    embd, pos_embd: ranks that hold copies of the tied word embedding, of the position embedding; None elsewhere.
    intra_dp_cp: the part of dp_cp inside one optimizer instance; inter_dist_opt: ranks with the same shard in other
        instances; intra_dist_opt: all ranks of one instance. intra_expt_dp, inter_expt_dp: the same for experts' shards.
    world: all ranks.
    grid: the layout the groups came from; None for a collection made by hand.
    planned_rank: set in a plan (see `planned`), which has sizes and positions but nobody to communicate with.
    """

    tp: Group = None
    cp: Group = None
    dp: Group = None
    pp: Group = None
    dp_cp: Group = None
    tp_cp: Group = None
    tp_dp: Group = None
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
    intra_dist_opt: Group = None
    intra_expt_dp: Group = None
    inter_expt_dp: Group = None
    world: Group = None
    grid: RankGrid | None = None
    planned_rank: int | None = None

    def size(self, name: str) -> int:
        """Number of ranks of the group `name`; 1 for None."""
        group = self._group(name)
        if self.planned_rank is not None:
            return len(self._planned_ranks(name))
        return 1 if group is None else dist.get_world_size(group)

    def rank(self, name: str) -> int:
        """This rank's position in the group `name`; 0 for None."""
        group = self._group(name)
        if self.planned_rank is not None:
            return self._planned_ranks(name).index(self.planned_rank)
        return 0 if group is None else dist.get_rank(group)

    def place_among(self, names: Iterable[str]) -> tuple[int, int]:
        """(number of ranks, this rank's position) in the product of several groups; the last name's position runs fastest."""
        count, index = 1, 0
        for name in names:
            count, index = count * self.size(name), index * self.size(name) + self.rank(name)
        return count, index

    def ranks(self, name: str) -> list[int]:
        """Global ranks of the group `name`, in group order; this rank alone for None."""
        group = self._group(name)
        if group is None:
            return [dist.get_rank() if dist.is_initialized() else 0]
        return dist.get_process_group_ranks(group)

    @staticmethod
    def single_process() -> "ProcessGroupCollection":
        """The groups of a process that has nobody to communicate with."""
        return ProcessGroupCollection(grid=RankGrid())

    @staticmethod
    def planned(grid: RankGrid, rank: int) -> "ProcessGroupCollection":
        """What a rank of this layout would have, to build its model without starting it (on the meta device)."""
        return ProcessGroupCollection(grid=grid, planned_rank=rank)

    def _planned_ranks(self, name: str) -> list[int]:
        assert self.grid is not None and self.planned_rank is not None
        if name == "world":
            return list(range(self.grid.world_size))
        return _planned_groups(self.grid, self.planned_rank).get(name, [self.planned_rank])

    @staticmethod
    def resolve(given: "ProcessGroupCollection | None") -> "ProcessGroupCollection":
        """`given`; else what `initialize_model_parallel` installed; else, in a single process, groups of one.

        Raises ParallelStateError when there are several processes and nothing is installed: guessing would leave gradients
        unreduced.
        """
        if given is not None:
            return given
        if _installed is not None:
            return _installed
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ParallelStateError(
                f"{dist.get_world_size()} processes run, but no process groups exist; call "
                "megatron.core.parallel_state.initialize_model_parallel(...) first, or pass pg_collection"
            )
        return ProcessGroupCollection.single_process()

    def _group(self, name: str) -> Group:
        if name not in GROUP_NAMES:
            raise ParallelStateError(f"no process group is called {name!r}; there are {', '.join(GROUP_NAMES)}")
        return getattr(self, name)


GROUP_NAMES = tuple(field.name for field in dataclasses.fields(ProcessGroupCollection) if field.name not in ("grid", "planned_rank"))

_installed: ProcessGroupCollection | None = None
_made: dict[tuple[tuple[int, ...], datetime.timedelta], Group] = {}
_made_for: dist.ProcessGroup | None = None


def install(groups: ProcessGroupCollection | None) -> None:
    """Make `groups` what `resolve(None)` and `parallel_state` give; None forgets."""
    global _installed
    _installed = groups


def installed() -> ProcessGroupCollection | None:
    """What `install` was last called with."""
    return _installed


def forget_process_groups() -> None:
    """After torch.distributed was shut down: drop the groups that are kept, and so their threads, which must not outlive it."""
    global _made_for
    install(None)
    _made.clear()
    _made_for = None


def create_process_groups(
    grid: RankGrid, *, optimizer_instances: int = 1, timeout: datetime.timedelta | None = None
) -> ProcessGroupCollection:
    """The groups of a grid. Collective: all ranks call it with the same arguments.

    optimizer_instances: copies of the distributed optimizer (`num_distributed_optimizer_instances`).
    timeout: of each group; None = that of the group of all ranks.

    Without torch.distributed the grid must be of one rank. Raises ConfigError or ParallelStateError for a grid that does not fit.
    """
    plan = group_plan(grid, optimizer_instances)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if grid.world_size != world_size:
        raise ParallelStateError(f"the layout has {grid.world_size} ranks, but {world_size} process(es) run")
    if not dist.is_initialized():
        return ProcessGroupCollection.single_process()
    _forget_groups_of_another_world()
    timeout = _world_timeout() if timeout is None else timeout
    own: dict[str, Any] = {}
    for name, all_ranks in plan.items():
        for ranks in all_ranks:
            group = _group_of(tuple(ranks), timeout, name)
            if dist.get_rank() in ranks:
                own[name] = group
    return ProcessGroupCollection(world=dist.group.WORLD, grid=grid, **own)


def create_copies_of_group(groups: ProcessGroupCollection, name: str, copies: int) -> list[Group]:
    """More groups of the same ranks, with communicators of their own. Collective: all ranks call it with the same arguments."""
    assert groups.grid is not None, "the groups must come from a grid"
    timeout = _world_timeout()
    own: list[Group] = [None] * copies
    for ranks in group_plan(groups.grid)[name]:
        for index in range(copies):
            group = dist.new_group(ranks, timeout=timeout, group_desc=f"{name} {index}")
            if dist.get_rank() in ranks:
                own[index] = group
    return own


def group_plan(grid: RankGrid, optimizer_instances: int = 1) -> Mapping[str, Groups]:
    """All groups of all ranks by field name, in the order in which they are created. Pure."""
    intra, inter, members = grid.optimizer_instance_groups(optimizer_instances)
    expert_intra, expert_inter = grid.expert_instance_groups(optimizer_instances)
    return {
        "dp_cp": grid.groups("dp-cp"),
        "dp": grid.groups("dp"),
        "cp": grid.groups("cp"),
        "tp": grid.groups("tp"),
        "pp": grid.groups("pp"),
        "mp": grid.groups("tp-pp"),
        "tp_cp": grid.groups("tp-cp"),
        "tp_dp": grid.groups("tp-dp"),
        "tp_dp_cp": grid.groups("tp-dp-cp"),
        "embd": grid.embedding_groups(),
        "pos_embd": grid.position_embedding_groups(),
        "ep": grid.expert_groups("ep"),
        "expt_tp": grid.expert_groups("tp"),
        "expt_dp": grid.expert_groups("dp"),
        "tp_ep": grid.expert_groups("tp-ep"),
        "tp_ep_pp": grid.expert_groups("tp-ep-pp"),
        "intra_dp_cp": intra,
        "inter_dist_opt": inter,
        "intra_dist_opt": members,
        "intra_expt_dp": expert_intra,
        "inter_expt_dp": expert_inter,
    }


@functools.lru_cache(maxsize=64)
def _planned_groups(grid: RankGrid, rank: int) -> Mapping[str, list[int]]:
    """The groups that a rank is a member of. Kept: a plan of thousands of ranks takes a while, and each layer asks for sizes."""
    mine = ((name, [ranks for ranks in groups if rank in ranks]) for name, groups in group_plan(grid).items())
    return {name: own[0] for name, own in mine if own}


def _group_of(ranks: tuple[int, ...], timeout: datetime.timedelta, name: str) -> Group:
    """The group of these ranks, made at the first call; every rank calls, members or not. None for a rank that is no member."""
    if len(ranks) == 1 and ranks[0] != dist.get_rank():
        return None
    key = ranks, timeout
    if key not in _made:
        group = dist.new_group(
            list(ranks),
            timeout=timeout,
            use_local_synchronization=len(ranks) == 1,  # nobody else takes part
            group_desc=f"{name}:{'-'.join(map(str, ranks))}" if len(ranks) <= 16 else name,
        )
        _made[key] = group if dist.get_rank() in ranks else None
    return _made[key]


def _forget_groups_of_another_world() -> None:
    global _made_for
    if _made_for is not dist.group.WORLD:
        _made.clear()
        _made_for = dist.group.WORLD


def _world_timeout() -> datetime.timedelta:
    """The timeout that init_process_group was given."""
    world = dist.group.WORLD
    assert world is not None
    device = torch.device("cuda" if "nccl" in dist.get_backend_config() else "cpu")
    return world._get_backend(device).options._timeout
