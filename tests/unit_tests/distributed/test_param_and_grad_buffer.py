"""Buffers, buckets and bucket groups: views, reductions, states and their errors."""

import pytest
import torch

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import (
    BufferType,
    GatherState,
    _ParamAndGradBuffer,
    partition_buckets,
    shard_buffer,
)
from megatron.core.errors import CommunicationStateError
from megatron.core.param_meta import ParamMeta, set_param_meta
from tests.harness.distributed import run_distributed


def make_buffer(bucket_size=200, params=5, dtype=torch.float32, tied=False, factor=1.0, **options):
    """A buffer over `params` matrices of 10 x 10 over all ranks; matrix i is filled with i."""
    config = DistributedDataParallelConfig(**options)
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    weights = [torch.nn.Parameter(torch.full((10, 10), float(index), dtype=dtype)) for index in range(params)]
    if tied:
        set_param_meta(weights[0], ParamMeta(shared_embedding=True))
    names = {weight: f"w{index}" for index, weight in enumerate(weights)}
    return _ParamAndGradBuffer(config, dtype, torch.float32, weights, group, bucket_size, names, factor)


def overlapping_buffer(**kwargs):
    return make_buffer(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, **kwargs)


def _overlap_param_gather():
    buffer = overlapping_buffer()
    rank = torch.distributed.get_rank()
    for group in buffer.bucket_groups:  # what an optimizer does: write the own shard
        for bucket in group.buckets:
            group.local_shard(bucket.param_data).fill_(rank + 1.0)
        group.mark_written()

    buffer.start_param_sync()
    assert buffer.param_gather_handle is not None

    assert all(group.param_gather_handle is not None and group.param_gather_dispatched for group in buffer.bucket_groups)
    buffer.finish_param_sync()
    assert buffer.param_gather_handle is None
    assert [group.gather_state for group in buffer.bucket_groups] == [GatherState.DONE] * len(buffer.bucket_groups)
    return [bucket.param_data.clone() for bucket in buffer.buckets]


def test_overlap_param_gather():
    for buckets in run_distributed(_overlap_param_gather, 2):
        for data in buckets:
            half = data.numel() // 2
            assert torch.equal(data, torch.cat([torch.full((half,), 1.0), torch.full((half,), 2.0)]))


def test_parameters_and_gradients_are_views_of_the_buffer():
    buffer = make_buffer(use_distributed_optimizer=True, dtype=torch.bfloat16)
    assert (buffer.numel_unpadded, buffer.numel) == (500, sum(bucket.grad_data.numel() for bucket in buffer.buckets))
    for index, param in enumerate(buffer.params):
        start, end, bucket = buffer.param_index_map[param]
        assert torch.equal(param.data, torch.full((10, 10), float(index), dtype=torch.bfloat16))
        assert param.data_ptr() == buffer.param_data[start:end].data_ptr()
        assert param.main_grad.data_ptr() == buffer.grad_data[start:end].data_ptr()
        assert (param.dtype, param.main_grad.dtype) == (torch.bfloat16, torch.float32)
        assert param in buffer.buckets[bucket].params
        assert torch.equal(buffer._get(param.shape, start, BufferType.PARAM), param.data)


def test_without_the_distributed_optimizer_parameters_stay_where_they_are():
    buffer = make_buffer()
    assert buffer.param_data is None
    assert len({param.untyped_storage().data_ptr() for param in buffer.params}) == 5


def test_buckets_by_size_and_groups_in_backward_order():
    buffer = make_buffer(bucket_size=200)
    assert [sorted(buffer.param_to_name[param] for param in bucket.params) for bucket in buffer.buckets] == [
        ["w3", "w4"],
        ["w1", "w2"],
        ["w0"],
    ]
    groups = partition_buckets([buffer])
    assert [group.buckets[0].bucket_id for group in groups] == [0, 1, 2]
    assert groups[2].next_param_gather_bucket_group is groups[1]  # forward order
    assert len(partition_buckets([buffer], force_single_bucket_group=True)) == 1


def test_groups_over_several_buffers_are_merged_by_registration():
    first, second = make_buffer(bucket_size=1, params=2), make_buffer(bucket_size=1, params=2)
    first.param_indices, second.param_indices = [0, 3], [1, 2]
    order = [group.buckets[0] for group in partition_buckets([first, second])]
    assert order == [first.buckets[0], second.buckets[0], second.buckets[1], first.buckets[1]]


def test_a_tied_embedding_has_its_own_bucket():
    buffer = make_buffer(bucket_size=None, tied=True, use_distributed_optimizer=True)
    assert [len(bucket.params) for bucket in buffer.buckets] == [4, 1]


def test_shard_buffer_cuts_equal_parts():
    assert [part.tolist() for part in shard_buffer(torch.arange(6), 3)] == [[0, 1], [2, 3], [4, 5]]


def _grad_sync(distributed, overlap, factor):
    buffer = make_buffer(factor=factor, use_distributed_optimizer=distributed, overlap_grad_reduce=overlap)
    buffer.grad_data.fill_(torch.distributed.get_rank() + 1.0)
    groups = buffer.bucket_groups
    for param in reversed(buffer.params):
        group = next(group for group in groups if param in group.params)
        group.register_grad_ready(param)
    started = [group.grad_reduce_handle is not None for group in groups]
    for group in groups:
        group.finish_grad_sync()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if distributed:
        return started, [shard_buffer(bucket.grad_data, size)[rank].unique().tolist() for bucket in buffer.buckets]
    return started, [bucket.grad_data.unique().tolist() for bucket in buffer.buckets]


@pytest.mark.parametrize(("factor", "total"), [(1.0, 6.0), (1 / 3, 2.0)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
def test_grad_sync_sums_and_scales(distributed, overlap, factor, total):
    for started, values in run_distributed(_grad_sync, 3, distributed, overlap, factor):
        assert started == [overlap] * 3  # with overlap the last gradient of a bucket starts it
        assert values == [[total]] * 3


def test_reductions_start_in_one_order_whatever_order_gradients_come_in():
    buffer = make_buffer(bucket_size=1, params=3, overlap_grad_reduce=True)
    groups = buffer.bucket_groups
    by_name = {buffer.param_to_name[param]: param for param in buffer.params}
    started = []
    for name in ("w0", "w1", "w2"):  # the buffer holds w2, w1, w0
        param = by_name[name]
        next(group for group in groups if param in group.params).register_grad_ready(param)
        started.append([group.grad_reduce_handle is not None for group in groups])
    assert started == [[False] * 3, [False] * 3, [True] * 3]


def test_double_start_and_unstarted_finish_name_the_bucket():
    buffer = overlapping_buffer(bucket_size=None)
    (group,) = buffer.bucket_groups
    with pytest.raises(CommunicationStateError, match=r"gather of bucket 0 of buffer \(w4 ... w0\) was not started"):
        group.finish_param_sync()
    group.start_param_sync()
    with pytest.raises(CommunicationStateError, match=r"bucket 0 .* already in flight"):
        buffer.start_param_sync()
    with pytest.raises(CommunicationStateError, match=r"bucket 0 .* while their gather was in flight"):
        group.mark_written()
    group.start_param_sync(force_sync=True)  # only finishes
    assert group.gather_state is GatherState.DONE
    group.finish_param_sync()  # arrived already

    group.start_grad_sync()
    with pytest.raises(CommunicationStateError, match="gradient reduction of bucket 0"):
        group.start_grad_sync()
    with pytest.raises(CommunicationStateError, match=r"bucket 0 .* reduction was in flight"):
        group.reset()
    group.finish_grad_sync()
    param = buffer.params[0]
    param.grad = torch.ones_like(param)
    with pytest.raises(CommunicationStateError, match="zero_grad_buffer"):
        group.add_grad(param)
    group.reset()
    group.add_grad(param)
    assert param.grad is None
    assert torch.equal(param.main_grad, torch.ones(10, 10))


def test_finishing_a_gather_starts_the_next_written_one():
    buffer = overlapping_buffer(bucket_size=1, params=2)
    second, first = buffer.bucket_groups
    for group in (first, second):
        group.mark_written()
    first.start_param_sync()
    first.finish_param_sync()
    assert second.gather_state is GatherState.IN_FLIGHT
    second.finish_param_sync()
    for group in (first, second):
        group.mark_written()
    first.start_param_sync()
    first.finish_param_sync(skip_next_bucket_dispatch=True)
    assert second.gather_state is GatherState.WRITTEN
    second.ensure_params()
    assert second.gather_state is GatherState.DONE


def test_large_16_bit_gradients_are_accumulated_in_fp32():
    weight = torch.nn.Parameter(torch.zeros(70_000, dtype=torch.bfloat16))
    config = DistributedDataParallelConfig()
    buffer = _ParamAndGradBuffer(config, torch.bfloat16, torch.float32, [weight], None, None, {weight: "w"})
    expected = torch.zeros(70_000)
    for seed in range(3):
        weight.grad = torch.randn(70_000, generator=torch.Generator().manual_seed(seed)).bfloat16()
        expected += weight.grad.float()
        buffer.bucket_groups[0].add_grad(weight)
    assert torch.equal(weight.main_grad, expected)
    buffer.scale_gradients(2.0)
    assert torch.equal(weight.main_grad, 2 * expected)
    buffer.reset()
    assert not weight.main_grad.any()
