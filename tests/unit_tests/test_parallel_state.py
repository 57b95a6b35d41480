"""The parallel_state facade: Megatron's getters against the rank grid, in several ranks and in one process."""

import inspect

import pytest
import torch
import torch.distributed as dist

from megatron.core import mpu, parallel_state
from megatron.core.errors import ConfigError, ParallelStateError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid
from tests.harness.distributed import run_distributed

GETTERS = [name for name in dir(parallel_state) if name.startswith("get_") and "virtual" not in name]


def positions(**sizes: int) -> dict[str, int]:
    parallel_state.initialize_model_parallel(**sizes)
    return {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
        "dp_cp": parallel_state.get_data_parallel_rank(with_context_parallel=True),
        "ep": parallel_state.get_expert_model_parallel_rank(),
        "sizes": (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            parallel_state.get_expert_model_parallel_world_size(),
        ),
    }


def test_getters_agree_with_the_rank_grid() -> None:
    grid = RankGrid(tp=2, cp=2)
    answers = run_distributed(positions, 4, tensor_model_parallel_size=2, context_parallel_size=2)
    for rank, answer in enumerate(answers):
        expected = grid.coordinates(rank)
        assert {axis: answer[axis] for axis in expected} == expected
        assert answer["sizes"] == (2, 1, 2, 1, 2, 1)
    assert [answer["dp_cp"] for answer in answers] == [0, 0, 1, 1]


def test_expert_parallelism_is_read_from_the_expert_grid() -> None:
    answers = run_distributed(positions, 4, expert_model_parallel_size=2)
    assert [answer["ep"] for answer in answers] == [0, 1, 0, 1]
    assert all(answer["sizes"] == (1, 1, 1, 4, 4, 2) for answer in answers)


def stages() -> dict[str, object]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    facts: dict[str, object] = {
        "first": parallel_state.is_pipeline_first_stage(),
        "last": parallel_state.is_pipeline_last_stage(),
        "next": parallel_state.get_pipeline_model_parallel_next_rank(),
        "prev": parallel_state.get_pipeline_model_parallel_prev_rank(),
        "embedding": parallel_state.is_rank_in_embedding_group(),
        "has_group": parallel_state.get_embedding_group() is not None,
        "first_chunk_of_last": parallel_state.is_pipeline_last_stage(ignore_virtual=False),
    }
    parallel_state.set_virtual_pipeline_model_parallel_rank(1)
    facts["last_chunk"] = parallel_state.is_pipeline_last_stage(ignore_virtual=False)
    facts["second_chunk_of_first"] = parallel_state.is_pipeline_first_stage(ignore_virtual=False)
    return facts


def test_stages_of_a_pipeline_with_two_chunks_each() -> None:
    answers = run_distributed(stages, 4)
    assert [a["first"] for a in answers] == [True, False, False, False]
    assert [a["last"] for a in answers] == [False, False, False, True]
    assert [a["next"] for a in answers] == [1, 2, 3, 0]
    assert [a["prev"] for a in answers] == [3, 0, 1, 2]
    assert [a["embedding"] for a in answers] == [a["has_group"] for a in answers] == [True, False, False, True]
    assert not any(a["first_chunk_of_last"] for a in answers)
    assert [a["last_chunk"] for a in answers] == [False, False, False, True]
    assert not any(a["second_chunk_of_first"] for a in answers)


def sum_over_one_rank_group() -> int:
    """A Megatron user's call: with a group of None, torch would sum over all ranks."""
    parallel_state.initialize_model_parallel()
    value = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(value, group=parallel_state.get_tensor_model_parallel_group())
    return int(value)


def test_a_group_of_one_rank_is_a_real_group() -> None:
    assert run_distributed(sum_over_one_rank_group, 2) == [1, 2]


def impossible(**sizes: int) -> str:
    with pytest.raises(ConfigError) as caught:
        parallel_state.initialize_model_parallel(**sizes)
    assert not parallel_state.model_parallel_is_initialized()
    return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tensor_model_parallel_size": 3}, ["4 processes", "tensor_model_parallel_size=3"]),
        ({"pipeline_model_parallel_size": 8}, ["4 processes", "pipeline_model_parallel_size=8"]),
        ({"expert_model_parallel_size": 3}, ["expert_model_parallel_size=3"]),
        ({"num_distributed_optimizer_instances": 3}, ["num_distributed_optimizer_instances=3"]),
        ({"virtual_pipeline_model_parallel_size": 2}, ["virtual_pipeline_model_parallel_size=2", "at least 2"]),
    ],
)
def test_impossible_sizes_are_refused_on_every_rank(sizes: dict[str, int], words: list[str]) -> None:
    for text in run_distributed(impossible, 4, **sizes):
        assert all(word in text for word in words), text


def initialised_twice() -> str:
    parallel_state.initialize_model_parallel()
    with pytest.raises(ParallelStateError) as caught:
        parallel_state.initialize_model_parallel()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    return str(caught.value)


def test_initialising_twice_names_the_way_out() -> None:
    assert all("destroy_model_parallel()" in text for text in run_distributed(initialised_twice, 2))


def test_a_case_does_not_see_the_groups_of_the_case_before() -> None:
    run_distributed(positions, 2)
    assert run_distributed(parallel_state.model_parallel_is_initialized, 2) == [False, False]


@pytest.mark.parametrize("name", GETTERS)
def test_an_uninitialised_getter_names_the_call_to_make(name: str) -> None:
    with pytest.raises(ParallelStateError, match="initialize_model_parallel"):
        getattr(parallel_state, name)()


def test_groups_are_none_when_megatron_asks_without_checking() -> None:
    assert parallel_state.get_tensor_model_parallel_group(check_initialized=False) is None


def test_one_process_without_torch_distributed_has_sizes_of_one() -> None:
    parallel_state.initialize_model_parallel()
    try:
        assert parallel_state.get_data_parallel_world_size() == 1
        assert parallel_state.get_tensor_model_parallel_rank() == 0
        assert parallel_state.is_pipeline_first_stage() and parallel_state.is_pipeline_last_stage()
        assert ProcessGroupCollection.resolve(None) is parallel_state.get_process_groups()
    finally:
        parallel_state.destroy_model_parallel()


def test_mpu_is_the_same_facade() -> None:
    public = {name for name, value in vars(parallel_state).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert all(getattr(mpu, name) is getattr(parallel_state, name) for name in public)
