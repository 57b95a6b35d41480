"""Collectives against plain sums of what each rank holds."""

import contextlib
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import collectives
from tests.harness.distributed import run_distributed


def _values(rank, numel, dtype):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


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


SPECIAL = (float("inf"), float("-inf"), float("nan"), -0.0, 1e-42, 3.38e38, -3.38e38, 65504.0, 6e-8, 1.0, 2.0**-24, 257.0)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _wild(rank, numel, dtype):
    """Ordinary values and special ones."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    values = torch.randn(numel, generator=generator)
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (numel,), generator=generator)]
    return torch.where(torch.rand(numel, generator=generator) < 0.3, special, values).to(dtype)


def _sum_of(parts, factor):
    """In rank order, in fp32 (fp64 for fp64), then the factor, then one rounding."""
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return (total * factor).to(parts[0].dtype)


def _assert_same_bits(actual, expected):
    """NaN is NaN; everything else has the same bits, the sign of zero included."""
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[actual.itemsize]
    number = ~expected.isnan()
    assert torch.equal(actual[number].view(integer), expected[number].view(integer))


@contextlib.contextmanager
def _constants(**values):
    """Other message sizes, so that small tensors take the ways of large ones."""
    before = {name: getattr(collectives, name) for name in values}
    for name, value in values.items():
        setattr(collectives, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(collectives, name, value)


def _reductions_case(numel, extra, dtype, op, scale, piece):
    group = _world()
    size, rank = collectives.group_size(group), collectives.group_rank(group)
    factor = (scale or 1.0) / (size if op == "mean" else 1)
    everyones = [_wild(peer, numel * size, dtype) for peer in range(size)]
    expected = _sum_of(everyones, factor)
    own, rest = expected.view(size, -1)[rank], [peer for peer in range(size) if peer != rank]
    with _constants(_PIECE=piece):
        nbytes = everyones[0].nbytes
        for small, by_all_to_all, in_place in itertools.product((nbytes, nbytes + 1), (False, True), (False, True)):
            data = everyones[rank].clone()
            output = data.view(size, -1)[rank] if in_place else torch.empty(numel, dtype=dtype)
            with _constants(_SMALL=small):  # messages, gloo's own all-to-all
                work = collectives.reduce_scatter(output, data, group, op, async_op=True, by_all_to_all=by_all_to_all)
            work.wait(scale)
            _assert_same_bits(output, own)
            _assert_same_bits(data.view(size, -1)[rest].flatten(), everyones[rank].view(size, -1)[rest].flatten())
        odd = [_wild(peer, numel * size + extra, dtype) for peer in range(size)]
        for small in (odd[0].nbytes * (size - 1), odd[0].nbytes * (size - 1) - 1):  # one phase, two phases
            with _constants(_SMALL=small):
                whole = odd[rank].clone()
                collectives.all_reduce(whole, group, op, async_op=True, rank_order=True).wait(scale)
            _assert_same_bits(whole, _sum_of(odd, factor))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 4),
    numel=st.integers(0, 70),
    extra=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(["sum", "mean"]),
    scale=st.sampled_from([None, 0.5, 1 / 3]),
    piece=st.sampled_from([8, 64, 4 << 20]),
)
def test_reductions_add_in_rank_order_and_in_fp32(size, numel, extra, dtype, op, scale, piece):
    run_distributed(_reductions_case, size, numel, extra, dtype, op, scale, piece)


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (3, torch.float32)])
def test_reductions_of_more_than_one_message(size, dtype):
    numel = collectives._PIECE // dtype.itemsize + 70_001
    run_distributed(_reductions_case, size, numel, 1, dtype, "mean", None, collectives._PIECE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_sums_round_once_and_to_nearest_even_whatever_the_values(dtype):
    """Every value there is, added to 16 others."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for shift in range(1, 1 << 16, 4099):
        parts = [patterns.view(dtype), patterns.roll(shift).view(dtype)]
        for factor in (1.0, 0.5, 1 / 3):
            for count in (2, 3):
                terms, output = (parts * 2)[:count], torch.empty(1 << 16, dtype=dtype)
                collectives._sum_in_order(output, [term.clone() for term in terms], factor)
                _assert_same_bits(output, _sum_of(terms, factor))
                collectives._sum_on_device(output, [term.clone() for term in terms], factor)
                _assert_same_bits(output, _sum_of(terms, factor))


def _fp32_accumulation_case():
    group, rank = _world(), collectives.group_rank(_world())
    data = torch.full((4,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    outputs = [torch.empty(1, dtype=torch.bfloat16) for _ in range(2)]
    for output, by_all_to_all in zip(outputs, (False, True), strict=True):
        collectives.reduce_scatter(output, data, group, by_all_to_all=by_all_to_all)
    naive = sum((torch.ones((), dtype=torch.bfloat16) for _ in range(3)), torch.tensor(256.0, dtype=torch.bfloat16))
    return [output.item() for output in outputs], naive.item()


def test_sums_in_fp32_keep_what_16_bit_sums_lose():
    """256 + 1 is 256 in bf16, so that adding one by one never leaves 256; 259 rounds to 260."""
    for outputs, naive in run_distributed(_fp32_accumulation_case, 4):
        assert outputs == [260.0, 260.0]
        assert naive == 256.0


def _native_case(op):
    """The way of CUDA tensors, on gloo: three tensors, of which two go out together."""
    group = _world()
    size, rank = collectives.group_size(group), collectives.group_rank(group)
    dtypes = (torch.float32, torch.float32, torch.float64)
    inputs = [torch.arange(size * 3, dtype=dtype) + rank + index for index, dtype in enumerate(dtypes)]
    whole = [tensor.clone() for tensor in inputs]
    outputs = [torch.empty(3, dtype=dtype) for dtype in dtypes]
    gathered = [torch.empty(size * 3, dtype=dtype) for dtype in dtypes]
    with _constants(_on_cpu=lambda tensors: False):
        for work in collectives.start_reduce_scatter(outputs, inputs, group, op):
            work.wait(0.5)
        for work in collectives.start_all_reduce(whole, group, op):
            work.wait(torch.tensor(0.5))
        for work in collectives.start_all_gather(gathered, outputs, group):
            work.wait()
    return outputs, whole, gathered


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_native_collectives_give_the_same_sums_one_by_one_and_together(op):
    size = 2
    for rank, (outputs, whole, gathered) in enumerate(run_distributed(_native_case, size, op)):
        for index, output in enumerate(outputs):
            total = torch.arange(size * 3, dtype=output.dtype) * size + sum(peer + index for peer in range(size))
            total *= 0.5 / size if op == "mean" else 0.5
            assert torch.equal(output, total.view(size, -1)[rank])
            assert torch.equal(whole[index], total)
            assert torch.equal(gathered[index], total)


def _gather_case(numel, dtype, piece):
    group = _world()
    size, rank = collectives.group_size(group), collectives.group_rank(group)
    everyones = [_wild(peer, numel, dtype) for peer in range(size)]
    nbytes = everyones[0].nbytes * size
    for small, in_place in itertools.product((nbytes, nbytes + 1), (False, True)):
        output = torch.zeros(numel * size, dtype=dtype)
        own = output.view(size, -1)[rank] if in_place else torch.empty(numel, dtype=dtype)
        own.copy_(everyones[rank])
        with _constants(_PIECE=piece, _SMALL=small):
            collectives.all_gather(output, own, group, async_op=True).wait()
        _assert_same_bits(output, torch.cat(everyones))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 4), numel=st.integers(0, 1003), dtype=st.sampled_from(DTYPES), piece=st.sampled_from([8, 256, 4 << 20])
)
def test_all_gather_concatenates_in_rank_order(size, numel, dtype, piece):
    run_distributed(_gather_case, size, numel, dtype, piece)


def _merged(first, second, chooser):
    """All of both, each in its own order."""
    first, second = list(first), list(second)
    while first or second:
        yield (first if chooser.random() * (len(first) + len(second)) < len(first) else second).pop(0)


def _in_flight(seed):
    """Several of each kind. All-reduces are waited for in one order on all ranks, the rest in between in an order of each rank's own."""
    group = _world()
    size, rank = collectives.group_size(group), collectives.group_rank(group)
    common, own, staging, sizes = random.Random(seed), random.Random(10 * seed + rank), collectives.Staging(), set()
    with _constants(_PIECE=256, _SMALL=512):
        for _ in range(3):
            reductions, others, checks = [], [], []
            for index, dtype in itertools.product(range(4), (torch.float32, torch.bfloat16)):
                numel = 61 + 10 * index
                everyones = [_values(100 * index + peer, numel * size, dtype) for peer in range(size)]
                expected, chunks = _sum_of(everyones, 1.0), [data.view(size, -1)[peer] for peer, data in enumerate(everyones)]
                output, whole = torch.empty(numel, dtype=dtype), everyones[rank].clone()
                gathered = torch.empty(numel * size, dtype=dtype)
                others.append(collectives.reduce_scatter(output, everyones[rank], group, async_op=True, staging=staging))
                reductions.append(collectives.all_reduce(whole, group, async_op=True, rank_order=True, staging=staging))
                others.append(collectives.all_gather(gathered, chunks[rank], group, async_op=True))
                checks += [(output, expected.view(size, -1)[rank]), (whole, expected), (gathered, torch.cat(chunks))]
            common.shuffle(reductions)
            own.shuffle(others)
            for work in _merged(reductions, others, own):
                work.wait()
            for actual, wanted in checks:
                _assert_same_bits(actual, wanted)
            sizes.add(staging.nbytes)
    assert len(sizes) == 1, f"buffers were not reused: {sizes}"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_works_in_flight_do_not_mix_in_whatever_order_they_are_waited_for(size):
    for seed in range(2):
        run_distributed(_in_flight, size, seed)


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
