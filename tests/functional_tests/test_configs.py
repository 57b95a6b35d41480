"""The example configurations: those of each kind of parallelism run, those of published models check out at their size."""

import re

import pytest

from megatron.training.config import parse_command_line
from megatron.training.dry_run import dry_run_report
from tests.functional_tests.test_tensor_parallel import job
from tests.harness.distributed import run_distributed
from tests.harness.t0 import REPOSITORY

RANKS = {"tp2_sp": 2, "pp2_interleaved": 2, "zero_bubble": 4, "4d": 4}


@pytest.mark.parametrize("name", list(RANKS))
def test_an_example_configuration_trains(name: str) -> None:
    flags = ["--config", str(REPOSITORY / "configs" / f"{name}.yaml"), "--train-iters", "4"]
    first, *others = run_distributed(job, RANKS[name], flags)
    assert first.iteration == 4 and first.losses[-1] < first.losses[0]
    assert all(other.losses == first.losses for other in others)


# ranks, parameters as published, in 1e9, and the last digit that the publication gives
PUBLISHED = {
    "gpt2": (8, 0.124, 0.001),
    "gpt3_175b": (1024, 175, 1),
    "llama3_8b": (64, 8.03, 0.01),
    "llama3_70b": (256, 70.6, 0.1),
    "llama3_405b": (16384, 405.9, 0.1),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_published_model_validates_and_has_its_parameters(name: str) -> None:
    ranks, billions, digit = PUBLISHED[name]
    flags = ["--config", str(REPOSITORY / "configs" / f"{name}.yaml"), "--dry-run", "--world-size", str(ranks)]
    command = parse_command_line(flags, {})
    report = dry_run_report(command.resolved.config, command.world_size)
    assert f"configuration is valid for {ranks} rank(s)" in report
    found = re.search(r"^model: ([\d,]+) parameters$", report, re.MULTILINE)
    assert found is not None
    assert abs(int(found[1].replace(",", "")) / 1e9 - billions) <= digit / 2


def test_every_configuration_is_covered_by_a_test() -> None:
    elsewhere = {"debug_cpu", "gpt2_data", "llama_1b", "muon_cpu", "quickstart"}
    names = {path.stem for path in (REPOSITORY / "configs").glob("*.yaml")}
    assert names - elsewhere == RANKS.keys() | PUBLISHED.keys()
