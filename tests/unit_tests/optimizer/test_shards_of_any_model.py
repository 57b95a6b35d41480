"""Shards of real buffers for any model and any number of ranks: each element once, with its value; bytes are the formula's.

The ranks are simulated one after the other in this process; nothing is sent.
"""

import contextlib

import pytest
import torch
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.optimizer import memory_report
from megatron.core.param_meta import ParamMeta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.unit_tests.optimizer.toy import build

shapes = st.sampled_from([(), (1,), (0,), (3,), (64,), (65,), (7, 5), (2, 3, 4), (33, 31)])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
params = st.lists(st.tuples(shapes, dtypes, st.booleans(), st.booleans()), min_size=1, max_size=7)


@contextlib.contextmanager
def rank_of(rank, size):
    """This process as one rank of `size`, with groups but nobody behind them."""
    assert not torch.distributed.is_initialized()
    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        world = torch.distributed.group.WORLD
        yield ProcessGroupCollection(world=world, dp=world, dp_cp=world, intra_dp_cp=world, expt_dp=world)
    finally:
        torch.distributed.destroy_process_group()


def model_of(described):
    """A list of parameters with distinct values; the first tied one has its own bucket, frozen ones are in no buffer."""
    module, value = torch.nn.Module(), 0
    for index, (shape, dtype, frozen, shared) in enumerate(described):
        numel = torch.Size(shape).numel()
        # exact in bf16 and different at neighbouring places
        data = ((torch.arange(value, value + numel) * 37 + 11) % 251).to(dtype).view(shape)
        value += numel
        param = torch.nn.Parameter(data, requires_grad=not frozen)
        set_param_meta(param, ParamMeta(shared_embedding=shared))
        module.register_parameter(f"p{index}", param)
    return module


@settings(max_examples=200, deadline=None)
@given(params, st.one_of(st.none(), st.integers(1, 2000)), st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 67]), st.booleans(), st.data())
def test_main_params_of_all_ranks_are_the_model_and_bytes_are_the_formula(described, bucket_size, size, fp32_grads, data):
    ranks = range(size) if size <= 8 else [data.draw(st.integers(0, size - 1))]
    covered = {}
    for rank in ranks:
        with rank_of(rank, size) as groups:
            module = model_of(described)
            ddp = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": fp32_grads, "bucket_size": bucket_size}
            model, optimizer = build(ddp, {}, torch.bfloat16, groups=groups, module=module)
            report = memory_report([model], optimizer)
            assert report.total == formula(module, model, fp32_grads, size)
            for main in optimizer.main_params():
                covered.setdefault(main.name, []).append((main.start, main.main.clone()))
    expected = {name: param.detach().float().view(-1) for name, param in model_of(described).named_parameters() if param.requires_grad}
    if len(ranks) < size:
        for name, parts in covered.items():
            for start, part in parts:
                assert torch.equal(part, expected[name][start : start + part.numel()])
        return
    for name, whole in expected.items():
        cursor = 0
        for start, part in sorted(covered.get(name, []), key=lambda held: held[0]):
            assert start == cursor
            assert torch.equal(part, whole[start : start + part.numel()]), name
            cursor += part.numel()
        assert cursor == whole.numel()


def formula(module, model, fp32_grads, size):
    """Of docs/distributed_optimizer.md per padded element: 8 + 8/d, 6 + 12/d or 4 + 16/d bytes; frozen ones as they are."""
    total = sum(param.nbytes for param in module.parameters() if not param.requires_grad)
    for buffer in model.buffers:
        if buffer.param_dtype == torch.float32:
            whole, shared = 8, 8
        else:
            whole, shared = (6, 12) if fp32_grads else (4, 16)
        assert buffer.numel % size == 0
        total += whole * buffer.numel + shared * buffer.numel // size
    return total


def test_more_ranks_than_elements_leave_some_without_a_shard():
    held = []
    for rank in range(5):
        with rank_of(rank, 5) as groups:
            module = model_of([((3,), torch.float32, False, False)])
            _, optimizer = build({"use_distributed_optimizer": True}, {}, groups=groups, module=module)
            held.append([main.main.numel() for main in optimizer.main_params()])
    assert held == [[3], [], [], [], []]


def test_a_frozen_model_has_no_shards():
    with rank_of(1, 2) as groups:
        model, optimizer = build({"use_distributed_optimizer": True}, {}, groups=groups, module=model_of([((4,), torch.float32, True, False)]))
        assert list(optimizer.main_params()) == []
        assert memory_report([model], optimizer).total == pytest.approx(16, abs=0)
