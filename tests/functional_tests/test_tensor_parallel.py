"""Training with tensor and sequence parallelism: norms, updates, dropout, resume in another layout (R01, R05, R09, R10)."""

import pathlib
from typing import Any

import pytest
import torch

from tests.functional_tests.test_data_parallel_parity import probe_flags
from tests.harness.distributed import run_distributed
from tests.harness.jobs import Job, train_job
from tests.harness.t0 import t0_flags

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2 SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp2dp2 SP, distributed optimizer": (
        4,
        {
            "tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True,
            "overlap_grad_reduce": True, "overlap_param_gather": True,
        },
    ),
}  # fmt: skip


def job(flags: list[str], save: str | None = None) -> Job:
    """Runs on each rank."""
    return train_job([*flags, *(["--save", save] if save else [])])


def true_rows(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the vocabulary's padding."""
    cut = ("embedding.word_embeddings.weight", "output_layer.weight")
    return {name: value[:101] if name in cut else value for name, value in weights.items()}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_gradients_and_norm_equal_one_process(data: pathlib.Path, layout: str) -> None:
    """The GRAD probe, with biases and QK-norm; fp32 bounds of `assert_same_gradient`."""
    world_size, options = LAYOUTS[layout]
    flags: dict[str, Any] = {"qk_layernorm": True, "disable_bias_linear": None, "micro_batch_size": 2}
    reference = job(probe_flags(data, **flags))
    expected = true_rows(reference.gradient())
    for got in run_distributed(job, world_size, probe_flags(data, **flags, **options)):
        gradient = true_rows(got.gradient())
        assert gradient.keys() == expected.keys()
        for name, grad in expected.items():
            assert float((gradient[name] - grad).abs().max()) <= 1e-4 * float(grad.abs().max()), name
        assert got.losses == pytest.approx(reference.losses, rel=1e-6)
        assert got.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_replicated_weights_stay_the_same_bits_on_all_tensor_ranks(data: pathlib.Path, layout: str) -> None:
    """20 Adam steps, clipped at 0.01; `weights` compares the bits of replicas."""
    world_size, options = LAYOUTS[layout]
    flags: dict[str, Any] = {"qk_layernorm": True, "disable_bias_linear": None, "train_iters": 20, "clip_grad": 0.01}
    reference = job(t0_flags(str(data), **flags))
    jobs = run_distributed(job, world_size, t0_flags(str(data), **flags, **options))
    for got in jobs:
        assert got.losses == pytest.approx(reference.losses, rel=1e-5)
        for name, value in true_rows(reference.final).items():
            torch.testing.assert_close(true_rows(got.final)[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_resumes_with_the_same_bits_and_recomputation_repeats_it(
    data: pathlib.Path, tmp_path: pathlib.Path, sequence_parallel: bool
) -> None:
    flags: dict[str, Any] = {
        "tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel, "hidden_dropout": 0.2, "attention_dropout": 0.2,
        "exit_interval": None,
    }  # fmt: skip
    whole = run_distributed(job, 2, t0_flags(str(data), **flags, train_iters=6))
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    again = run_distributed(job, 2, t0_flags(str(data), **flags, **recomputed, train_iters=6))
    folder = str(tmp_path / "save")
    run_distributed(job, 2, t0_flags(str(data), **{**flags, "exit_interval": 3}, train_iters=6), folder)
    resumed = run_distributed(job, 2, t0_flags(str(data), **flags, train_iters=6, load=folder))
    assert whole[0].losses == whole[1].losses == again[0].losses
    assert resumed[0].losses == whole[0].losses[3:]
    for name, value in whole[0].final.items():
        assert torch.equal(resumed[1].final[name], value) and torch.equal(again[0].final[name], value), name


def test_a_checkpoint_goes_on_at_another_tensor_parallel_size(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Saved by tp2 x dp2 with the distributed optimizer; tp1, tp2 and dp3 start from the same bits and go the same way."""
    folder = str(tmp_path / "save")
    world_size, options = LAYOUTS["tp2dp2 SP, distributed optimizer"]
    base: dict[str, Any] = {"global_batch_size": 12, "micro_batch_size": 1, "train_iters": 6, "ddp_bucket_size": 1000}
    straight = run_distributed(job, world_size, t0_flags(str(data), **base, **options))[0]
    saved = run_distributed(job, world_size, t0_flags(str(data), **base, **options, exit_interval=3), folder)[0]
    for ranks, other in ((1, {}), (2, LAYOUTS["tp2"][1]), (3, {"use_distributed_optimizer": True})):
        other_flags = t0_flags(str(data), **base, **other, load=folder)
        got = job(other_flags) if ranks == 1 else run_distributed(job, ranks, other_flags)[0]
        for name, value in true_rows(saved.final).items():
            assert torch.equal(true_rows(got.initial)[name], value), (ranks, name)
        assert got.losses == pytest.approx(straight.losses[3:], rel=1e-5), ranks
