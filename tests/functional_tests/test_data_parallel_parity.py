"""Gradients, losses and norms of every data-parallel way to run a global batch equal the single process's (R08, R20, R35)."""

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed

from megatron.training.objectives import CausalLM, ModelBatch
from tests.harness.distributed import run_distributed
from tests.harness.jobs import Job, train_job
from tests.harness.t0 import t0_flags

KEPT = (4, 12, 10, 2)  # unmasked tokens of samples 0..3


class MaskedBySample(CausalLM):
    """Keeps the first KEPT[sample] tokens of each sequence."""

    def prepare(self, batch: dict[str, torch.Tensor], *, seed: int) -> ModelBatch:
        """The loss mask depends on the sample id only."""
        kept = torch.tensor(KEPT)[batch["sample_ids"] % 4]
        mask = (torch.arange(batch["tokens"].size(1))[None] < kept[:, None]).float()
        return super().prepare({**batch, "loss_mask": mask}, seed=seed)


def probe_flags(data: pathlib.Path, **changes: Any) -> list[str]:
    """One step of SGD with lr 1: the update is the gradient."""
    probe = dict(
        data_path=str(data), train_iters=1, optimizer="sgd", sgd_momentum=0.0, lr=1.0, min_lr=1.0, weight_decay=0.0, clip_grad=0.0,
        lr_decay_style="constant", eval_iters=0,
    )
    return t0_flags(**{**probe, **changes})


def probe(flags: list[str], masked: bool = False) -> Job:
    """Runs on each rank."""
    return train_job(flags, **({"objective": MaskedBySample()} if masked else {}))


def assert_same_gradient(reference: Job, job: Job) -> None:
    """max|a - b| <= 1e-4 max|a| for every tensor (reading a gradient off updated weights costs digits: a norm's gain is 1, its
    gradient 1e-2, so one unit in the last place is 1e-5 of it), and the norms' ratio, which names factor errors."""
    expected, got = reference.gradient(), job.gradient()
    assert expected.keys() == got.keys()
    for name, a in expected.items():
        ratio = float(got[name].norm() / a.norm())
        assert abs(ratio - 1) < 1e-4, f"{name}: norm ratio {ratio}"
        assert float((a - got[name]).abs().max()) <= 1e-4 * float(a.abs().max()), name
    assert job.losses[0] == pytest.approx(reference.losses[0], rel=1e-6)
    assert job.grad_norms[0] == pytest.approx(reference.grad_norms[0], rel=1e-5)


@pytest.fixture(scope="module")
def single(data: pathlib.Path) -> Job:
    """One process, one microbatch."""
    return probe(probe_flags(data, micro_batch_size=8))


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_accumulation_changes_no_gradient(data: pathlib.Path, single: Job, micro_batch_size: int) -> None:
    assert_same_gradient(single, probe(probe_flags(data, micro_batch_size=micro_batch_size)))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("average", [False, True])
def test_data_parallel_gradient_equals_one_process(data: pathlib.Path, single: Job, world_size: int, average: bool) -> None:
    changes: dict[str, Any] = {"ddp_average_in_collective": True} if average else {}
    plain = run_distributed(probe, world_size, probe_flags(data, **changes))
    sharded = run_distributed(probe, world_size, probe_flags(data, use_distributed_optimizer=True, **changes))
    for jobs in (plain, sharded):
        for job in jobs:
            assert_same_gradient(single, job)
    for name, value in plain[0].final.items():
        assert torch.equal(value, sharded[0].final[name]), name
        assert torch.equal(value, plain[-1].final[name]), name


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_loss_weighs_every_unmasked_token_alike(data: pathlib.Path, world_size: int, micro_batch_size: int) -> None:
    flags = {"global_batch_size": 4}
    reference = probe(probe_flags(data, micro_batch_size=4, **flags), masked=True)
    job_flags = probe_flags(data, micro_batch_size=micro_batch_size, use_distributed_optimizer=world_size > 1 or None, **flags)
    job = probe(job_flags, True) if world_size == 1 else run_distributed(probe, world_size, job_flags, True)[0]
    assert_same_gradient(reference, job)
