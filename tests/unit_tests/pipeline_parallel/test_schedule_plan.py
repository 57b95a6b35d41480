"""Schedules: no deadlock, every action once, bounded activations, bubbles as published; for any sizes."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.errors import ConfigError
from megatron.core.pipeline_parallel.schedule_plan import (
    Action,
    Kind,
    PipelinePlan,
    bubble_fraction,
    build_plan,
    check_plan,
    draw_plan,
    forward_only,
    plan_problem,
    time_plan,
)


@st.composite
def plans(draw: st.DrawFn) -> PipelinePlan:
    """Any plan that may be built."""
    schedule = draw(st.sampled_from(["1f1b", "interleaved", "zb_h1", "zb_v"]))
    stages = draw(st.integers(1 if schedule == "1f1b" else 2, 9))
    microbatches = draw(st.integers(1, 20))
    if schedule == "interleaved":
        return build_plan("1f1b", stages, draw(st.integers(2, 4)), stages * draw(st.integers(1, 4)))
    return build_plan(schedule, stages, 2 if schedule == "zb_v" else 1, microbatches)


@settings(max_examples=150, deadline=None)
@given(plans())
def test_every_plan_is_proved_and_keeps_its_bound_on_activations(plan: PipelinePlan) -> None:
    held = check_plan(plan)
    if plan.schedule == "1f1b" and plan.chunks == 1:
        assert held == tuple(min(plan.stages - rank, plan.microbatches) for rank in range(plan.stages))
    elif plan.schedule == "1f1b":
        most = [2 * (plan.stages - rank - 1) + (plan.chunks - 1) * plan.stages + 1 for rank in range(plan.stages)]
        assert held == tuple(min(count, plan.chunks * plan.microbatches) for count in most)
    else:  # no more than 1F1B's first rank, in units of a whole stage
        assert max(held) <= plan.chunks * min(plan.stages, plan.microbatches)
    check = forward_only(plan)
    assert all(action.kind is Kind.F for actions in check.actions for action in actions)
    time_plan(check)


@given(plans())
def test_places_and_parts_are_inverse(plan: PipelinePlan) -> None:
    placed = [plan.place(part) for part in range(plan.parts)]
    assert sorted(placed) == [(rank, chunk) for rank in range(plan.stages) for chunk in range(plan.chunks)]
    assert all(plan.part_of(*place) == part for part, place in enumerate(placed))


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 8), (4, 4), (4, 8), (8, 64)])
def test_bubbles_are_those_of_the_papers(stages: int, microbatches: int) -> None:
    idle = stages - 1
    assert bubble_fraction("1f1b", stages, 1, microbatches) == pytest.approx(idle / (microbatches + idle))
    if microbatches % stages == 0:  # Narayanan et al. 2021, section 2.2.2: 1/v of it
        for chunks in (2, 4):
            expected = idle / (chunks * microbatches + idle)
            assert bubble_fraction("1f1b", stages, chunks, microbatches) == pytest.approx(expected)
    if microbatches >= 2 * stages:  # Qi et al. 2023, table 1: (p - 1)(F + B - W) for H1, and less for V
        total = time_plan(build_plan("zb_h1", stages, 1, microbatches)).total
        assert total - 3 * microbatches == idle
        assert bubble_fraction("zb_v", stages, 2, microbatches) < bubble_fraction("zb_h1", stages, 1, microbatches)


def test_one_f_one_b_of_two_stages_is_the_textbook_one() -> None:
    plan = build_plan("1f1b", 2, 1, 3)
    assert [" ".join(map(str, actions)) for actions in plan.actions] == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert draw_plan(plan).splitlines()[1] == "rank  1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  ."


def with_actions(plan: PipelinePlan, rank: int, actions: list[Action]) -> PipelinePlan:
    """The plan with one rank's list replaced."""
    lists = list(plan.actions)
    lists[rank] = tuple(actions)
    return dataclasses.replace(plan, actions=tuple(lists))


def test_the_checker_finds_deadlocks_missing_actions_and_messages_out_of_order() -> None:
    plan = build_plan("1f1b", 2, 1, 3)
    f0, f1, b0, f2, b1, b2 = plan.actions[0]
    with pytest.raises(ConfigError, match="deadlock: rank 0 waits for ever to run B0"):
        check_plan(with_actions(plan, 0, [b0, f0, f1, f2, b1, b2]))
    with pytest.raises(ConfigError, match="rank 0 does not run every F, B and W exactly once"):
        check_plan(with_actions(plan, 0, [f0, f1, b0, f2, b1]))
    with pytest.raises(ConfigError, match="rank 0 does not run every"):
        check_plan(with_actions(plan, 0, [f0, f1, b0, f2, b1, b1]))
    with pytest.raises(ConfigError, match=r"messages \(F\) from rank 0 to rank 1 are received in another order"):
        check_plan(with_actions(plan, 0, [f1, f0, b0, f2, b1, b2]))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("gpipe", 2, 1, 4), "pipeline_schedule=gpipe is unknown"),
        (("1f1b", 1, 2, 4), "virtual_pipeline_model_parallel_size=2 needs pipeline_model_parallel_size > 1"),
        (("zb_h1", 1, 1, 4), "pipeline_schedule=zb_h1 needs pipeline_model_parallel_size > 1"),
        (("zb_v", 2, 3, 4), "two model chunks per stage, got virtual_pipeline_model_parallel_size=3"),
        (("1f1b", 4, 2, 6), "= 6, to be a multiple of pipeline_model_parallel_size=4"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule(arguments: tuple[str, int, int, int], text: str) -> None:
    assert text in (plan_problem(*arguments) or "")
    with pytest.raises(ConfigError):
        build_plan(*arguments)
