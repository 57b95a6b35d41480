"""Batch sizes and microbatch counts, ramp-up included."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core import num_microbatches_calculator as facade
from megatron.core.errors import ConfigError
from megatron.core.num_microbatches_calculator import NumMicroBatches


def test_ramp_2_to_8_by_2_over_12_samples():
    plan = NumMicroBatches(8, 1, 2, (2, 2, 12))
    assert list(itertools.islice(plan.batch_sizes(), 7)) == [2, 2, 4, 6, 8, 8, 8]
    assert [plan.num_microbatches(consumed) for consumed in (0, 4, 8, 14)] == [1, 2, 3, 4]


def test_constant_batch():
    plan = NumMicroBatches(12, 2, 3)
    assert plan.num_microbatches(0) == plan.num_microbatches(10**9) == 2
    assert plan.samples_after(5) == 60
    assert plan.iterations_for(71) == 5


@given(
    start=st.integers(1, 4), increments=st.integers(0, 5), increment=st.integers(1, 4), samples=st.integers(0, 60),
    steps=st.integers(0, 40),
)  # fmt: skip
def test_samples_after_and_iterations_for_agree_with_counting(start, increments, increment, samples, steps):
    plan = NumMicroBatches(start + increments * increment, 1, 1, (start, increment, samples))
    sizes = list(itertools.islice(plan.batch_sizes(), steps + 1))
    assert sizes == sorted(sizes)
    consumed = sum(sizes[:steps])
    assert plan.samples_after(steps) == consumed
    assert plan.iterations_for(consumed) == steps
    assert plan.iterations_for(consumed + sizes[steps] - 1) == steps


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((8, 3, 1), "global_batch_size=8 is not a multiple of micro_batch_size=3"),
        ((8, 2, 3), "data-parallel size=3"),
        ((8, 1, 4, (2, 2, 12)), "a step of=2"),
        ((8, 1, 1, (3, 2, 12)), "does not reach"),
        ((8, 1, 1, (2, 2)), "needs 3 numbers"),
        ((8, 1, 1, (2, 0, 5)), "at least 1"),
    ],
)
def test_impossible_plans_are_refused_with_the_rule(arguments, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        NumMicroBatches(*arguments)


def test_megatron_functions():
    facade.destroy_num_microbatches_calculator()
    with pytest.raises(ConfigError, match="init_num_microbatches_calculator"):
        facade.get_num_microbatches()
    facade.init_num_microbatches_calculator(0, [2, 2, 12], 8, 1, 2)
    try:
        with pytest.raises(ConfigError, match="already initialized"):
            facade.init_num_microbatches_calculator(0, None, 8, 1, 2)
        assert (facade.get_num_microbatches(), facade.get_current_global_batch_size(), facade.get_micro_batch_size()) == (1, 2, 1)
        facade.update_num_microbatches(8)
        assert (facade.get_num_microbatches(), facade.get_current_global_batch_size()) == (3, 6)
    finally:
        facade.unset_num_microbatches_calculator()
