"""Stopping and resuming continues as if the run had never stopped (R13, R05, R26); overlap changes nothing but speed (R27)."""

import pathlib
from typing import Any

import pytest
import torch

from tests.harness.jobs import read_metrics, run_job
from tests.harness.t0 import t0_flags
from tools.inspect_checkpoint import hashed, open_step

TIMES = ("step_time_s", "data_time_s", "exposed_comm_time_s", "tokens_per_s", "tflops_per_rank", "mfu", "peak_memory_bytes", "eta_s")
OVERLAP = dict(
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    overlap_param_gather_with_optimizer_step=True,
    ddp_bucket_size=5000,
)
COSINE = dict(lr_decay_style="cosine", lr_warmup_iters=2, lr_decay_iters=10, train_iters=10, log_interval=1, eval_interval=2, eval_iters=2)
DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.1)


def tensor_hashes(folder: pathlib.Path) -> dict[str, str]:
    """sha256 of every logical tensor, optimizer state included, of a save directory's newest step or of one step's folder."""
    with open_step(folder) as step:
        return dict(hashed(step))


def numbers(save: pathlib.Path) -> list[dict[str, Any]]:
    """Metrics without clock times and memory."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(save / "metrics.jsonl")]


@pytest.mark.parametrize(("world_size", "overlap"), [(1, {}), (2, {}), (2, OVERLAP), (1, OVERLAP)])
def test_five_steps_and_five_resumed_equal_ten(data: pathlib.Path, tmp_path: pathlib.Path, world_size: int, overlap: dict[str, Any]) -> None:
    flags = dict(data_path=data, split="90,10,0", save_interval=5, **COSINE, **DROPOUT, **overlap)
    run_job(world_size, t0_flags(save=str(tmp_path / "a"), **flags))
    run_job(world_size, t0_flags(save=str(tmp_path / "b"), **{**flags, "exit_interval": 5}))
    assert read_metrics(tmp_path / "b" / "metrics.jsonl")[-1]["iteration"] <= 5
    run_job(world_size, t0_flags(save=str(tmp_path / "b"), **flags))
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    assert tensor_hashes(tmp_path / "a") == tensor_hashes(tmp_path / "b")


def test_overlap_changes_no_number(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    flags = dict(data_path=data, split="90,10,0", save_interval=3, micro_batch_size=1, **COSINE, **DROPOUT)
    off = dict(use_distributed_optimizer=True, ddp_bucket_size=5000)
    for name, extra in (("off", off), ("on", OVERLAP), ("again", OVERLAP)):
        run_job(2, t0_flags(save=str(tmp_path / name), **flags, **extra))
    for name in ("on", "again"):
        assert numbers(tmp_path / "off") == numbers(tmp_path / name)
        for step in (3, 6, 9, 10):
            folder = f"iter_{step:07d}"
            assert tensor_hashes(tmp_path / "off" / folder) == tensor_hashes(tmp_path / name / folder)


def test_tied_head_and_accumulation_under_overlap(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    flags = dict(data_path=data, micro_batch_size=1, train_iters=4, eval_iters=0, untie_embeddings_and_output_weights=None)
    off = run_job(2, t0_flags(**flags, use_distributed_optimizer=True, ddp_bucket_size=3000))
    on = run_job(2, t0_flags(**flags, **{**OVERLAP, "ddp_bucket_size": 3000}))
    assert off[0].losses == on[0].losses
    for name, value in off[0].final.items():
        assert torch.equal(value, on[0].final[name]) and torch.equal(value, on[1].final[name]), name


@pytest.mark.parametrize("path", [(2, 1), (2, 3), (2, 4), (3, 2)])
def test_another_data_parallel_size_continues_the_same_run(data: pathlib.Path, tmp_path: pathlib.Path, path: tuple[int, int]) -> None:
    flags = dict(
        data_path=data, hidden_size=36, num_attention_heads=6, num_query_groups=2, ffn_hidden_size=68, global_batch_size=12,
        micro_batch_size=1, eval_iters=0, train_iters=6, save_interval=3, **{**OVERLAP, "ddp_bucket_size": 1000},
    )
    whole = run_job(path[0], t0_flags(save=str(tmp_path / "whole"), **flags))
    first = run_job(path[0], t0_flags(save=str(tmp_path / "cut"), **{**flags, "exit_interval": 3}))
    at_three = tensor_hashes(tmp_path / "cut")
    # loading at the new size and saving at once leaves every logical value as it was
    run_job(path[1], t0_flags(load=str(tmp_path / "cut"), save=str(tmp_path / "moved"), **{**flags, "train_iters": 3}))
    assert at_three == tensor_hashes(tmp_path / "cut")
    second = run_job(path[1], t0_flags(save=str(tmp_path / "cut"), **flags))
    assert sorted(i for job in first + second for step in job.sample_ids for i in step) == list(range(72))
    assert second[0].losses == pytest.approx(whole[0].losses[3:], rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch_size", [1])
def test_global_batches_do_not_depend_on_the_layout(data: pathlib.Path, world_size: int, micro_batch_size: int) -> None:
    flags = t0_flags(data_path=data, global_batch_size=12, micro_batch_size=micro_batch_size, train_iters=3, eval_iters=0)
    jobs = run_job(world_size, flags)
    for step in range(3):
        assert sorted(i for job in jobs for i in job.sample_ids[step]) == list(range(12 * step, 12 * step + 12))
    assert {job.consumed_samples for job in jobs} == {36}
