"""The harness itself: results come back in rank order, a rank's failure is the test's failure."""

import pytest
import torch
import torch.distributed

from tests.harness.distributed import run_distributed


def _sum_of_ranks(factor: int) -> int:
    value = torch.tensor(float(torch.distributed.get_rank() * factor))
    torch.distributed.all_reduce(value)
    return int(value) + torch.distributed.get_rank()


def _fail_on_rank_one() -> None:
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("rank one says no")


def test_results_come_back_in_rank_order() -> None:
    assert run_distributed(_sum_of_ranks, 2, 10) == [10, 11]


def test_failure_of_one_rank_is_reported_with_its_text() -> None:
    with pytest.raises(AssertionError, match="rank one says no"):
        run_distributed(_fail_on_rank_one, 2)
    assert run_distributed(_sum_of_ranks, 2, 1) == [1, 2]
