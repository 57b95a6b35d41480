"""The loss of a log interval is its token mean, whatever the steps, skips and restarts in it."""

import dataclasses
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.metrics import LOGGED_FIELDS, MACHINE_FIELDS, MetricsAccumulator, StepMetrics, StepResult
from megatron.training.train_state import TrainState


def result(loss_sum: float, tokens: int, **changes: Any) -> StepResult:
    return dataclasses.replace(StepResult(loss_sum, tokens, grad_norm=1.0, skipped=False, nan=False), **changes)


def accumulator(**changes: Any) -> MetricsAccumulator:
    return MetricsAccumulator(**({"train_iters": 10, "world_size": 1, "flops_per_token": 100.0} | changes))


def add(sums: MetricsAccumulator, step: StepResult, **changes: Any) -> None:
    times = {"step_time_s": 0.5, "data_time_s": 0.1, "exposed_comm_time_s": 0.05, "global_batch_size": 8, "tokens": 128}
    sums.add(step, **(times | changes))


def flush(sums: MetricsAccumulator, **state: Any) -> StepMetrics:
    return sums.flush(TrainState(**state), learning_rate=1e-3, loss_scale=1.0, peak_memory_bytes=7)


def test_loss_is_the_token_mean_not_the_mean_of_means() -> None:
    sums = accumulator()
    for loss_sum, tokens in ((12.0, 4), (3.0, 12), (20.0, 10), (2.0, 2)):
        add(sums, result(loss_sum, tokens))
    assert flush(sums).lm_loss == 37 / 28


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 64)), min_size=1, max_size=12), st.data())
def test_loss_of_an_interval_that_spans_a_restart_is_the_uninterrupted_one(steps: list[tuple[int, int]], data: Any) -> None:
    cut = data.draw(st.integers(0, len(steps) - 1))
    before, after = steps[:cut], steps[cut:]
    resumed = accumulator(loss_sum=float(sum(s for s, _ in before)), tokens=sum(n for _, n in before))
    for loss_sum, tokens in after:
        add(resumed, result(float(loss_sum), tokens))
    expected = Fraction(sum(s for s, _ in steps), sum(n for _, n in steps))
    assert flush(resumed).lm_loss == float(expected)


def test_each_interval_starts_empty() -> None:
    sums = accumulator(loss_sum=100.0, tokens=1, skipped=2, nan=1)
    add(sums, result(0.0, 0, skipped=True))
    first = flush(sums)
    assert (first.skipped, first.nan, first.lm_loss) == (3, 1, 100.0)
    add(sums, result(6.0, 3))
    second = flush(sums)
    assert (second.skipped, second.nan, second.lm_loss) == (0, 0, 2.0)


def test_interval_of_skipped_steps_has_no_loss() -> None:
    sums = accumulator()
    add(sums, result(0.0, 0, skipped=True, nan=True, grad_norm=None))
    metrics = flush(sums)
    assert math.isnan(metrics.lm_loss)
    assert (metrics.skipped, metrics.nan, metrics.grad_norm) == (1, 1, None)


def test_times_are_means_and_throughput_is_over_wall_time() -> None:
    sums = accumulator(world_size=2, peak_tflops=1e-8)
    add(sums, result(1.0, 1), step_time_s=1.0, data_time_s=0.4, exposed_comm_time_s=0.2, tokens=100, global_batch_size=4)
    add(sums, result(1.0, 1), step_time_s=3.0, data_time_s=0.0, exposed_comm_time_s=0.0, tokens=300, global_batch_size=12)
    metrics = flush(sums, iteration=6)
    assert (metrics.step_time_s, metrics.data_time_s, metrics.exposed_comm_time_s) == (2.0, 0.2, 0.1)
    assert metrics.tokens_per_s == 100.0
    assert metrics.tflops_per_rank == pytest.approx(100.0 * 100.0 / 2 / 1e12)
    assert metrics.mfu == pytest.approx(0.5)
    assert metrics.eta_s == 2.0 * 4
    assert metrics.global_batch_size == 12


def test_mfu_is_unknown_without_a_peak_and_eta_ends_at_zero() -> None:
    sums = accumulator()
    add(sums, result(1.0, 1))
    metrics = flush(sums, iteration=10)
    assert metrics.mfu is None
    assert metrics.eta_s == 0.0


def test_logged_fields_are_the_promised_ones_and_exist() -> None:
    promised = (
        "iteration, consumed_samples, consumed_tokens, lm_loss, grad_norm, learning_rate, loss_scale, skipped, "
        "global_batch_size, step_time_s, data_time_s, exposed_comm_time_s, tokens_per_s, tflops_per_rank, mfu, peak_memory_bytes"
    )
    assert ", ".join(LOGGED_FIELDS) == promised
    assert set(LOGGED_FIELDS) <= {field.name for field in dataclasses.fields(StepMetrics)}
    assert MACHINE_FIELDS.isdisjoint({"lm_loss", "grad_norm", "learning_rate", "global_batch_size"})
