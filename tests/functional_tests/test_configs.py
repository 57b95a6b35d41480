"""The example configurations of each kind of parallelism run as they are, for fewer steps."""

import pytest

from tests.functional_tests.test_tensor_parallel import job
from tests.harness.distributed import run_distributed
from tests.harness.t0 import REPOSITORY

RANKS = {"tp2_sp": 2, "pp2_interleaved": 2, "zero_bubble": 4}


@pytest.mark.parametrize("name", list(RANKS))
def test_an_example_configuration_trains(name: str) -> None:
    flags = ["--config", str(REPOSITORY / "configs" / f"{name}.yaml"), "--train-iters", "4"]
    first, *others = run_distributed(job, RANKS[name], flags)
    assert first.iteration == 4 and first.losses[-1] < first.losses[0]
    assert all(other.losses == first.losses for other in others)
