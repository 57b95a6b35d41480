"""Training models with experts: every layout equals one process, whatever the schedule (R02, R04, R09, R11, R13)."""

import pathlib
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.model_state import model_sharded_tensors
from megatron.training.gpt_builder import build_gpt_model
from megatron.training.trainer import Trainer
from tests.functional_tests.test_data_parallel_parity import probe_flags
from tests.functional_tests.test_tensor_parallel import true_rows
from tests.harness.distributed import run_distributed
from tests.harness.jobs import Job, make_trainer, read_metrics, train_job
from tests.harness.logical import logical_tensors
from tests.harness.t0 import t0_flags

MOE: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2, "micro_batch_size": 1}
LOSSES: dict[str, Any] = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 3000}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}
EP2 = {"expert_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {**EP2, **ALL_TO_ALL}),
    "ep2, all-gather, overlap": (2, {**EP2, **OVERLAP, "check_overlap": True}),
    "tp2, whole experts": (2, {**TP2, "expert_tensor_parallel_size": 1, **ALL_TO_ALL}),
    "pp2 zb_v": (2, {**PP2, "pipeline_schedule": "zb_v"}),
    "dp4ep2, overlap": (4, {**EP2, **ALL_TO_ALL, **OVERLAP}),
    "dp4ep2, two instances": (4, {**EP2, **ALL_TO_ALL, "use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}),
    "tp2ep2": (4, {**EP2, **TP2, **ALL_TO_ALL, **OVERLAP}),
    "pp2ep2 interleaved": (4, {**EP2, **PP2, "virtual_pipeline_model_parallel_size": 2, **ALL_TO_ALL, **OVERLAP}),
    "pp2ep2 zb_h1": (4, {**EP2, **PP2, "pipeline_schedule": "zb_h1", **ALL_TO_ALL, **OVERLAP}),
    "etp2ep2": (4, {**EP2, "expert_tensor_parallel_size": 2, **ALL_TO_ALL}),
    "recomputed": (1, {"moe_layer_recompute": True}),
    "ep2, recomputed by layers": (
        2, {**EP2, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    ),
}  # fmt: skip


def job(flags: list[str], save: str | None = None, metrics: str | None = None, **kwargs: Any) -> Job:
    """Runs on each rank."""
    return train_job([*flags, *(["--save", save] if save else []), *(["--metrics-file", metrics] if metrics else [])], **kwargs)


def on_ranks(ranks: int, flags: list[str], **kwargs: Any) -> list[Job]:
    """On one rank in this process."""
    return [job(flags, **kwargs)] if ranks == 1 else run_distributed(job, ranks, flags, timeout=120, **kwargs)


def assert_same_step(reference: Job, got: Job) -> None:
    """Losses, norm (R09), gradients: read off updated weights, they are known to half a unit of the weights' last place."""
    expected, gradient = true_rows(reference.gradient()), true_rows(got.gradient())
    before, after = true_rows(reference.initial), true_rows(reference.final)
    assert gradient.keys() == expected.keys()
    for name, grad in expected.items():
        reading = 2.0**-23 * float(before[name].abs().max() + after[name].abs().max())
        assert float((gradient[name] - grad).abs().max()) <= 1e-5 * float(grad.abs().max()) + reading, name
        assert torch.equal(true_rows(got.initial)[name], before[name]), name
    assert got.losses == pytest.approx(reference.losses, abs=1e-6)
    assert got.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5)


BALANCE = ("load_balancing_loss", "z_loss", "max_over_mean_tokens_per_expert")


@pytest.fixture(scope="module")
def single(data: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, dict[str, Any]]:
    """One process with both losses, and its line of metrics."""
    file = str(tmp_path_factory.mktemp("single") / "metrics.jsonl")
    result = job(probe_flags(data, **MOE, **LOSSES, moe_per_layer_logging=True), metrics=file)
    return result, read_metrics(file)[0]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_gradients_norm_and_logged_losses_equal_one_process(
    data: pathlib.Path, tmp_path: pathlib.Path, single: tuple[Job, dict[str, Any]], layout: str
) -> None:
    """R02 and R09; the router's gradient is among the others."""
    ranks, options = LAYOUTS[layout]
    reference, line = single
    file = str(tmp_path / "metrics.jsonl")
    flags = probe_flags(data, **MOE, **LOSSES, **options, moe_per_layer_logging=True)
    for got in on_ranks(ranks, flags, metrics=file):
        assert_same_step(reference, got)
    logged = read_metrics(file)[0]
    names = [*BALANCE, *(f"moe/{name}_layer_{layer}" for name in BALANCE for layer in range(4))]
    assert {name: logged[name] for name in names} == pytest.approx({name: line[name] for name in names}, rel=1e-5)


def test_losses_change_the_routers_gradient_by_their_coefficient_alone(data: pathlib.Path, single: tuple[Job, dict[str, Any]]) -> None:
    """R02: the part of the auxiliary loss in the router's gradient, by differences of coefficients, doubles with the coefficient."""
    routers = [name for name in single[0].initial if name.endswith("router.weight")]
    grads = [job(probe_flags(data, **MOE, moe_aux_loss_coeff=coefficient)).gradient() for coefficient in (0.0, 1.0, 2.0)]
    for name in routers:
        once, twice = grads[1][name] - grads[0][name], grads[2][name] - grads[0][name]
        assert float(once.norm()) > 0
        torch.testing.assert_close(twice, 2 * once, rtol=1e-3, atol=1e-3 * float(once.abs().max()))


def test_one_layer_with_experts_on_the_last_of_two_stages_trains_and_resumes(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """R04 (e): the first stage has no expert parameters at all."""
    model = {**MOE, **LOSSES, "num_layers": 2, "moe_layer_freq": "[0,1]", "train_iters": 6}
    reference = job(t0_flags(str(data), **model))
    folder = str(tmp_path / "save")
    layout = {**EP2, **PP2, **ALL_TO_ALL, **OVERLAP}
    run_distributed(job, 4, t0_flags(str(data), **model, **layout, exit_interval=3), folder)
    for got in run_distributed(job, 4, t0_flags(str(data), **model, **layout, load=folder)):
        assert got.losses == pytest.approx(reference.losses[3:], rel=1e-5)
        assert got.grad_norms == pytest.approx(reference.grad_norms[3:], rel=1e-4)


def test_frozen_experts_stay_and_nobody_waits_for_them(data: pathlib.Path) -> None:
    """R04: rank 0's experts, and everything before the first router, take no gradient."""
    model = {**MOE, **LOSSES, "train_iters": 3, "freeze": ["embedding.*", "decoder.layers.0.self_*", "decoder.layers.*.mlp.experts.[01].*"]}
    reference = job(t0_flags(str(data), **model))
    for got in run_distributed(job, 2, t0_flags(str(data), **model, **EP2, **ALL_TO_ALL, **OVERLAP)):
        assert got.losses == pytest.approx(reference.losses, rel=1e-6)
        for name, value in got.final.items():
            assert torch.equal(value, got.initial[name]) == (".experts.0." in name or ".experts.1." in name or "embedding" in name or (
                name.startswith("decoder.layers.0.self_"))), name


class Steered:
    """A model builder whose routers send every token to the experts with the largest bias."""

    def __init__(self, bias: list[float]) -> None:
        self.bias = torch.tensor(bias)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        model = build_gpt_model(*args, **kwargs)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(self.bias)
        return model


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("bias", [[9.0, 9.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0]])
def test_experts_and_ranks_without_tokens_train_like_one_process(data: pathlib.Path, bias: list[float], dispatcher: str) -> None:
    """R11: top-1, weight decay 0.1; idle experts get zero gradients, so the same decay and moments. In fp64: Adam would blow up rounding."""
    steering = {
        **MOE, "fp64": True, "moe_router_topk": 1, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0, "train_iters": 3, **OVERLAP,
    }  # fmt: skip
    reference = job(t0_flags(str(data), **steering), model_builder=Steered(bias))
    flags = t0_flags(str(data), **steering, **EP2, moe_token_dispatcher_type=dispatcher)
    for got in run_distributed(job, 2, flags, model_builder=Steered(bias), timeout=60):
        assert got.losses == pytest.approx(reference.losses, rel=1e-12)
        assert got.grad_norms == pytest.approx(reference.grad_norms, rel=1e-10)
        final = true_rows(got.final)
        for name, value in true_rows(reference.final).items():
            torch.testing.assert_close(final[name], value, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
    idle = "decoder.layers.1.mlp.experts.2.linear_fc1.weight"
    torch.testing.assert_close(reference.final[idle], reference.initial[idle] * (1 - 1e-3 * 0.1) ** 3)


BIASED: dict[str, Any] = {
    **MOE, **LOSSES, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.01,
    "lr_decay_style": "cosine", "lr_warmup_iters": 2, "train_iters": 10,
}  # fmt: skip
RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "1p": (1, {}),
    "dp2": (2, OVERLAP),
    "ep2": (2, {**EP2, **ALL_TO_ALL, **OVERLAP}),
    "tp2pp2": (4, {**TP2, **PP2}),
}


def state_of(flags: list[str]) -> dict[str, torch.Tensor]:
    """Runs on each rank: every logical tensor of a run that has just loaded its checkpoint: parameters, buffers, optimizer."""
    trainer: Trainer = make_trainer(flags)
    trainer.optimizer.finish_param_sync()
    local = dict(trainer.optimizer.sharded_state_dict())
    for chunk in trainer.model_chunks:
        local |= model_sharded_tensors(chunk.module, trainer.groups)
    trainer.loggers.close()
    return logical_tensors(local, trainer.groups)


def loaded_state(ranks: int, flags: list[str]) -> dict[str, torch.Tensor]:
    """`state_of` on some ranks; the first one's."""
    return state_of(flags) if ranks == 1 else run_distributed(state_of, ranks, flags)[0]


@pytest.mark.parametrize("layout", list(RESUMED))
def test_resume_is_bit_exact_expert_biases_included(data: pathlib.Path, tmp_path: pathlib.Path, layout: str) -> None:
    """R13: 10 = 5 + 5."""
    ranks, options = RESUMED[layout]
    flags = t0_flags(str(data), **BIASED, **options)
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    straight = on_ranks(ranks, flags, save=whole)[0]
    on_ranks(ranks, [*flags, "--exit-interval", "5"], save=cut)
    resumed = on_ranks(ranks, flags, save=cut)[0]
    assert resumed.losses == straight.losses[5:] and resumed.grad_norms == straight.grad_norms[5:]
    first, second = loaded_state(ranks, [*flags, "--load", whole]), loaded_state(ranks, [*flags, "--load", cut])
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    biases = [value for name, value in first.items() if name.endswith("expert_bias")]
    assert len(biases) == 4 and all(float(bias.abs().max()) > 0 for bias in biases)


def test_a_checkpoint_is_the_same_bits_in_every_layout(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Saved by ep2, by one process and by tp2ep2; read by each of them: weights, buffers and optimizer state."""
    layouts: dict[str, tuple[int, dict[str, Any]]] = {
        "ep2": (2, {**EP2, **ALL_TO_ALL, **OVERLAP}), "1p": (1, {"use_distributed_optimizer": True}),
        "tp2ep2": (4, {**EP2, **TP2, **OVERLAP}),
    }  # fmt: skip
    base = {**BIASED, "train_iters": 2}
    for writer, (ranks, options) in layouts.items():
        folder = str(tmp_path / writer)
        on_ranks(ranks, t0_flags(str(data), **base, **options), save=folder)
        states = {
            reader: loaded_state(n, t0_flags(str(data), **base, **other, load=folder)) for reader, (n, other) in layouts.items()
        }
        experts = [name for name in states["1p"] if name.startswith("optimizer.exp_avg.decoder.layers.0.mlp.experts.")]
        assert len(experts) == 4 * 2
        for reader, state in states.items():
            assert state.keys() == states["1p"].keys(), (writer, reader)
            for name, value in states["1p"].items():
                assert torch.equal(true_rows({name.removeprefix("model."): state[name]}).popitem()[1], true_rows(
                    {name.removeprefix("model."): value}).popitem()[1]), (writer, reader, name)


def test_bf16_trains_on_two_expert_ranks_as_on_one(data: pathlib.Path) -> None:
    """Sums over data-parallel ranks are of another order; bf16 has 8 bits."""
    model = {**MOE, **LOSSES, "bf16": True, "train_iters": 3, **OVERLAP}
    reference = job(t0_flags(str(data), **model))
    for got in run_distributed(job, 2, t0_flags(str(data), **model, **EP2, **ALL_TO_ALL)):
        assert got.losses == pytest.approx(reference.losses, rel=2e-3)


def test_evaluation_drops_no_token_and_counts_nothing(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A capacity is for training: the loss of an evaluation is that of a model without one."""
    flags = {**MOE, "train_iters": 0, "split": "50,50,0", "eval_iters": 2, "skip_train": True, "lr": 1e-3}
    plain = job(t0_flags(str(data), **flags)).evaluations
    assert plain and job(t0_flags(str(data), **flags, moe_expert_capacity_factor=0.25)).evaluations == plain
