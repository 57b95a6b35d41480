"""A non-finite gradient stops (or skips) the step on every rank, names its rank, and reaches no checkpoint (R19)."""

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed

from megatron.core.errors import NonFiniteError
from megatron.training.objectives import CausalLM, ModelBatch
from tests.harness.d0 import write_d0
from tests.harness.distributed import run_distributed
from tests.harness.jobs import Job, train_job
from tests.harness.t0 import t0_flags


class Poisoned(CausalLM):
    """Rank 1's second microbatch of step 3 has a bad loss, or a finite loss with a bad gradient."""

    def __init__(self, value: float, in_gradient: bool) -> None:
        self.value, self.in_gradient, self.calls = value, in_gradient, 0

    def reduce(self, token_losses: torch.Tensor, batch: ModelBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Two microbatches per step: call 6 is step 3's second."""
        self.calls += 1
        loss, count = super().reduce(token_losses, batch)
        if torch.distributed.get_rank() == 1 and self.calls == 6:
            if self.in_gradient:
                loss.register_hook(lambda grad: grad * self.value)
            else:
                loss = loss * self.value
        return loss, count


def poisoned_job(flags: list[str], value: float, in_gradient: bool) -> tuple[str, Job | None]:
    """The error's text and reporter, or the finished job; runs on each rank."""
    try:
        return "", train_job(flags, objective=Poisoned(value, in_gradient))
    except NonFiniteError as error:
        return f"{error.reported}: {error}", None


def flags_for(tmp_path: pathlib.Path, **changes: Any) -> list[str]:
    """T0 on two ranks with two microbatches each; every step is saved."""
    write_d0(str(tmp_path / "d0"))
    return t0_flags(
        data_path=str(tmp_path / "d0"), train_iters=5, save=str(tmp_path / "run"), save_interval=1, eval_iters=0, log_interval=1,
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=5000, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
@pytest.mark.parametrize(("value", "in_gradient"), [(float("nan"), False), (float("inf"), False), (float("nan"), True)])
def test_culprit_is_named_and_the_newest_checkpoint_is_the_step_before(
    tmp_path: pathlib.Path, precision: dict[str, Any], value: float, in_gradient: bool
) -> None:
    texts = [text for text, _ in run_distributed(poisoned_job, 2, flags_for(tmp_path, **precision), value, in_gradient)]
    assert texts[0].startswith("False: ") and texts[1].startswith("True: "), texts
    for text in texts:
        assert "step 3" in text and "rank 1: " in text and "rank 0: " not in text, text
        assert ("gradient of " if in_gradient else "loss is ") in text
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"


def test_skip_policy_leaves_weights_untouched_and_goes_on(tmp_path: pathlib.Path) -> None:
    three = run_distributed(poisoned_job, 2, [*flags_for(tmp_path, nan_policy="skip", exit_interval=3)], float("nan"), True)
    (tmp_path / "two").mkdir()
    two = run_distributed(train_job, 2, flags_for(tmp_path / "two", exit_interval=2))
    for (text, job), reference in zip(three, two, strict=True):
        assert not text and job is not None and job.iteration == 3
        for name, value in reference.final.items():
            assert torch.equal(value, job.final[name]), name
