"""ProcessGroupCollection: membership against the rank grid, sharing, resolving, and what happens without torch.distributed."""

import dataclasses
import datetime

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron.core import process_groups_config
from megatron.core.errors import ParallelStateError
from megatron.core.process_groups_config import GROUP_NAMES, ProcessGroupCollection, create_process_groups, group_plan
from megatron.core.rank_grid import RankGrid
from tests.harness.distributed import run_distributed

LAYOUTS = [
    {"dp": 4},
    {"tp": 2, "dp": 2},
    {"pp": 4},
    {"tp": 2, "pp": 2},
    {"cp": 2, "dp": 2},
    {"dp": 4, "ep": 2},
    {"tp": 2, "cp": 2, "expert_tp": 1, "ep": 4},
]


def membership(sizes: dict[str, int], instances: int) -> dict[str, list[int]]:
    """Global ranks of each of this rank's groups, and the sum of ranks that an all-reduce over it gives."""
    groups = create_process_groups(RankGrid(**sizes), optimizer_instances=instances)
    found = {}
    for name in GROUP_NAMES:
        group = getattr(groups, name)
        if group is None:
            continue
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total, group=group)
        found[name] = groups.ranks(name)
        assert groups.size(name) == len(found[name])
        assert found[name][groups.rank(name)] == dist.get_rank()
        assert int(total) == sum(found[name])
    return found


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_every_rank_is_in_the_groups_of_the_grid(sizes: dict[str, int]) -> None:
    answers = run_distributed(membership, 4, sizes, 1)
    for name, all_ranks in group_plan(RankGrid(**sizes)).items():
        for rank, found in enumerate(answers):
            assert found.get(name) == next((ranks for ranks in all_ranks if rank in ranks), None), (name, rank)
    assert all(found["world"] == [0, 1, 2, 3] for found in answers)


def test_optimizer_instances_have_groups_of_their_own() -> None:
    answers = run_distributed(membership, 4, {"dp": 4}, 2)
    assert [a["intra_dp_cp"] for a in answers] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [a["inter_dist_opt"] for a in answers] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [a["intra_dist_opt"] for a in answers] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def shared_groups() -> tuple[bool, bool, bool, bool]:
    first = create_process_groups(RankGrid(dp=2))
    second = create_process_groups(RankGrid(dp=2))
    return (
        first.dp is first.dp_cp is first.intra_dp_cp,
        first.tp is first.pp is first.cp is first.embd,
        first.dp is second.dp,
        first.dp is not dist.group.WORLD,
    )


def test_groups_of_the_same_ranks_are_one_group_but_not_the_default_one() -> None:
    assert run_distributed(shared_groups, 2) == [(True, True, True, True)] * 2


def group_timeouts() -> tuple[float, float, float]:
    world, given = dist.group.WORLD, create_process_groups(RankGrid(pp=2), timeout=datetime.timedelta(seconds=41))
    assert world is not None and given.pp is not None and given.tp is not None
    return tuple(g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in (world, given.pp, given.tp))


def test_groups_have_the_timeout_that_was_asked_for() -> None:
    assert run_distributed(group_timeouts, 2) == [(60.0, 41.0, 41.0)] * 2


def stands_alone() -> str:
    with pytest.raises(ParallelStateError) as caught:
        ProcessGroupCollection.resolve(None)
    return str(caught.value)


def test_several_processes_without_groups_are_refused() -> None:
    assert all("initialize_model_parallel" in text for text in run_distributed(stands_alone, 2))


def wrong_size() -> str:
    with pytest.raises(ParallelStateError) as caught:
        create_process_groups(RankGrid(dp=3))
    return str(caught.value)


def test_a_grid_of_another_size_is_refused() -> None:
    assert run_distributed(wrong_size, 2) == ["the layout has 3 ranks, but 2 process(es) run"] * 2


def test_a_single_process_has_groups_of_one() -> None:
    groups = create_process_groups(RankGrid())
    assert groups == ProcessGroupCollection.single_process()
    assert [(groups.size(name), groups.rank(name), groups.ranks(name)) for name in GROUP_NAMES] == [(1, 0, [0])] * len(GROUP_NAMES)


def test_resolve_prefers_what_is_given_then_what_is_installed() -> None:
    mine, theirs = ProcessGroupCollection(), ProcessGroupCollection.single_process()
    process_groups_config.install(theirs)
    try:
        assert ProcessGroupCollection.resolve(mine) is mine
        assert ProcessGroupCollection.resolve(None) is theirs
    finally:
        process_groups_config.install(None)
    assert ProcessGroupCollection.resolve(None) == ProcessGroupCollection.single_process()


def test_a_collection_cannot_be_changed_and_names_are_checked() -> None:
    groups = ProcessGroupCollection.single_process()
    with pytest.raises(dataclasses.FrozenInstanceError):
        groups.tp = None  # type: ignore[misc]
    with pytest.raises(ParallelStateError, match="'tensor'"):
        groups.size("tensor")


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 3))
def test_no_rank_is_in_two_groups_of_one_axis(tp: int, cp: int, dp: int, pp: int) -> None:
    for name, all_ranks in group_plan(RankGrid(tp=tp, cp=cp, dp=dp, pp=pp)).items():
        members = [rank for ranks in all_ranks for rank in ranks]
        assert len(members) == len(set(members)), name
