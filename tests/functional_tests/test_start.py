"""All layouts start with the same model, dropout differs where data differs (R31); parameter groups (R25); frozen weights (R04)."""

import pathlib

import pytest
import torch
import torch.distributed

from tests.harness.distributed import run_distributed
from tests.harness.jobs import make_trainer, train_job
from tests.harness.t0 import t0_flags


def initial_weights(flags: list[str]) -> dict[str, torch.Tensor]:
    """Runs on each rank."""
    trainer = make_trainer(flags)
    trainer.data.close()
    return {name: p.detach().clone() for name, p in trainer.model.module.named_parameters()}


def dropout_mask(flags: list[str]) -> torch.Tensor:
    """Runs on each rank."""
    make_trainer(flags).data.close()
    return torch.nn.functional.dropout(torch.ones(4, 64), 0.5)


def test_every_layout_starts_with_the_same_model(data: pathlib.Path) -> None:
    alone = initial_weights(t0_flags(data_path=data))
    for rank in run_distributed(initial_weights, 2, t0_flags(data_path=data, use_distributed_optimizer=True)):
        assert rank.keys() == alone.keys()
        for name, value in alone.items():
            assert torch.equal(value, rank[name]), name
    assert not torch.equal(alone["decoder.layers.0.mlp.linear_fc1.weight"], alone["decoder.layers.1.mlp.linear_fc1.weight"])


def test_dropout_masks_differ_over_data_parallel_ranks_and_repeat_with_the_seed(data: pathlib.Path) -> None:
    flags = t0_flags(data_path=data, hidden_dropout=0.5)
    first, second = run_distributed(dropout_mask, 2, flags)
    assert not torch.equal(first, second)
    assert torch.equal(first, run_distributed(dropout_mask, 2, flags)[0])


def test_decay_applies_to_matrices_only(data: pathlib.Path) -> None:
    flags = dict(data_path=data, train_iters=1, eval_iters=0, disable_bias_linear=None, lr=1e-3, min_lr=1e-3)
    none = train_job(t0_flags(**flags, weight_decay=0.0))
    half = train_job(t0_flags(**flags, weight_decay=0.5))
    for name, start in none.initial.items():
        if start.dim() == 1:
            assert torch.equal(none.final[name], half.final[name]), name
        else:
            torch.testing.assert_close(none.final[name] - half.final[name], 1e-3 * 0.5 * start, rtol=1e-3, atol=1e-8)


def test_separate_learning_rate_of_embedding_and_output_survives_a_resume(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    flags = dict(
        data_path=data, eval_iters=0, optimizer="sgd", sgd_momentum=0.0, clip_grad=0.0, weight_decay=0.0, lr=1e-3, min_lr=1e-3,
        decoupled_lr=5e-4, decoupled_min_lr=5e-4, save=str(tmp_path), use_distributed_optimizer=True,
    )  # fmt: skip
    unit = {**flags, "lr": 1.0, "min_lr": 1.0, "decoupled_lr": None, "decoupled_min_lr": None, "train_iters": 1, "save": None}
    gradient = train_job(t0_flags(**unit)).gradient()
    for job in run_distributed(train_job, 2, t0_flags(**flags, train_iters=1)):
        for name, value in gradient.items():
            rate = 5e-4 if name.startswith(("embedding.", "output_layer.")) else 1e-3
            torch.testing.assert_close(job.gradient()[name], rate * value, rtol=1e-2, atol=1e-7, msg=name)
    trainer_rates = run_distributed(rates_after_load, 2, t0_flags(**flags, train_iters=2))
    assert trainer_rates[0] == trainer_rates[1] == {True: 5e-4, False: 1e-3}


def rates_after_load(flags: list[str]) -> dict[bool, float]:
    """Learning rate by `is_decoupled_lr` after a step that follows a load; runs on each rank."""
    trainer = make_trainer(flags)
    assert trainer.state.iteration == 1
    trainer.fit()
    return {bool(group["is_decoupled_lr"]): group["lr"] for group in trainer.optimizer.param_groups}


@pytest.mark.parametrize("overlap", [False, True])
def test_frozen_weights_do_not_move_and_the_rest_trains_as_in_one_process(data: pathlib.Path, overlap: bool, tmp_path: pathlib.Path) -> None:
    flags = dict(data_path=data, train_iters=5, eval_iters=0, freeze=["embedding.*", "decoder.layers.1.*"])
    extra = dict(use_distributed_optimizer=True, overlap_grad_reduce=overlap or None, overlap_param_gather=overlap or None)
    alone = train_job(t0_flags(**flags))
    jobs = run_distributed(train_job, 2, t0_flags(**flags, **extra, ddp_bucket_size=2000, save=str(tmp_path)))
    for name, start in alone.initial.items():
        frozen = name.startswith(("embedding.", "decoder.layers.1."))
        for job in jobs:
            assert torch.equal(start, job.final[name]) == frozen, name
            torch.testing.assert_close(job.final[name], alone.final[name], rtol=1e-4, atol=1e-5)
    resumed = run_distributed(train_job, 2, t0_flags(**{**flags, "train_iters": 6}, **extra, ddp_bucket_size=2000, save=str(tmp_path)))
    assert resumed[0].iteration == 6
