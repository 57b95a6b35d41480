"""Options of the loop that no other file exercises: each does what its help says."""

import gc
import math
import pathlib
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.store import CheckpointStore
from tests.harness.d0 import write_d0
from tests.harness.distributed import run_distributed
from tests.harness.jobs import make_trainer, read_metrics, train_job
from tests.harness.t0 import t0_flags


@pytest.fixture
def flags(tmp_path: pathlib.Path) -> dict[str, Any]:
    """D0 with a validation split, output below tmp_path."""
    write_d0(str(tmp_path / "d0"))
    return dict(data_path=str(tmp_path / "d0"), split="90,10,0", save=str(tmp_path / "run"), log_interval=1, train_iters=4)


def test_duration_ends_the_run_with_a_checkpoint(flags: dict[str, Any]) -> None:
    job = train_job(t0_flags(**flags, exit_duration_in_mins=1e-9))
    assert job.iteration == 1
    assert CheckpointStore(flags["save"]).latest_complete() == 1


def test_evaluation_changes_no_training_number(flags: dict[str, Any]) -> None:
    without = train_job(t0_flags(**{**flags, "save": None}, hidden_dropout=0.1))
    evaluated = train_job(t0_flags(**{**flags, "save": None}, hidden_dropout=0.1, eval_interval=1, eval_iters=2))
    assert len(evaluated.evaluations) == 4 and without.evaluations == []
    assert evaluated.losses == without.losses and evaluated.grad_norms == without.grad_norms


def test_skip_train_evaluates_the_loaded_weights_only(flags: dict[str, Any]) -> None:
    trained = train_job(t0_flags(**flags, eval_interval=4, eval_iters=2))
    again = train_job(t0_flags(**{**flags, "load": flags["save"], "save": None}, eval_iters=2, skip_train=True))
    assert again.losses == [] and again.evaluations == trained.evaluations


def test_params_norm_is_that_of_all_parameters(flags: dict[str, Any], tmp_path: pathlib.Path) -> None:
    trainer = make_trainer(t0_flags(**{**flags, "train_iters": 1}, log_params_norm=True, tensorboard_dir=str(tmp_path / "tb")))
    trainer.fit()
    expected = math.sqrt(sum(float(p.detach().double().square().sum()) for p in trainer.model.parameters()))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert events.Scalars("params-norm")[0].value == pytest.approx(expected, rel=1e-6)


def test_fp16_skips_overflows_lowers_the_scale_and_learns(flags: dict[str, Any]) -> None:
    train_job(t0_flags(**{**flags, "train_iters": 16}, fp16=True, initial_loss_scale=2.0**18, hysteresis=1))
    lines = read_metrics(pathlib.Path(flags["save"]) / "metrics.jsonl")
    assert lines[0]["skipped"] == 1 and lines[0]["loss_scale"] == 2.0**17
    trained = [line for line in lines if not line["skipped"]]
    assert trained and trained[-1]["lm_loss"] < trained[0]["lm_loss"]


def test_bf16_follows_fp32(flags: dict[str, Any]) -> None:
    full = train_job(t0_flags(**{**flags, "save": None}))
    half = train_job(t0_flags(**{**flags, "save": None}, bf16=True))
    assert half.losses == pytest.approx(full.losses, rel=2e-2)  # bf16 has 8 bits: 4e-3 per operation
    assert half.losses != full.losses


def test_manual_collection_leaves_the_collector_as_it_was(flags: dict[str, Any]) -> None:
    assert gc.isenabled()
    train_job(t0_flags(**{**flags, "save": None}, manual_gc=True, manual_gc_interval=2))
    assert gc.isenabled()


def ranks_agree(flags: list[str]) -> tuple[list[float], float]:
    """Losses and a sum over the final weights; runs on each rank."""
    job = train_job(flags)
    return job.losses, float(sum(value.double().sum() for value in job.final.values()))


def test_sgd_with_momentum_is_sharded_alike(flags: dict[str, Any]) -> None:
    options = {**flags, "save": None, "optimizer": "sgd", "lr": 0.1}
    plain = run_distributed(ranks_agree, 2, t0_flags(**options))
    sharded = run_distributed(ranks_agree, 2, t0_flags(**options, use_distributed_optimizer=True))
    assert plain[0] == plain[1] == sharded[0] == sharded[1]


@pytest.mark.parametrize("options", [{"recompute_granularity": "selective"}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}])
def test_recomputation_changes_no_number(flags: dict[str, Any], options: dict[str, Any]) -> None:
    usual = train_job(t0_flags(**{**flags, "save": None}, hidden_dropout=0.1))
    recomputed = train_job(t0_flags(**{**flags, "save": None}, hidden_dropout=0.1, **options))
    assert usual.losses == recomputed.losses
    for name, value in usual.final.items():
        assert torch.equal(value, recomputed.final[name]), name


@pytest.mark.parametrize(("level", "names"), [
    (0, ()),
    (1, ("batch-generator", "forward-backward", "all-grads-sync", "optimizer")),
    (2, ("batch-generator", "forward-backward", "forward-compute", "backward-compute", "all-grads-sync", "optimizer")),
])  # fmt: skip
def test_timing_level_prints_the_phases(
    flags: dict[str, Any], capsys: pytest.CaptureFixture[str], level: int, names: tuple[str, ...]
) -> None:
    train_job(t0_flags(**{**flags, "save": None, "log_interval": 2}, timing_log_level=level))
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("time (ms)")]
    assert len(printed) == (2 if level else 0)
    for line in printed:
        assert {part.split(":")[0].strip() for part in line.split("|")[1:]} == set(names)
