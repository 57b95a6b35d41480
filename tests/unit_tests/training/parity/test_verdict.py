"""Records merge to whole tensors; a verdict tells rounding from a fault and names the first place."""

import pathlib

import pytest
import torch

from megatron.training.parity.records import Part, RankStep, Step, difference, merge, read_step, write_step
from megatron.training.parity.verdict import FP64_BOUND, compare, judge, rounding_bound

BOUNDS = {"fp32": 1e-5, "fp64": FP64_BOUND}


def step(values: dict[tuple[str, str], tuple[int, float]], noise: float = 0.0) -> Step:
    """One rank's step: a tensor of two numbers per entry."""
    parts = [
        Part(kind, name, order, (2,), (0,), torch.tensor([value, value / 2 + noise], dtype=torch.float64))
        for (kind, name), (order, value) in values.items()
    ]
    return merge([RankStep(1, tuple(parts))])


def test_parts_of_ranks_make_the_whole_and_replicas_must_agree(tmp_path: pathlib.Path) -> None:
    whole = torch.arange(12.0).view(4, 3)
    first = RankStep(2, (Part("weight", "w", 7, (4, 3), (0, 0), whole[:2].clone()), Part("weight", "n", 3, (1,), (0,), torch.ones(1))))
    second = RankStep(2, (Part("weight", "w", 5, (4, 3), (1, 0), whole[1:].clone()), Part("weight", "n", 3, (1,), (0,), torch.full((1,), 1.5))))
    for rank, record in enumerate((first, second)):
        write_step(tmp_path, rank, record)
    merged = read_step(tmp_path, 2, 2)
    assert torch.equal(merged.of_kind("weight")["w"], whole) and merged.tensors["weight", "w"].order == 5
    (problem,) = merged.replicas
    assert (problem.name, problem.rank, problem.difference) == ("n", 1, 0.5)
    with pytest.raises(AssertionError, match="nobody holds all of weight w"):
        merge([first])


def test_differences_are_relative_to_the_largest_number() -> None:
    a = torch.tensor([4.0, 0.0])
    assert difference(a, a.clone()) == 0.0
    assert difference(a, torch.tensor([4.0, 1.0])) == 0.25
    assert difference(torch.zeros(2), torch.tensor([0.0, 1e-9])) == float("inf")
    assert difference(torch.zeros(2), torch.tensor([0.0, 1e-9]), floor=1.0) == pytest.approx(1e-9)
    assert difference(a, torch.tensor([4.0, float("nan")])) == float("inf")
    assert difference(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == 0.0


@pytest.mark.parametrize(
    ("fp32", "fp64", "verdict"),
    [
        (0.0, 0.0, "equal"),
        (1e-6, 1e-15, "rounding"),
        (1e-4, 1e-13, "rounding"),  # more than usual, and fp64 agrees
        (1e-2, 1e-9, "rounding"),  # an ill-conditioned step: it shrinks by 23 bits
        (1e-6, 1e-8, "fault"),  # smaller than rounding in fp32, but it stays
        (0.5, 0.5, "fault"),
        (0.0, 1e-8, "fault"),  # something computes in fp32
        (0.5, 1e-15, "fault"),  # in the fp32 code alone
    ],
)
def test_the_verdict_follows_from_how_a_difference_shrinks(fp32: float, fp64: float, verdict: str) -> None:
    assert judge({"fp32": fp32, "fp64": fp64}, BOUNDS)[0] == verdict


def test_one_precision_alone_is_judged_by_its_bound() -> None:
    assert judge({"fp32": 1e-6}, BOUNDS)[0] == "rounding" and judge({"fp32": 1e-4}, BOUNDS)[0] == "fault"


def test_lines_come_in_the_order_in_which_a_fault_spreads() -> None:
    values = {
        ("weight", "w0"): (0, 1.0), ("gradient", "w0"): (0, 1.0), ("gradient", "w1"): (1, 1.0), ("activation", "b"): (5, 1.0),
        ("activation", "a"): (1, 1.0), ("loss", "lm loss"): (0, 1.0), ("norm", "grad norm"): (0, 1.0),
    }  # fmt: skip
    a = {name: step(values) for name in ("fp32", "fp64")}
    b = {"fp32": step(values, 1e-7), "fp64": step({**values, ("gradient", "w0"): (0, 2.0), ("weight", "w0"): (0, 1.5)}, 1e-16)}
    b["fp32"] = step({**values, ("gradient", "w0"): (0, 2.0), ("weight", "w0"): (0, 1.5)}, 1e-7)
    lines = compare(a, b, BOUNDS)
    assert [(line.kind, line.name) for line in lines] == [
        ("activation", "a"), ("activation", "b"), ("loss", "lm loss"), ("gradient", "w1"), ("gradient", "w0"),
        ("norm", "grad norm"), ("weight", "w0"),
    ]  # fmt: skip
    faults = [line for line in lines if line.verdict == "fault"]
    assert faults[0].place == "step 1, gradient w0" and faults[0].ratio == pytest.approx(2.0)
    assert [line.name for line in faults] == ["w0", "w0"]


def test_bounds_grow_with_depth_and_length() -> None:
    assert rounding_bound("fp32", 4, 128) == pytest.approx(2.0**-24 * 56 * 128**0.5)
    assert rounding_bound("fp64", 4, 128) == 1e-10
