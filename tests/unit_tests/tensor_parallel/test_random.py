"""Random streams: where dropout masks agree and differ, named streams, bit-exact saving and restoring."""

import random

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.errors import CheckpointError, ParallelStateError
from megatron.core.process_groups_config import create_process_groups
from megatron.core.rank_grid import RankGrid
from megatron.core.tensor_parallel.random import (
    EXPERT_PARALLEL_RNG,
    MODEL_PARALLEL_RNG,
    RngTracker,
    get_rng_tracker,
    model_parallel_seed,
    rng_state,
    set_rng_state,
)
from tests.harness.distributed import run_distributed


def mask() -> list[float]:
    """Which of 64 elements dropout 0.5 keeps; 64 so that two independent masks never agree by chance."""
    return torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()


def masks(sizes: dict[str, int]) -> tuple[list[float], list[float], list[float]]:
    model_parallel_seed(1234, create_process_groups(RankGrid(**sizes)))
    whole = mask()
    with get_rng_tracker().fork():
        split = mask()
    with get_rng_tracker().fork(EXPERT_PARALLEL_RNG):
        expert = mask()
    return whole, split, expert


def test_masks_on_tensor_ranks_agree_on_replicas_and_differ_on_shards() -> None:
    (whole0, split0, expert0), (whole1, split1, expert1) = run_distributed(masks, 2, {"tp": 2})
    assert whole0 == whole1
    assert split0 != split1 and split0 != whole0
    assert expert0 != expert1


@pytest.mark.parametrize("axis", ["dp", "cp", "pp"])
def test_masks_differ_over_data_context_and_pipeline_ranks(axis: str) -> None:
    (whole0, split0, _), (whole1, split1, _) = run_distributed(masks, 2, {axis: 2})
    assert whole0 != whole1 and split0 != split1


def test_the_same_seed_gives_the_same_streams_and_another_seed_others() -> None:
    def draw(seed: int) -> tuple[list[float], float, float]:
        model_parallel_seed(seed)
        return mask(), random.random(), float(np.random.rand())

    assert draw(1) == draw(1)
    assert all(a != b for a, b in zip(draw(1), draw(2), strict=True))


def test_a_fork_does_not_move_the_default_stream() -> None:
    model_parallel_seed(1)
    expected = [mask(), mask()]
    model_parallel_seed(1)
    first = mask()
    with get_rng_tracker().fork(MODEL_PARALLEL_RNG):
        mask()
    assert [first, mask()] == expected


def test_a_named_stream_goes_on_where_it_was_left_even_after_an_error() -> None:
    tracker = RngTracker()
    tracker.add("one", 5)
    with tracker.fork("one"):
        expected = [mask(), mask()]
    tracker.reset()
    tracker.add("one", 5)
    before = torch.get_rng_state()
    with pytest.raises(KeyError), tracker.fork("one"):
        first = mask()
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)
    with tracker.fork("one"):
        assert [first, mask()] == expected


def test_unknown_and_doubled_streams_are_refused() -> None:
    tracker = RngTracker()
    with pytest.raises(ParallelStateError, match="model_parallel_seed"), tracker.fork("x"):
        pass
    tracker.add("x", 1)
    with pytest.raises(ParallelStateError, match="'x' exists already"):
        tracker.add("x", 1)


def draw_everything() -> list[object]:
    with get_rng_tracker().fork():
        split = mask()
    numbers = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
    return [mask(), split, *numbers, torch.randn(5).tolist()]


@pytest.mark.parametrize("half_used", [False, True], ids=["fresh", "a second normal value waiting"])
def test_restored_state_gives_the_same_numbers(half_used: bool) -> None:
    model_parallel_seed(7)
    if half_used:  # gauss and randn make two values at a time and keep one
        random.gauss(0, 1)
        np.random.randn()
        torch.randn(3)
    state = rng_state()
    expected = [draw_everything() for _ in range(3)]
    after = rng_state()
    set_rng_state(state)
    assert [draw_everything() for _ in range(3)] == expected
    assert all(torch.equal(tensor, after[key]) for key, tensor in rng_state().items())


def test_state_is_bytes_of_a_length_that_does_not_depend_on_what_was_drawn() -> None:
    model_parallel_seed(7)
    before = rng_state()
    draw_everything()
    after = rng_state()
    assert {key: tuple(t.shape) for key, t in before.items()} == {key: tuple(t.shape) for key, t in after.items()}
    assert all(tensor.dtype == torch.uint8 and tensor.dim() == 1 for tensor in after.values())
    assert {"cpu", "python", "numpy", f"stream.{MODEL_PARALLEL_RNG}.cpu", f"stream.{EXPERT_PARALLEL_RNG}.cpu"} <= set(after)


def test_restored_state_does_not_follow_the_callers_tensors() -> None:
    model_parallel_seed(7)
    state = rng_state()
    set_rng_state(state)
    for tensor in state.values():
        tensor.zero_()
    model_state = rng_state()
    assert any(bool(tensor.any()) for key, tensor in model_state.items() if key.startswith("stream."))


@pytest.mark.parametrize("wrong", ["unknown key", "length", "dtype"])
def test_a_state_that_does_not_fit_changes_nothing(wrong: str) -> None:
    model_parallel_seed(7)
    good = rng_state()
    model_parallel_seed(8)
    before = rng_state()
    bad = dict(good)
    if wrong == "unknown key":
        bad["stream.nobody.cpu"] = good["cpu"]
    else:
        bad["numpy"] = good["numpy"][:-1] if wrong == "length" else good["numpy"].float()
    with pytest.raises(CheckpointError, match=r"numpy|nobody"):
        set_rng_state(bad)
    assert all(torch.equal(tensor, before[key]) for key, tensor in rng_state().items())


def test_recomputation_repeats_named_streams() -> None:
    model_parallel_seed(3)
    seen = []

    def dropped(x: torch.Tensor) -> torch.Tensor:
        with get_rng_tracker().fork():
            out = torch.nn.functional.dropout(x * 2.0, 0.5)
        seen.append(out.detach().clone())
        return out * out

    x = torch.ones(64, requires_grad=True)
    out = checkpoint(dropped, x, use_reentrant=False, context_fn=get_rng_tracker().recompute_contexts)
    with get_rng_tracker().fork():
        between = mask()
    out.sum().backward()
    assert len(seen) == 2 and torch.equal(seen[0], seen[1])
    with get_rng_tracker().fork():
        after = mask()
    model_parallel_seed(3)
    with get_rng_tracker().fork():
        assert [mask(), mask(), mask()][1:] == [between, after]
