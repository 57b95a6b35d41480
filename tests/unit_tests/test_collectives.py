"""Collectives against plain sums of what each rank holds."""

import pytest
import torch

from megatron.core import collectives
from tests.harness.distributed import run_distributed


def _values(rank, numel, dtype):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _expected_sum(size, numel, dtype):
    """In rank order, in fp32 (fp64 for fp64)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = _values(0, numel, dtype).to(wide)
    for rank in range(1, size):
        total = total + _values(rank, numel, dtype).to(wide)
    return total


def _world():
    return torch.distributed.group.WORLD


def _ones_case(op):
    output = torch.zeros(4)
    collectives.reduce_scatter(output, torch.ones(4 * collectives.group_size(_world())), _world(), op=op)
    total = torch.ones(5)
    collectives.all_reduce(total, _world(), op=op)
    return output, total


@pytest.mark.parametrize("size", [2, 3])
def test_reduce_of_ones_is_one_for_mean_and_the_size_for_sum(size):
    for op, value in (("mean", 1.0), ("sum", float(size))):
        for output, total in run_distributed(_ones_case, size, op):
            assert torch.equal(output, torch.full((4,), value))
            assert torch.equal(total, torch.full((5,), value))


def _reduce_case(numel, dtype, op, in_place):
    size, rank = collectives.group_size(_world()), collectives.group_rank(_world())
    staging = collectives.Staging()
    for _ in range(2):  # the second round reuses the staging buffers
        data = _values(rank, numel * size, dtype)
        before = data.clone()
        output = data.view(size, -1)[rank] if in_place else torch.empty(numel, dtype=dtype)
        work = collectives.reduce_scatter(output, data, _world(), op=op, async_op=True, staging=staging)
        work.wait(0.5)
    rest = [index for index in range(size) if index != rank]
    assert torch.equal(data.view(size, -1)[rest], before.view(size, -1)[rest])
    whole = _values(rank, numel * size, dtype)
    collectives.all_reduce(whole, _world(), op=op, async_op=True, rank_order=True).wait(0.5)
    return output, whole, staging.nbytes


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("dtype", "op"),
    [(torch.float32, "sum"), (torch.float64, "mean"), (torch.bfloat16, "mean"), (torch.float16, "sum")],
)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_reductions_add_in_rank_order_and_in_fp32(size, dtype, op, in_place):
    numel = 70_001
    factor = 0.5 / size if op == "mean" else 0.5
    expected = (_expected_sum(size, numel * size, dtype) * factor).to(dtype)
    for rank, (output, whole, staged) in enumerate(run_distributed(_reduce_case, size, numel, dtype, op, in_place)):
        assert torch.equal(output, expected.view(size, -1)[rank])
        assert staged == (size - 1) * output.nbytes
        assert torch.equal(whole, expected)


def _gather_case(numel, in_place):
    size, rank = collectives.group_size(_world()), collectives.group_rank(_world())
    output = torch.zeros(numel * size, dtype=torch.bfloat16)
    own = output.view(size, -1)[rank] if in_place else torch.empty(numel, dtype=torch.bfloat16)
    own.copy_(_values(rank, numel, torch.bfloat16))
    collectives.all_gather(output, own, _world(), async_op=True).wait()
    return output


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_all_gather_concatenates_in_rank_order(size, in_place):
    expected = torch.cat([_values(rank, 1003, torch.bfloat16) for rank in range(size)])
    for output in run_distributed(_gather_case, size, 1003, in_place):
        assert torch.equal(output, expected)


def _many_in_flight():
    size, rank = collectives.group_size(_world()), collectives.group_rank(_world())
    works, outputs = [], []
    for index in range(8):
        data = torch.full((size * 64,), float(rank + index))
        outputs.append(torch.empty(64))
        works.append(collectives.reduce_scatter(outputs[-1], data, _world(), async_op=True))
        gathered = torch.full((size * 16,), -1.0)
        gathered.view(size, -1)[rank] = rank * 100 + index
        outputs.append(gathered)
        works.append(collectives.all_gather(gathered, gathered.view(size, -1)[rank], _world(), async_op=True))
    for work in reversed(works):
        work.wait()
    return outputs


def test_many_collectives_in_flight_do_not_mix():
    for outputs in run_distributed(_many_in_flight, 3):
        for index in range(8):
            assert torch.equal(outputs[2 * index], torch.full((64,), 3.0 + 3 * index))
            assert torch.equal(outputs[2 * index + 1], torch.tensor([0.0, 100.0, 200.0]).repeat_interleave(16) + index)


def _small_tools():
    rank = collectives.group_rank(_world())
    tensor = torch.tensor([float(rank), -1.0])
    parts = collectives.gather_to(tensor, _world(), 1)
    back = torch.empty(2)
    collectives.scatter_from(parts, back, _world(), 1)
    top = torch.tensor(rank)
    collectives.all_reduce(top, _world(), op="max")
    same = torch.tensor(float(rank))
    collectives.broadcast(same, _world(), 1)
    return parts, back, top.item(), same.item(), collectives.gather_objects(f"r{rank}", _world())


def test_gather_scatter_broadcast_and_objects():
    for rank, (parts, back, top, same, names) in enumerate(run_distributed(_small_tools, 2)):
        assert (parts is None) == (rank == 0)
        assert back.tolist() == [rank, -1.0]
        assert (top, same, names) == (1, 1.0, ["r0", "r1"])


def test_without_a_group_the_result_is_the_input():
    data, output = torch.arange(4.0), torch.empty(4)
    collectives.reduce_scatter(output, data, None, op="mean")
    assert torch.equal(output, data)
    collectives.all_reduce(data, None, op="mean")
    work = collectives.all_reduce(data, None, async_op=True)
    work.wait(2.0)
    assert data.tolist() == [0.0, 2.0, 4.0, 6.0]
    gathered = torch.zeros(4)
    collectives.all_gather(gathered, data, None)
    assert torch.equal(gathered, data)
    assert collectives.gather_objects(1, None) == [1]
