"""fp16: an overflow on one rank skips the step on all, and the scale moves by hysteresis, window and minimum, also after a resume."""

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed

from megatron.core.errors import NonFiniteError
from megatron.training.objectives import CausalLM, ModelBatch
from tests.functional_tests.test_resume import numbers, tensor_hashes
from tests.harness.d0 import write_d0
from tests.harness.distributed import run_distributed
from tests.harness.jobs import train_job
from tests.harness.t0 import t0_flags

SCALER = {"fp16": True, "initial_loss_scale": 64, "min_loss_scale": 16, "hysteresis": 2, "loss_scale_window": 3}
PLAIN: dict[str, Any] = {}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
ENGINES = {
    "plain": PLAIN,
    "plain, overlapped": {"overlap_grad_reduce": True},
    "sharded": {**SHARDED, "overlap_param_gather_with_optimizer_step": True},
    "sharded, fp32 gradients": {**SHARDED, "accumulate_allreduce_grads_in_fp32": True},
}
MICROBATCHES = 2  # per rank and step


class Overflows(CausalLM):
    """In the steps given, the gradients of rank 1's last microbatch are infinite."""

    def __init__(self, steps: tuple[int, ...], done: int) -> None:
        self.steps, self.calls = steps, done * MICROBATCHES

    def reduce(self, token_losses: torch.Tensor, batch: ModelBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """`done` steps were taken before this run."""
        self.calls += 1
        loss, count = super().reduce(token_losses, batch)
        step, last = -(-self.calls // MICROBATCHES), self.calls % MICROBATCHES == 0
        if torch.distributed.get_rank() == 1 and last and step in self.steps:
            loss.register_hook(lambda grad: grad * float("inf"))
        return loss, count


def overflowing(flags: list[str], steps: tuple[int, ...], done: int = 0) -> tuple[str, int, bool]:
    """(error's text, exit code, whether this rank reports it) of a run; runs on each rank."""
    try:
        train_job(flags, objective=Overflows(steps, done))
    except NonFiniteError as error:
        return str(error), error.exit_code, error.reported
    return "", 0, False


def several(runs: list[tuple[list[str], tuple[int, ...], int]]) -> list[tuple[str, int, bool]]:
    """One run after the other; runs on each rank."""
    return [overflowing(*run) for run in runs]


def flags(tmp_path: pathlib.Path, name: str, **changes: Any) -> list[str]:
    """T0 on two ranks with two microbatches each."""
    values = dict(data_path=str(tmp_path / "d0"), train_iters=8, save=str(tmp_path / name), eval_iters=0, ddp_bucket_size=5000)
    return t0_flags(**{**values, **SCALER, **changes})


@pytest.mark.parametrize("engine", ENGINES)
def test_scale_and_skips_follow_the_rule_and_go_on_after_a_resume(tmp_path: pathlib.Path, engine: str) -> None:
    write_d0(str(tmp_path / "d0"))
    bad, options = (2, 3, 7), ENGINES[engine]
    runs = [
        (flags(tmp_path, "whole", **options), bad, 0),
        (flags(tmp_path, "cut", **options, exit_interval=2), bad, 0),
        (flags(tmp_path, "cut", **options), bad, 2),
    ]
    assert run_distributed(several, 2, runs, timeout=120) == [[("", 0, False)] * 3] * 2
    lines = numbers(tmp_path / "whole")
    assert [line["skipped"] for line in lines] == [0, 1, 1, 0, 0, 0, 1, 0]
    #                                 hysteresis: 2   1   halved      doubled, restored   1
    assert [line["loss_scale"] for line in lines] == [64, 64, 32, 32, 32, 64, 64, 64]
    assert numbers(tmp_path / "cut") == lines
    assert tensor_hashes(tmp_path / "cut") == tensor_hashes(tmp_path / "whole")


def test_an_overflow_at_the_minimum_stops_the_run_or_is_skipped_as_asked(tmp_path: pathlib.Path) -> None:
    write_d0(str(tmp_path / "d0"))
    lowest = {"hysteresis": 1, "min_loss_scale": 32, "save_interval": 1, **SHARDED}
    bad = (2, 3, 4, 5, 6, 7, 8)
    runs = [
        (flags(tmp_path, "stop", **lowest), bad, 0),
        (flags(tmp_path, "skip", **lowest, nan_policy="skip", max_consecutive_skips=4), bad, 0),
        (flags(tmp_path, "constant", **{**lowest, "loss_scale": 32}), bad, 0),
    ]
    by_rank = run_distributed(several, 2, runs, timeout=120)
    for rank in range(2):
        (stop, code, _), (skip, _, _), (constant, _, _) = by_rank[rank]
        assert code == 1
        assert "at step 3" in stop and "the loss scale is at its minimum (min_loss_scale=32)" in stop
        assert "reduced gradient of " in stop and "nothing was saved" in stop
        assert "at step 5" in skip and "4 steps in a row were skipped" in skip
        assert "at step 2" in constant and "the loss scale is constant (loss_scale=32)" in constant
    for case in range(3):
        assert sorted(by_rank[rank][case][2] for rank in range(2)) == [False, True]
    assert (tmp_path / "stop" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
