"""Runs with each `--optimizer`: resume, change of the data-parallel size, a checkpoint of another optimizer, the example."""

import pathlib
from typing import Any

import pytest
import torch

from megatron.core.errors import CheckpointError
from tests.harness.distributed import run_distributed
from tests.harness.jobs import make_trainer, run_job, train_job
from tests.harness.logical import logical_tensors
from tests.harness.t0 import REPOSITORY, t0_flags
from tools.inspect_checkpoint import hashed, open_step

OVERLAP = dict(
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    overlap_param_gather_with_optimizer_step=True,
    ddp_bucket_size=5000,
)
MUON = dict(optimizer="muon", muon_fp32_matmul_prec="highest")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": dict(no_decoupled_weight_decay=True),
    "sgd": dict(optimizer="sgd", lr=1e-2),
    "lion": dict(optimizer="lion"),
    "muon": MUON,
}
STATES = {"adam": {"exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}, "lion": {"exp_avg"}}


def hashes(folder: pathlib.Path) -> dict[str, str]:
    """sha256 of every logical tensor of the newest step."""
    with open_step(folder) as step:
        return {name: value for name, value in dict(hashed(step)).items() if not name.startswith("rng.")}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_steps_and_two_resumed_equal_four(data: pathlib.Path, tmp_path: pathlib.Path, optimizer: str) -> None:
    flags = dict(data_path=data, train_iters=4, eval_iters=0, save_interval=2, **OVERLAP, **OPTIMIZERS[optimizer])
    whole = run_job(2, t0_flags(save=str(tmp_path / "a"), **flags))
    run_job(2, t0_flags(save=str(tmp_path / "b"), **{**flags, "exit_interval": 2}))
    resumed = run_job(2, t0_flags(save=str(tmp_path / "b"), **flags))
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert whole[0].losses[2:] == resumed[0].losses
    states = {name.split(".")[1] for name in hashes(tmp_path / "a") if name.startswith("optimizer.")} - {"main_param"}
    assert states == STATES.get(optimizer, {"momentum_buffer", "exp_avg", "exp_avg_sq"})


def loaded(flags: list[str]) -> dict[str, torch.Tensor]:
    """Logical optimizer values after loading, on each rank."""
    trainer = make_trainer(flags)
    trainer.data.close()
    return logical_tensors(trainer.optimizer.sharded_state_dict(), trainer.groups)


@pytest.mark.parametrize("optimizer", ["lion", "muon"])
def test_another_layout_loads_every_value_and_goes_on(data: pathlib.Path, tmp_path: pathlib.Path, optimizer: str) -> None:
    flags = dict(data_path=data, eval_iters=0, micro_batch_size=1, **OPTIMIZERS[optimizer])
    run_job(2, t0_flags(save=str(tmp_path), train_iters=2, save_interval=2, **flags, **OVERLAP))
    flags |= dict(load=str(tmp_path), no_load_rng=True, train_iters=4)
    expected = run_distributed(loaded, 2, t0_flags(**flags, **OVERLAP))[0]
    assert all(value.any() for name, value in expected.items() if "main_param" not in name)
    for size, layout in ((1, {}), (4, OVERLAP), (2, {"tensor_model_parallel_size": 2, **OVERLAP})):
        options = t0_flags(**flags, **layout)
        (values, *_) = run_distributed(loaded, size, options) if size > 1 else [loaded(options)]
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(values[name], value), (layout, name)
        losses = run_job(size, options)[0].losses
        assert len(losses) == 2 and torch.tensor(losses).isfinite().all()


def _refused(flags: list[str]) -> str:
    with pytest.raises(CheckpointError) as error:
        train_job(flags)
    return str(error.value)


def test_checkpoint_of_another_optimizer_is_refused_and_its_weights_can_be_taken(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    flags = dict(data_path=data, train_iters=1, eval_iters=0, **OVERLAP)
    before = run_job(2, t0_flags(save=str(tmp_path / "adam"), save_interval=1, **flags))
    wanted = {**flags, "load": str(tmp_path / "adam"), "train_iters": 2, **MUON}
    for text in run_distributed(_refused, 2, t0_flags(**wanted)):
        assert "--optimizer adam (main_param, exp_avg, exp_avg_sq)" in text
        assert "--optimizer muon (main_param, momentum_buffer, exp_avg, exp_avg_sq)" in text
        assert "--no-load-optim" in text
    after = run_job(2, t0_flags(**wanted, no_load_optim=True))
    for name, value in before[0].final.items():
        assert torch.equal(after[0].initial[name], value), name
    assert len(after[0].losses) == 1


SPLIT: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tensor_model_parallel_size": 2}),
    "pipeline": (2, {"pipeline_model_parallel_size": 2}),
    "pipeline of a tied head": (2, {"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": None}),
    "tensor and data": (4, {"tensor_model_parallel_size": 2}),
}


@pytest.mark.parametrize("layout", SPLIT)
def test_muon_in_a_split_model_takes_the_step_of_one_process(data: pathlib.Path, layout: str) -> None:
    size, options = SPLIT[layout]
    flags = dict(data_path=data, train_iters=1, eval_iters=0, clip_grad=0.0, micro_batch_size=1, muon_tp_mode="duplicated", **MUON)
    tied = {name: value for name, value in options.items() if "untie" in name}
    alone = run_job(1, t0_flags(**{**flags, **tied}))[0]
    jobs = run_job(size, t0_flags(**{**flags, **options}, **OVERLAP))
    compared = set()
    for job in jobs:
        for name, after in job.final.items():
            if after.dim() == 2 and "embedding" not in name and "output" not in name:
                step, other = alone.final[name] - alone.initial[name], after - job.initial[name]
                assert (step - other).norm() < 1e-3 * step.norm(), name  # fp32 gradients in another order, slopes up to 600 near zero
                compared.add(name)
    assert len(compared) == 16


def test_the_example_of_muon_learns() -> None:
    flags = ["--config", str(REPOSITORY / "configs" / "muon_cpu.yaml")]
    job = run_job(2, flags)[0]
    assert len(job.losses) == 20
    assert job.evaluations[-1] < job.losses[0] - 0.2


def test_muon_passes_the_overlap_check(data: pathlib.Path) -> None:
    flags = dict(data_path=data, train_iters=3, eval_iters=0, **MUON)
    quiet = run_job(2, t0_flags(**flags, use_distributed_optimizer=True, ddp_bucket_size=5000))
    checked = run_job(2, t0_flags(**flags, **OVERLAP, check_overlap=True))
    assert quiet[0].losses == checked[0].losses
    for name, value in quiet[0].final.items():
        assert torch.equal(checked[0].final[name], value), name
