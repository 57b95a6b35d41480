"""num_distributed_optimizer_instances: sums inside an instance, then between them; dense parameters and experts."""

import pytest
import torch

from megatron.core.distributed.param_and_grad_buffer import ReduceState
from megatron.core.errors import ConfigError
from megatron.core.param_meta import ParamMeta, set_param_meta
from megatron.core.process_groups_config import create_process_groups
from megatron.core.rank_grid import RankGrid
from tests.harness.distributed import run_distributed
from tests.unit_tests.optimizer.toy import build

SHAPES = ((5, 7), (300,), (3, 11), (1,))


def gradients(rank, dtype):
    """What rank `rank` adds: one gradient per parameter."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def module_of(dtype, experts=()):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    for index in experts:
        set_param_meta(params[index], ParamMeta(is_expert=True))
    return torch.nn.ParameterList(params)


def run(instances, overlap, bucket_size, dtype, ep=1, experts=(), average=False):
    """One step on the ranks' own gradients: (reduced shards by parameter, state of each reduction after the backward,
    parameters after the step, norm)."""
    grid = RankGrid(dp=torch.distributed.get_world_size(), ep=ep)
    groups = create_process_groups(grid, optimizer_instances=instances)
    ddp = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap,
        "bucket_size": bucket_size,
        "num_distributed_optimizer_instances": instances,
        "average_in_collective": average,
        "check_overlap": True,
    }
    module = module_of(dtype, experts)
    model, optimizer = build(ddp, {"clip_grad": 0.5}, dtype, reduce_op="mean", groups=groups, module=module)
    model.zero_grad_buffer(overwrite=True)
    own = gradients(torch.distributed.get_rank(), dtype)
    sum((param * grad).sum() for param, grad in zip(module, own, strict=True)).backward()
    states = [group.reduce_state for group in model.bucket_groups]
    model.finish_grad_sync()
    shards = {part.name: (part.start, part.grad.clone()) for part in model.valid_grads()}
    _, norm, _ = optimizer.step()
    optimizer.finish_param_sync()
    return shards, states, [param.detach().clone() for param in module], norm


def many(cases):
    """Each case's `run`: one message to the ranks for all of them."""
    return [run(*case) for case in cases]


def assert_shards(by_rank, expected, holders):
    """Each rank of `holders` has its parts of `expected` (a list per parameter), and together they have all of it once."""
    covered = [0] * len(SHAPES)
    for rank in holders:
        for name, (start, grad) in by_rank[rank].items():
            whole = expected(rank, int(name))
            if whole is not None:
                assert torch.equal(grad, whole.flatten()[start : start + grad.numel()]), (rank, name)
                covered[int(name)] += grad.numel()
    for index, shape in enumerate(SHAPES):
        if expected(holders[0], index) is not None:
            assert covered[index] == torch.Size(shape).numel()


CASES = [(2, overlap, bucket, torch.float32) for overlap in (False, True) for bucket in (1, 128, None)]


def test_sums_inside_an_instance_come_first_and_modes_and_buckets_are_bit_equal():
    grads = [gradients(rank, torch.float32) for rank in range(4)]
    total = [((a + b) + (c + d)) * 0.25 for a, b, c, d in zip(*grads, strict=True)]
    by_rank = run_distributed(many, 4, CASES)
    reference = by_rank[0][0]
    for index in range(len(CASES)):
        for instance in ((0, 1), (2, 3)):
            assert_shards([results[index][0] for results in by_rank], lambda rank, name: total[name], instance)
        for results in by_rank:
            assert results[index][3] == pytest.approx(reference[3], rel=1e-12)
            assert all(torch.equal(one, two) for one, two in zip(results[index][2], reference[2], strict=True))


def test_every_reduction_but_the_last_is_between_instances_when_the_backward_ends():
    (case,) = [case for case in CASES if case[1] and case[2] == 1]
    for ((_, states, _, _),) in run_distributed(many, 4, [case]):
        assert states == [ReduceState.BETWEEN_INSTANCES] * 3 + [ReduceState.IN_FLIGHT]


@pytest.mark.parametrize("average", [False, True])
def test_any_number_of_instances_gives_the_same_gradients_in_float64(average):
    cases = [(instances, True, 128, torch.float64, 1, (), average) for instances in (1, 2, 4)]
    grads = [gradients(rank, torch.float64) for rank in range(4)]
    mean = [sum(parts) / 4 for parts in zip(*grads, strict=True)]
    for one, *others in run_distributed(many, 4, cases):
        for shards, _, params, norm in (one, *others):
            assert norm == pytest.approx(one[3], rel=1e-12)
            for name, (start, grad) in shards.items():
                torch.testing.assert_close(grad, mean[int(name)].flatten()[start : start + grad.numel()], rtol=1e-12, atol=1e-15)
            for got, expected in zip(params, one[2], strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)  # Adam's kernel takes fp32 arguments


def test_16_bit_gradients_are_rounded_inside_and_between():
    (case,) = [(2, True, 128, torch.bfloat16)]
    grads = [gradients(rank, torch.bfloat16) for rank in range(4)]
    inside = [[(a.float() + b.float()).bfloat16() for a, b in zip(*pair, strict=True)] for pair in (grads[:2], grads[2:])]
    total = [((a.float() + b.float()) * 0.25).bfloat16() for a, b in zip(*inside, strict=True)]
    by_rank = run_distributed(many, 4, [case])
    assert_shards([results[0][0] for results in by_rank], lambda rank, name: total[name], (0, 1))


EXPERTS = (1, 2)


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_are_reduced_over_the_ranks_that_hold_them(ep):
    """ep=2: ranks 0 and 2 hold one set of experts, 1 and 3 another. Gradients are averaged over all four either way."""
    grads = [gradients(rank, torch.float32) for rank in range(4)]

    def expected(rank, name, expert):
        if (name in EXPERTS) != expert:
            return None
        if expert and ep == 2:
            return (grads[rank % 2][name] + grads[rank % 2 + 2][name]) * 0.25
        return ((grads[0][name] + grads[1][name]) + (grads[2][name] + grads[3][name])) * 0.25

    cases = [(instances, overlap, 128, torch.float32, ep, EXPERTS) for instances, overlap in ((2, False), (2, True), (1, True))]
    by_rank = run_distributed(many, 4, cases)
    for index in (0, 1):
        shards = [results[index][0] for results in by_rank]
        for instance in ((0, 1), (2, 3)):
            assert_shards(shards, lambda rank, name: expected(rank, name, expert=False), instance)
            for holders in ((rank,) for rank in instance) if ep == 2 else (instance,):
                assert_shards(shards, lambda rank, name: expected(rank, name, expert=True), holders)
    for quiet, overlapped, single in by_rank:
        assert quiet[3] == overlapped[3] == pytest.approx(single[3], rel=1e-6)
        for one, two, three in zip(quiet[2], overlapped[2], single[2], strict=True):
            assert torch.equal(one, two)
            torch.testing.assert_close(one, three, rtol=1e-6, atol=1e-6)


def test_instances_that_do_not_cut_the_experts_ranks_are_refused():
    with pytest.raises(ConfigError, match="does not cut the 2 ranks that hold copies of an expert"):
        RankGrid(dp=8, ep=4).expert_instance_groups(4)


@pytest.mark.parametrize(("tp", "ep", "dp", "instances"), [(1, 1, 4, 2), (1, 2, 4, 2), (2, 2, 4, 2), (2, 4, 8, 2), (1, 2, 12, 3)])
def test_an_experts_shards_stay_inside_an_instance(tp, ep, dp, instances):
    grid = RankGrid(tp=tp, ep=ep, dp=dp)
    intra, inter = grid.expert_instance_groups(instances)
    members = grid.optimizer_instance_groups(instances)[2]
    assert sorted(rank for ranks in intra for rank in ranks) == list(range(grid.world_size))
    assert sorted(rank for ranks in inter for rank in ranks) == list(range(grid.world_size))
    assert all(any(set(ranks) <= set(own) for own in members) for ranks in intra)
    for ranks in inter:  # one of each instance, at the same place
        assert [sum(rank in own for rank in ranks) for own in members] == [1] * instances
        assert len({next(part.index(rank) for part in intra if rank in part) for rank in ranks}) == 1
