"""Steps of the optimizers: norm, clip, skip, scaling, groups, frozen and unused parameters, memory."""

import math

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.errors import ConfigError
from megatron.core.optimizer import (
    ChainedOptimizer,
    DistributedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    OptimizerConfig,
    describe_param_groups,
    get_megatron_optimizer,
    memory_report,
)
from megatron.core.optimizer.clip_grads import clip_coefficient, count_zeros, sum_of_squares
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.param_meta import ParamMeta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.harness.distributed import run_distributed
from tests.unit_tests.optimizer.toy import Toy, build, run_step

SHARDED = {"use_distributed_optimizer": True}
OVERLAP = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}


# Norm and clip


def _tensor_parallel_norm(distributed):
    """Two tensor-parallel ranks: one sharded parameter, gradients [3] and [4]; one replicated, gradient [12] on both."""
    world = torch.distributed.group.WORLD
    module = torch.nn.ParameterDict({"split": torch.nn.Parameter(torch.zeros(1)), "whole": torch.nn.Parameter(torch.zeros(1))})
    set_param_meta(module["split"], ParamMeta(tp_dim=0))
    groups = ProcessGroupCollection(world=world, tp=world, mp=world)
    _, optimizer = build({"use_distributed_optimizer": distributed}, {"clip_grad": 0.0}, groups=groups, module=module)
    module["split"].main_grad.fill_((3.0, 4.0)[torch.distributed.get_rank()])
    module["whole"].main_grad.fill_(12.0)
    return optimizer.step()


@pytest.mark.parametrize("distributed", [False, True])
def test_norm_counts_each_logical_parameter_once(distributed):
    for success, norm, zeros in run_distributed(_tensor_parallel_norm, 2, distributed):
        assert success
        assert norm == pytest.approx(13.0, rel=1e-7)
        assert zeros is None


def test_sum_of_squares_is_the_same_however_rows_are_dealt_out():
    data = torch.randn(40 * 32, generator=torch.Generator().manual_seed(0))
    whole = sum_of_squares([data]).item()
    assert whole == pytest.approx(data.double().square().sum().item(), rel=1e-6)
    assert sum_of_squares(data.split([32, 64, 320, 864])).item() == pytest.approx(whole, rel=1e-15)
    assert math.isnan(sum_of_squares([torch.full((32,), math.nan)]).item())
    assert sum_of_squares([torch.full((320,), 1e18)]).item() == pytest.approx(320e36, rel=1e-5)
    assert sum_of_squares([torch.full((32,), 1e30, dtype=torch.float64)]).item() == pytest.approx(32e60, rel=1e-12)
    assert sum_of_squares([]).item() == 0.0


def test_clip_coefficient_is_torchs():
    assert clip_coefficient(0.0, 5.0) == clip_coefficient(10.0, 5.0) == 1.0
    assert clip_coefficient(1.0, 4.0) == 1.0 / (4.0 + 1e-6)
    assert count_zeros([torch.tensor([0.0, 1.0, -0.0])]).item() == 2


def _zeros():
    model, optimizer = build(SHARDED, {"log_num_zeros_in_grad": True})
    return run_step(model, optimizer, 0)[4]


def test_zeros_are_counted_without_padding():
    """In step 0 the unused Linear (24 elements) and `sometimes` (81) get no gradient; nothing else is exactly zero."""
    for size in (1, 2):
        assert run_distributed(_zeros, size) == [105] * size


# Non-finite gradients and loss scales


def _skip(ddp, value, dtype):
    model, optimizer = build(ddp, {"clip_grad": 0.1}, dtype)
    run_step(model, optimizer, 0)
    optimizer.finish_param_sync()
    before = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    state = {main.name: main.state["exp_avg"].clone() for main in optimizer.main_params()}

    def poison(grad):
        return torch.full_like(grad, value) if torch.distributed.get_rank() == 1 else grad

    handle = model.module.last.weight.register_hook(poison)
    _, _, success, norm, _ = run_step(model, optimizer, 1)
    handle.remove()
    same = all(torch.equal(param, before[name]) for name, param in model.module.named_parameters())
    same = same and all(torch.equal(main.state["exp_avg"], state[main.name]) for main in optimizer.main_params())
    recovered = run_step(model, optimizer, 2)[2]
    return success, math.isfinite(norm), same, recovered, optimizer.param_groups[0]["step"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("ddp", "dtype"), [({}, torch.float32), (OVERLAP, torch.float32), (OVERLAP, torch.bfloat16)])
def test_a_non_finite_gradient_on_one_rank_changes_nothing_on_any(ddp, dtype, value):
    assert run_distributed(_skip, 2, ddp, value, dtype) == [(False, False, True, True, 2)] * 2


def _overflow():
    model, optimizer = build(OVERLAP, {"initial_loss_scale": 2.0**40, "hysteresis": 1}, torch.float16)
    results = []
    for step in range(40):
        _, _, success, norm, _ = run_step(model, optimizer, step)
        results.append((success, optimizer.get_loss_scale().item(), norm))
    return results


def test_fp16_scale_falls_until_gradients_fit_and_norms_are_unscaled():
    first, second = run_distributed(_overflow, 2)
    assert [(good, scale) for good, scale, _ in first] == [(good, scale) for good, scale, _ in second]
    good = [success for success, _, _ in first]
    skipped = good.index(True)
    assert skipped > 10
    assert first[skipped - 1][1] == 2.0 ** (40 - skipped)
    assert 0.01 < first[skipped][2] < 100


def test_static_loss_scale_changes_nothing_in_fp32():
    results = []
    for scale in (None, 1024.0):
        model, optimizer = build({}, {"loss_scale": scale})
        norms = [run_step(model, optimizer, step)[3] for step in range(3)]
        results.append((norms, [param.detach().clone() for param in model.module.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    assert all(torch.equal(one, two) for one, two in zip(results[0][1], results[1][1], strict=True))


def test_dynamic_scaler_follows_megatrons_rule():
    scaler = DynamicGradScaler(8.0, 1.0, 2.0, 0.5, growth_interval=2, hysteresis=2)
    seen = []
    for overflow in (True, True, True, False, False, True, True, False, True, True, True):
        scaler.update(overflow)
        seen.append(scaler.value)
    #       1st   2nd   3rd   ok    grows  1st  2nd   ok   3rd  4th  floor
    assert seen == [8.0, 4.0, 2.0, 2.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 1.0]
    other = DynamicGradScaler(64.0, 1.0, 2.0, 0.5, 2, 2)
    other.load_state_dict(scaler.state_dict())
    other.load_state_dict(ConstantGradScaler(3.0).state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert (scaler.scale.item(), scaler.inv_scale.item()) == (1.0, 1.0)


@pytest.mark.parametrize("arguments", [(0.5, 1.0, 2.0, 0.5, 1, 1), (8.0, 1.0, 1.0, 0.5, 1, 1), (-1.0, 1.0, 2.0, 0.5, 1, 1)])
def test_impossible_scalers_are_refused(arguments):
    with pytest.raises(ConfigError):
        DynamicGradScaler(*arguments)


# Parameter groups


def _named(optimizer):
    return {main.name: main.param.detach().clone() for main in optimizer.main_params()}


def test_only_matrices_decay():
    after = {}
    for decay in (0.0, 0.5):
        model, optimizer = build({}, {"weight_decay": decay, "clip_grad": 0.0})
        before = _named(optimizer)
        run_step(model, optimizer, 0)
        after[decay] = _named(optimizer)
    for name, start in before.items():
        difference = after[0.0][name] - after[0.5][name]
        if start.dim() < 2:
            assert not difference.any(), name
        else:
            torch.testing.assert_close(difference, 1e-2 * 0.5 * start, rtol=1e-3, atol=1e-7)
    listed = describe_param_groups(optimizer.param_groups)
    assert sorted(listed["decayed"]) == sorted(name for name, start in before.items() if start.dim() >= 2)
    assert sorted(listed["not decayed"]) == sorted(name for name, start in before.items() if start.dim() < 2)
    assert listed["separate learning rate"] == []


def test_embedding_and_output_take_the_decoupled_learning_rate():
    options = {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0, "lr": 1e-3, "decoupled_lr": 5e-4}
    model, optimizer = build({}, {**options, "decoupled_min_lr": 1e-5, "min_lr": 1e-6})
    before = _named(optimizer)
    run_step(model, optimizer, 1)
    for main in optimizer.main_params():
        grad = main.param.main_grad
        rate = 5e-4 if main.name == "embedding.weight" else 1e-3
        torch.testing.assert_close(before[main.name] - main.param, rate * grad, rtol=1e-3, atol=2.5e-7)  # 1 ulp of 2
    ends = {group["is_decoupled_lr"]: (group["max_lr"], group["min_lr"]) for group in optimizer.param_groups}
    assert ends == {False: (1e-3, 1e-6), True: (5e-4, 1e-5)}
    assert describe_param_groups(optimizer.param_groups)["separate learning rate"] == ["embedding.weight"]


def test_conditions_choose_decay_and_learning_rate():
    model, _ = build()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1.0),
        [model],
        no_weight_decay_cond=lambda name, param: "last" in name,
        scale_lr_cond=lambda name, param: "first" in name,
        lr_mult=0.1,
    )
    listed = describe_param_groups(optimizer.param_groups)
    assert sorted(listed["not decayed"]) == ["last.bias", "last.weight"]
    assert sorted(listed["separate learning rate"]) == ["first.bias", "first.weight"]
    assert {group["lr"] for group in optimizer.param_groups} == {1.0, 0.1}


def test_a_changed_learning_rate_counts_in_the_next_step():
    model, optimizer = build(SHARDED)
    run_step(model, optimizer, 0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = _named(optimizer)
    run_step(model, optimizer, 1)
    assert all(torch.equal(before[main.name], main.param) for main in optimizer.main_params())


# Frozen and unused parameters


def _frozen(ddp):
    model, optimizer = build(ddp, {"weight_decay": 0.0})
    before = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    for step in (0, 2, 4, 6, 8):  # `sometimes` is used in odd steps only
        run_step(model, optimizer, step)
    optimizer.finish_param_sync()
    return {name for name, param in model.module.named_parameters() if torch.equal(before[name], param)}


@pytest.mark.parametrize("ddp", [{}, {"overlap_grad_reduce": True}, SHARDED, {**OVERLAP, "bucket_size": 1}])
def test_frozen_and_unused_weights_do_not_change(ddp):
    expected = {"frozen.weight", "frozen.bias", "unused.weight", "unused.bias", "sometimes.weight"}
    for unchanged in run_distributed(_frozen, 2, ddp):
        assert unchanged == expected


# Construction


def test_the_configuration_chooses_the_optimizer():
    assert type(build()[1]) is FP32Optimizer
    assert type(build(dtype=torch.bfloat16)[1]) is Float16OptimizerWithFloat16Params
    assert type(build(OVERLAP, {"overlap_param_gather_with_optimizer_step": True})[1]) is DistributedOptimizer


def test_disagreeing_configurations_are_refused():
    def wrap(module=None, **options):
        config = DistributedDataParallelConfig(**options)
        return DistributedDataParallel(None, config, module or Toy(), pg_collection=ProcessGroupCollection.single_process())

    with pytest.raises(ConfigError, match="use_distributed_optimizer is True in OptimizerConfig and False"):
        get_megatron_optimizer(OptimizerConfig(lr=1.0, use_distributed_optimizer=True), [wrap()])
    with pytest.raises(ConfigError, match="needs overlap_param_gather=True"):
        config = OptimizerConfig(lr=1.0, use_distributed_optimizer=True, overlap_param_gather_with_optimizer_step=True)
        get_megatron_optimizer(config, [wrap(use_distributed_optimizer=True)])
    with pytest.raises(ConfigError, match="bf16 parameters"):
        get_megatron_optimizer(OptimizerConfig(lr=1.0), [wrap(Toy(torch.bfloat16))])
    with pytest.raises(ConfigError, match="wrap it: DistributedDataParallel"):
        get_megatron_optimizer(OptimizerConfig(lr=1.0), [Toy()])
    with pytest.raises(ConfigError, match="set lr"):
        get_megatron_optimizer(OptimizerConfig(), [wrap()])
    with pytest.raises(ConfigError, match="empty"):
        get_megatron_optimizer(OptimizerConfig(lr=1.0), [])
    with pytest.raises(ConfigError, match=r"optimizer_backend=apex can't be used \(.*CUDA"):
        get_megatron_optimizer(OptimizerConfig(lr=1.0, optimizer_backend="apex"), [wrap()])


# Chained


def test_a_chain_clips_by_the_common_norm_and_skips_together():
    chained = ChainedOptimizer([build({}, {"clip_grad": 0.1})[1], build(SHARDED, {"clip_grad": 0.1})[1]])
    alone = build({}, {"clip_grad": 0.1 / math.sqrt(2)})
    models = [optimizer.model_chunks[0] for optimizer in chained.chained_optimizers]
    for model in (*models, alone[0]):
        for param in model.param_to_name:
            param.main_grad.fill_(1.0)
    _, norm_of_one, _ = alone[1].step()
    success, norm, _ = chained.step()
    assert success
    assert norm == pytest.approx(norm_of_one * math.sqrt(2), rel=1e-6)
    for model in models:
        for param, expected in zip(model.param_to_name, alone[0].param_to_name, strict=True):
            torch.testing.assert_close(param, expected, rtol=1e-6, atol=1e-6)
    next(iter(models[1].param_to_name)).main_grad.fill_(math.nan)
    before = next(iter(models[0].param_to_name)).detach().clone()
    assert not chained.step()[0]
    assert torch.equal(before, next(iter(models[0].param_to_name)))
    param = next(iter(models[1].param_to_name))
    param.grad = torch.ones_like(param)
    chained.zero_grad(set_to_none=False)
    assert not param.grad.any()
    chained.zero_grad()
    assert param.grad is None


# Memory


def _memory(dtype, distributed, fp32_grads):
    ddp = {"use_distributed_optimizer": distributed, "grad_reduce_in_fp32": fp32_grads}
    module = torch.nn.Linear(64, 64).to(dtype)
    model, optimizer = build(ddp, {}, dtype, module=module)
    report = memory_report([model], optimizer)
    return report.total, report.padding, sum(param.numel() for param in module.parameters()), str(report)


@pytest.mark.parametrize(
    ("dtype", "fp32_grads", "whole", "shared"),
    [(torch.float32, True, 8, 8), (torch.bfloat16, True, 6, 12), (torch.float16, False, 4, 16)],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_bytes_per_parameter_are_the_formula(size, dtype, fp32_grads, whole, shared):
    for total, padding, numel, text in run_distributed(_memory, size, dtype, False, fp32_grads):
        assert total - padding == (whole + shared) * numel
        assert "moments" in text
    totals = run_distributed(_memory, size, dtype, True, fp32_grads)
    numel = totals[0][2]
    held = [total - padding for total, padding, _, _ in totals]
    assert sum(held) == size * whole * numel + shared * numel
    padded = {1: 4160, 2: 4224, 3: 4224}[size]  # 64 x 64 + 64 elements -> a multiple of lcm(size, 128)
    assert all(total == whole * padded + shared * padded // size for total, _, _, _ in totals)
