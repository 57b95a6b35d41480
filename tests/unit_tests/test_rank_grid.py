"""RankGrid: coordinates and groups against NumPy's own reshaping, tables written by hand, and the rules for impossible sizes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.errors import ConfigError
from megatron.core.rank_grid import RankGrid

SIZES = st.integers(1, 3)
ORDERS = st.sampled_from(["tp-cp-ep-dp-pp", "tp-dp-cp-ep-pp", "cp-tp-ep-dp-pp", "dp-tp-cp-ep-pp"])
AXES = st.sets(st.sampled_from(["tp", "cp", "dp", "pp"]), min_size=1)


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    tp, cp, pp, dp = draw(SIZES), draw(SIZES), draw(SIZES), draw(SIZES)
    expert_tp = draw(st.sampled_from([n for n in range(1, tp * cp * dp + 1) if (tp * cp * dp) % n == 0]))
    rest = tp * cp * dp // expert_tp
    ep = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    return RankGrid(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, order=draw(ORDERS), expert_tp=expert_tp)


def groups_by_reshaping(sizes: dict[str, int], order: str, axes: set[str]) -> list[list[int]]:
    """The oracle: ranks as an array whose last dim is the fastest axis; chosen axes moved to the end."""
    slow_to_fast = [axis for axis in reversed(order.split("-")) if axis in sizes]
    ranks = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in slow_to_fast])
    outside = [i for i, axis in enumerate(slow_to_fast) if axis not in axes]
    inside = [i for i, axis in enumerate(slow_to_fast) if axis in axes]
    size = math.prod(sizes[slow_to_fast[i]] for i in inside)
    return ranks.transpose(outside + inside).reshape(-1, size).tolist()


@given(grids(), AXES)
def test_dense_groups_are_slices_of_the_rank_array(grid: RankGrid, axes: set[str]) -> None:
    sizes = {"tp": grid.tp, "cp": grid.cp, "dp": grid.dp, "pp": grid.pp}
    assert grid.groups("-".join(axes)) == groups_by_reshaping(sizes, grid.order, axes)


@given(grids(), st.sets(st.sampled_from(["tp", "ep", "dp", "pp"]), min_size=1))
def test_expert_groups_are_slices_of_the_rank_array(grid: RankGrid, axes: set[str]) -> None:
    assert grid.expert_tp is not None
    sizes = {"tp": grid.expert_tp, "ep": grid.ep, "dp": grid.expert_dp, "pp": grid.pp}
    assert grid.expert_groups("-".join(axes)) == groups_by_reshaping(sizes, grid.order, axes)


@given(grids(), AXES)
def test_groups_cover_every_rank_once(grid: RankGrid, axes: set[str]) -> None:
    assert sorted(rank for ranks in grid.groups("-".join(axes)) for rank in ranks) == list(range(grid.world_size))


@given(grids())
def test_coordinates_and_ranks_are_inverse(grid: RankGrid) -> None:
    for rank in range(grid.world_size):
        assert grid.rank_of(**grid.coordinates(rank)) == rank
        assert grid.expert_rank_of(**grid.expert_coordinates(rank)) == rank


@given(grids())
def test_a_rank_has_one_pipeline_stage_in_both_grids(grid: RankGrid) -> None:
    for rank in range(grid.world_size):
        assert grid.coordinates(rank)["pp"] == grid.expert_coordinates(rank)["pp"]


@given(grids(), st.integers(1, 4))
def test_optimizer_instances_cut_the_data_parallel_groups(grid: RankGrid, instances: int) -> None:
    size = grid.dp * grid.cp
    if size % instances:
        with pytest.raises(ConfigError, match="num_distributed_optimizer_instances"):
            grid.optimizer_instance_groups(instances)
        return
    intra, inter, members = grid.optimizer_instance_groups(instances)
    for groups, length in ((intra, size // instances), (inter, instances), (members, grid.world_size // instances)):
        assert all(len(ranks) == length for ranks in groups)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(grid.world_size))
    assert all(len(set(a) & set(b)) <= 1 for a in intra for b in inter)
    assert all(any(set(ranks) <= set(own) for own in members) for ranks in intra)


def test_the_documented_sixteen_rank_layout() -> None:
    """tp2 pp4 on 16 ranks, as Megatron's documentation lists the groups (order tp-dp-pp)."""
    grid = RankGrid.for_world(16, tp=2, pp=4)
    assert grid.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
    assert grid.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert grid.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert grid.groups("tp-pp")[0] == [0, 1, 4, 5, 8, 9, 12, 13]
    assert grid.embedding_groups() == [[0, 12], [1, 13], [2, 14], [3, 15]]
    assert grid.position_embedding_groups() == [[0], [1], [2], [3]]


def test_context_parallel_ranks_lie_between_tensor_and_data_ranks() -> None:
    grid = RankGrid.for_world(8, tp=2, cp=2)
    assert grid.groups("cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.groups("dp-cp") == grid.groups("cp-dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_expert_parallelism_is_carved_out_of_data_parallelism() -> None:
    grid = RankGrid.for_world(4, ep=2)
    assert (grid.dp, grid.expert_dp) == (4, 2)
    assert grid.expert_groups("ep") == [[0, 1], [2, 3]]
    assert grid.expert_groups("dp") == [[0, 2], [1, 3]]


def test_an_order_may_leave_out_axes_of_size_one() -> None:
    assert RankGrid(tp=2, dp=2, order="dp-tp").groups("dp") == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("world_size", "sizes", "words"),
    [
        (4, {"tp": 3}, ["4 processes", "tensor_model_parallel_size=3", "multiple of 3"]),
        (4, {"tp": 2, "pp": 2, "cp": 2}, ["4 processes", "tensor_model_parallel_size=2", "pipeline_model_parallel_size=2", "8"]),
        (6, {"pp": 4}, ["6 processes", "pipeline_model_parallel_size=4"]),
        (1, {"cp": 2}, ["1 process ", "context_parallel_size=2"]),
        (4, {"ep": 3}, ["expert_model_parallel_size=3", "4 processes", "data parallelism"]),
        (4, {"tp": 2, "ep": 2, "expert_tp": 4}, ["expert_tensor_parallel_size=4", "expert_model_parallel_size=2"]),
        (4, {"tp": 0}, ["tensor_model_parallel_size=0", "at least 1"]),
        (4, {"pp": True}, ["pipeline_model_parallel_size=True"]),
        (4, {"order": "tp-xp"}, ["order='tp-xp'", "tp-cp-ep-dp-pp"]),
        (4, {"tp": 2, "order": "dp-pp"}, ["order='dp-pp'", "missing: tp"]),
        (4, {"order": "dp-dp"}, ["order='dp-dp'"]),
        (8, {"pp": 2, "tp": 2, "expert_tp": 1, "order": "tp-pp-dp"}, ["order='tp-pp-dp'", "pp last"]),
    ],
)
def test_impossible_sizes_name_the_options_and_the_rule(world_size: int, sizes: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RankGrid.for_world(world_size, **sizes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_unknown_ranks_and_axes_are_refused() -> None:
    grid = RankGrid(tp=2)
    for wrong in (lambda: grid.coordinates(2), lambda: grid.rank_of(tp=2), lambda: grid.rank_of(ep=0), lambda: grid.groups("ep")):
        with pytest.raises(ConfigError):
            wrong()
