"""DistributedDataParallel and finalize_model_grads: gradients against hand-made sums, hooks, NaN names, errors."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.errors import CommunicationStateError, ConfigError, ParallelStateError
from megatron.core.param_meta import ParamMeta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.harness.distributed import run_distributed
from tests.unit_tests.optimizer.toy import groups_of_all_ranks


def wrap(module, reduce_op="mean", groups=None, **options):
    config = DistributedDataParallelConfig(**options)
    return DistributedDataParallel(None, config, module, pg_collection=groups or groups_of_all_ranks(), reduce_op=reduce_op)


def final_grads(model):
    """Whole gradients by name; with the distributed optimizer put together from all ranks' shards."""
    grads = {name: torch.zeros(param.numel()) for name, param in model.module.named_parameters() if param.requires_grad}
    for part in model.valid_grads():
        grads[part.name][part.start : part.start + part.grad.numel()] = part.grad
    if model.ddp_config.use_distributed_optimizer and torch.distributed.is_initialized():
        for grad in grads.values():
            torch.distributed.all_reduce(grad)
    return grads


OPTIONS = [
    {},
    {"overlap_grad_reduce": True},
    {"use_distributed_optimizer": True},
    {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 1},
    {"average_in_collective": True},
    {"average_in_collective": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True},
]

SUMS, COUNTS = (12.0, 3.0, 20.0, 2.0), (4, 12, 10, 2)


def _token_weighted(micro_batches_per_rank, reduce_op, options):
    """Rank r has some of the four sequences; the gradient of weight w is the sum of its losses d(loss)/dw."""
    module = torch.nn.Linear(1, 1, bias=False)
    model = wrap(module, reduce_op, **options)
    rank = torch.distributed.get_rank()
    mine = range(rank * micro_batches_per_rank, (rank + 1) * micro_batches_per_rank)
    model.zero_grad_buffer()
    with model.no_sync():
        for index in mine[:-1]:
            (model(torch.ones(1)) * SUMS[index]).sum().backward()
    (model(torch.ones(1)) * SUMS[mine[-1]]).sum().backward()
    finalize_model_grads([model], torch.tensor(sum(COUNTS[index] for index in mine)))
    return final_grads(model)["weight"].item()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduce_op", ["mean", "sum"])
def test_token_weighted_gradient_is_37_over_28_in_every_layout(reduce_op, options):
    for size in (1, 2, 4):
        for value in run_distributed(_token_weighted, size, 4 // size, reduce_op, options):
            assert abs(value - 37 / 28) < 1e-6


def _mean_and_sum(reduce_op, options, use_finalize):
    module = torch.nn.Linear(3, 2)
    model = wrap(module, reduce_op, **options)
    model.zero_grad_buffer(overwrite=True)
    (model(torch.ones(1, 3)) * (torch.distributed.get_rank() + 1)).sum().backward()
    if use_finalize:
        finalize_model_grads(model)
    else:
        model.finish_grad_sync()
    return final_grads(model)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [2, 3])
def test_mean_and_sum_over_ranks(size, options):
    total = sum(range(1, size + 1))
    cases = (("mean", False, total / size), ("sum", False, total), ("sum", True, total / size))
    for reduce_op, use_finalize, expected in cases:
        if options.get("average_in_collective") and not use_finalize:
            expected = total / size
        for grads in run_distributed(_mean_and_sum, size, reduce_op, options, use_finalize):
            for grad in grads.values():
                torch.testing.assert_close(grad, torch.full_like(grad, expected), rtol=1e-6, atol=0)


def test_zero_tokens_give_zero_gradients():
    model = wrap(torch.nn.Linear(2, 2))
    model.zero_grad_buffer(overwrite=True)
    (model(torch.ones(2)) * 0).sum().backward()
    finalize_model_grads([model], torch.tensor(0))
    assert not any(grad.any() for grad in final_grads(model).values())


def test_zero_grad_buffer_zeroes_and_overwrite_leaves_nothing_of_the_last_step():
    used, unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model = wrap(torch.nn.ModuleList([used, unused]))
    for buffer in model.all_buffers():
        buffer.grad_data.fill_(7.0)
    model.zero_grad_buffer(overwrite=True)
    used(torch.ones(2)).sum().backward()
    model.finish_grad_sync()
    assert torch.equal(used.weight.main_grad, torch.ones(2, 2))
    assert not unused.weight.main_grad.any()
    model.zero_grad_buffer()
    assert not used.weight.main_grad.any()


def test_a_gradient_after_the_reduction_is_an_error():
    model = wrap(torch.nn.Linear(2, 2), overlap_grad_reduce=True)
    model(torch.ones(2)).sum().backward()
    with pytest.raises(CommunicationStateError, match="no_sync"):
        model(torch.ones(2)).sum().backward()


def test_scale_gradients():
    model = wrap(torch.nn.Linear(2, 2))
    model(torch.ones(2)).sum().backward()
    model.scale_gradients(0.5)
    assert torch.equal(model.module.weight.main_grad, torch.full((2, 2), 0.5))


def _nonfinite(dtype, value):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(dtype)
    model = wrap(module, use_distributed_optimizer=True, overlap_grad_reduce=True)
    model.zero_grad_buffer(overwrite=True)
    scale = torch.ones(2, dtype=dtype)
    if torch.distributed.get_rank() == 1:
        scale[0] = value
    (module[1](module[0](torch.ones(2, dtype=dtype)).detach()) * scale).sum().backward()
    module[0](torch.ones(2, dtype=dtype)).sum().backward()
    model.finish_grad_sync()
    names = model.nonfinite_grads()
    model.zero_grad_buffer(overwrite=True)
    return names, model.nonfinite_grads()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_gradients_are_named_on_the_rank_they_come_from(dtype, value):
    (first, _), (second, after) = run_distributed(_nonfinite, 2, dtype, value)
    assert first == []
    assert second == ["1.bias", "1.weight"]
    assert after == []


def test_large_finite_gradients_are_not_reported():
    model = wrap(torch.nn.Linear(2, 2, bias=False))
    (model(torch.full((2,), 3e38)) * 1.0).sum().backward()  # four of them overflow a sum
    assert model.nonfinite_grads() == []


def test_fp16_overflows_are_left_to_the_loss_scaler():
    model = wrap(torch.nn.Linear(2, 2).half())
    (model(torch.ones(2).half()) * math.inf).sum().backward()
    assert model.nonfinite_grads() == []


class Swapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.runs_last = torch.nn.Linear(16, 16)
        self.runs_first = torch.nn.Linear(16, 16)

    def forward(self, hidden):
        return self.runs_last(self.runs_first(hidden))


def _stale():
    """Ranks write 1 and 2 into their shards and start the gathers; the forward must see both."""
    model = wrap(Swapped(), use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=1)
    for group in model.bucket_groups:
        group.local_shard(group.buckets[0].param_data).fill_(torch.distributed.get_rank() + 1.0)
        group.mark_written()
    model.start_param_sync()
    assert all(group.param_gather_handle is not None for group in model.bucket_groups)
    out = model(torch.ones(16)).detach()
    assert all(group.param_gather_handle is None for group in model.bucket_groups)
    model.disable_forward_pre_hook()
    model.enable_forward_pre_hook()
    return out, [param.detach().clone() for param in model.parameters()]


def test_modules_wait_for_their_own_parameters_in_any_order():
    for out, params in run_distributed(_stale, 2):
        last_weight, last_bias, first_weight, first_bias = params
        hidden = F.linear(torch.ones(16), first_weight, first_bias)
        assert torch.equal(out, F.linear(hidden, last_weight, last_bias))
        assert first_weight.flatten().tolist() == [1.0] * 128 + [2.0] * 128


def _broadcast():
    rank = torch.distributed.get_rank()
    module = torch.nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    for param in module.parameters():
        param.data.fill_(rank + 5.0)
    model = wrap(module)
    model.broadcast_params()
    return [param.unique().tolist() for param in module.parameters()]


def test_broadcast_params_copies_from_rank_0_frozen_ones_too():
    assert run_distributed(_broadcast, 2) == [[[5.0], [5.0]]] * 2


def _experts():
    """World of 2 = ep2: each rank has its own expert; expert-data-parallel groups have one rank."""
    module = torch.nn.ModuleDict({"dense": torch.nn.Linear(2, 1, bias=False), "expert": torch.nn.Linear(2, 1, bias=False)})
    set_param_meta(module["expert"].weight, ParamMeta(is_expert=True))
    world = torch.distributed.group.WORLD
    groups = ProcessGroupCollection(world=world, dp=world, dp_cp=world, intra_dp_cp=world)
    model = wrap(module, groups=groups, use_distributed_optimizer=True)
    rank = torch.distributed.get_rank()
    (module["dense"](torch.ones(2)) * (rank + 1) + module["expert"](torch.ones(2)) * (rank + 1) * 10).sum().backward()
    model.finish_grad_sync()
    assert (len(model.buffers), len(model.expert_parallel_buffers), len(model.bucket_groups)) == (1, 1, 2)
    return {part.name: part.grad.tolist() for part in model.valid_grads()}


def test_experts_have_their_own_buffers_and_are_averaged_over_all_data_parallel_ranks():
    first, second = run_distributed(_experts, 2)
    assert first == {"dense.weight": [1.5, 1.5], "expert.weight": [5.0, 5.0]}
    assert second == {"expert.weight": [10.0, 10.0]}


def _copies(kind):
    """Two ranks of a tensor- or pipeline-parallel job: copies of one weight get the sum of both gradients."""
    module = torch.nn.Linear(2, 1)
    set_param_meta(module.weight, ParamMeta(**{kind: True}))
    world = torch.distributed.group.WORLD
    name = "tp" if kind == "tp_partial_grad" else "embd"
    model = wrap(module, groups=ProcessGroupCollection(world=world, **{name: world}), use_distributed_optimizer=True)
    (module(torch.ones(2)) * (torch.distributed.get_rank() + 1)).sum().backward()
    finalize_model_grads(model)
    return module.weight.main_grad.tolist(), module.bias.main_grad.tolist()


@pytest.mark.parametrize("kind", ["tp_partial_grad", "shared_embedding"])
def test_copies_on_other_axes_are_summed(kind):
    assert run_distributed(_copies, 2, kind) == [([[3.0, 3.0]], [1.0]), ([[3.0, 3.0]], [2.0])]


def _no_groups():
    with pytest.raises(ParallelStateError, match="initialize_model_parallel"):
        DistributedDataParallel(None, DistributedDataParallelConfig(), torch.nn.Linear(1, 1))
    return True


def test_two_processes_without_groups_are_an_error():
    assert run_distributed(_no_groups, 2) == [True, True]


def test_wrong_use_is_refused():
    with pytest.raises(ConfigError, match="reduce_op='max'"):
        wrap(torch.nn.Linear(1, 1), "max")
    model = wrap(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="not enabled"):
        model.disable_forward_pre_hook()
    with pytest.raises(ConfigError, match="assign"):
        model.load_state_dict({}, assign=True)
    with pytest.raises(ConfigError, match="does not match the process groups"):
        wrap(torch.nn.Linear(1, 1), use_distributed_optimizer=True, num_distributed_optimizer_instances=2)


def test_a_model_without_trainable_parameters_steps():
    module = torch.nn.Linear(2, 2).requires_grad_(False)
    model = wrap(module, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
    model.zero_grad_buffer()
    finalize_model_grads([model], torch.tensor(3))
    model.start_param_sync()
    assert list(model.valid_grads()) == []
