"""Flat buffers of parameters and gradients, cut into buckets, and the collectives on them with their states.

    _ParamAndGradBuffer        all parameters of one dtype; every `param.data` and `param.main_grad` is a view of it
      _ParamAndGradBucket      a contiguous range of the buffer (see param_layout)
    _ParamAndGradBucketGroup   buckets whose collectives run together; owns the asynchronous handles and their states

    gradients    IDLE --start_grad_sync--> IN_FLIGHT --finish_grad_sync--> DONE --reset--> IDLE
    parameters   IDLE --mark_written--> WRITTEN --start_param_sync--> IN_FLIGHT --finish_param_sync--> DONE --mark_written->

With the distributed optimizer gradients are reduce-scattered and parameters gathered; else gradients are all-reduced.

Where several instances repeat the shards, the sums of the instances are added up in a second reduction (IN_FLIGHT -->
BETWEEN_INSTANCES --> DONE). A bucket's starts right after the next bucket's first one, so it runs under the backward too and
all ranks start all reductions in one order, whatever their timing.
"""

import dataclasses
import enum
import functools
import itertools
import time
from collections.abc import Callable, Sequence

import torch

from megatron.core import collectives
from megatron.core.collectives import Group, Staging, Work, WorkList
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.param_layout import BufferLayout, ParamSpec, Range, plan_buffer
from megatron.core.errors import CommunicationStateError
from megatron.core.param_meta import param_meta

_BLOCK = 1 << 16  # elements converted at a time, so that the converted values stay in the cache


class BufferType(enum.Enum):
    """The two halves of a buffer."""

    PARAM = 1
    GRAD = 2


class GatherState(enum.Enum):
    """Where a bucket group's parameters are between two optimizer steps."""

    IDLE = "idle"  # whole, nothing was written
    WRITTEN = "written"  # this rank's shard is new, the others' are not here yet
    IN_FLIGHT = "in flight"
    DONE = "done"  # whole again


class ReduceState(enum.Enum):
    """Where a bucket group's gradients are in a step."""

    IDLE = "idle"  # being accumulated, local
    IN_FLIGHT = "in flight"
    BETWEEN_INSTANCES = "in flight between instances"  # summed inside this rank's instance
    DONE = "done"  # reduced; with the distributed optimizer only in this rank's shard


class BucketEvent(enum.Enum):
    """What a bucket group tells its observers; *ING comes before the act and before the state is checked."""

    GRADS_RESET = "a step begins"
    GRAD_COMING = "a gradient is about to be put into main_grad"  # the only one with a parameter
    REDUCE_STARTING = "the reduction is about to start"
    REDUCE_STARTED = "the reduction is in flight"
    SECOND_REDUCE_STARTED = "the reduction between instances is in flight"
    REDUCE_WAITING = "the training thread begins to wait for a reduction"
    REDUCE_WAITED = "it goes on"
    REDUCED = "the reduced gradients are there"
    GRADS_READING = "the optimizer is about to read the gradients"
    PARAMS_WRITING = "the optimizer is about to update parameters"
    PARAMS_WRITTEN = "the optimizer wrote this rank's shard"
    GATHER_STARTING = "the gather is about to start"
    GATHER_STARTED = "the gather is in flight"
    GATHER_WAITING = "the training thread begins to wait for the gather"
    GATHERED = "the parameters are whole, the training thread goes on"


Observer = Callable[[BucketEvent, "_ParamAndGradBucketGroup", torch.nn.Parameter | None], None]


@dataclasses.dataclass(frozen=True)
class GradReduction:
    """How gradients are reduced: collective op (sum or mean), instances that repeat the shards, buffers to receive into."""

    op: str = "sum"
    replica_group: Group = None
    staging: Staging = dataclasses.field(default_factory=Staging)


def shard_buffer(buffer: torch.Tensor, data_parallel_world_size: int) -> list[torch.Tensor]:
    """The equal parts of a bucket's flat tensor, one view per rank."""
    assert buffer.numel() % data_parallel_world_size == 0, (buffer.shape, data_parallel_world_size)
    return list(buffer.view(data_parallel_world_size, -1).unbind(0))


class _ParamAndGradBucket:
    """A contiguous range of a buffer.

    Args:
        params: its parameters, in buffer order.
        param_data, grad_data: 1-D views of the buffer, end padding included; param_data only with the distributed optimizer.
        offset: start in the buffer.
        numel_unpadded: elements of parameters.
        gradient_scaling_factor: multiplies the reduced gradients.
        bucket_id: position in the buffer.
        name: for messages.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        param_data: torch.Tensor | None,
        grad_data: torch.Tensor,
        offset: int,
        numel_unpadded: int,
        gradient_scaling_factor: float,
        bucket_id: int,
        name: str = "bucket",
    ) -> None:
        self.params_list = list(params)
        self.params = set(params)
        self.param_data, self.grad_data = param_data, grad_data
        self.offset, self.numel_unpadded = offset, numel_unpadded
        self.gradient_scaling_factor = gradient_scaling_factor
        self.bucket_id, self.name = bucket_id, name


class _ParamAndGradBucketGroup:
    """Buckets whose collectives are started and finished together.

    Args:
        buckets: in buffer order.
        ddp_config: overlap and distributed-optimizer switches.
        collective_group: ranks that reduce the gradients and share the shards; None = one process.
        reduction: op, replicas and receive buffers.

    `next_param_gather_bucket_group`: dispatched when this group's gather is finished, if it waits for that.
    `previous_reduce_group`: its reduction must be started first, so that every rank starts them in one order.
    `observers`: called at each `BucketEvent`.
    """

    def __init__(
        self,
        buckets: Sequence[_ParamAndGradBucket],
        ddp_config: DistributedDataParallelConfig,
        collective_group: Group,
        reduction: GradReduction | None = None,
    ) -> None:
        self.buckets = list(buckets)
        self.ddp_config = ddp_config
        self.group = collective_group
        self.reduction = reduction or GradReduction()
        self.size, self.rank = collectives.group_size(collective_group), collectives.group_rank(collective_group)
        self.param_to_bucket = {param: bucket for bucket in self.buckets for param in bucket.params_list}
        self.params = set(self.param_to_bucket)
        self.name = ", ".join(bucket.name for bucket in self.buckets)

        self.is_last_microbatch = True
        self.params_with_grad: set[torch.nn.Parameter] = set()
        self._overwritten: set[torch.nn.Parameter] = set()  # main_grad holds last step's values until the first gradient
        self.reduce_state = ReduceState.IDLE
        self.grad_reduce_handle: Work | None = None
        self.previous_reduce_group: _ParamAndGradBucketGroup | None = None
        self.next_reduce_group: _ParamAndGradBucketGroup | None = None

        self.gather_state = GatherState.IDLE
        self.param_gather_handle: Work | None = None
        self.next_param_gather_bucket_group: _ParamAndGradBucketGroup | None = None
        self.exposed_time_s = 0.0  # wall time that the training thread spent waiting for these collectives
        self.observers: tuple[Observer, ...] = ()

    def tell(self, event: BucketEvent, param: torch.nn.Parameter | None = None) -> None:
        """Call the observers."""
        for observer in self.observers:
            observer(event, self, param)

    # Gradients

    def reset(self, overwrite: bool = False) -> None:
        """Begin a step.

        overwrite: gradients still hold the last step's values; each parameter's first gradient replaces them (and
            `start_grad_sync` zeroes those without one). Otherwise the caller has zeroed them.
        """
        if self.reduce_state not in (ReduceState.IDLE, ReduceState.DONE):
            raise CommunicationStateError(f"gradients of {self.name} were reset while their reduction was in flight")
        self.tell(BucketEvent.GRADS_RESET)
        self.params_with_grad.clear()
        self._overwritten = set(self.params) if overwrite else set()
        self.is_last_microbatch = True
        self.reduce_state = ReduceState.IDLE

    def begin_grad(self, param: torch.nn.Parameter) -> bool:
        """A gradient of `param` is about to be put into `main_grad`: True = add to what is there, False = replace it."""
        self.tell(BucketEvent.GRAD_COMING, param)
        if self.reduce_state is not ReduceState.IDLE:
            raise CommunicationStateError(
                f"a gradient arrived in {self.name} after its reduction was started; call zero_grad_buffer() before the next "
                "step, and use no_sync() for all microbatches but the last"
            )
        adds = param not in self._overwritten
        self._overwritten.discard(param)
        return adds

    def add_grad(self, param: torch.nn.Parameter) -> None:
        """Move `param.grad` into `main_grad`: a copy for the step's first gradient, else a sum.

        Without `param.grad` nothing is left to do: the backward wrote `main_grad` itself, or the gradient is zero.
        """
        if param.grad is None:
            if param in self._overwritten and not self.begin_grad(param):
                param.main_grad.zero_()  # type: ignore[attr-defined]
        elif self.begin_grad(param):
            _accumulate(param.main_grad, param.grad)  # type: ignore[attr-defined]
        else:
            param.main_grad.copy_(param.grad)  # type: ignore[attr-defined]
        param.grad = None

    def register_grad_ready(self, param: torch.nn.Parameter) -> None:
        """The last microbatch's gradient of `param` is in `main_grad`. A full group starts its reduction (with overlap)."""
        assert param in self.param_to_bucket, f"parameter is not in {self.name}"
        self._overwritten.discard(param)
        if not self.is_last_microbatch:
            return
        self.params_with_grad.add(param)
        if self.ddp_config.overlap_grad_reduce and self._ready():
            self.start_grad_sync()
            following = self.next_reduce_group
            while following is not None and following._ready():
                following.start_grad_sync()
                following = following.next_reduce_group

    def _ready(self) -> bool:
        previous = self.previous_reduce_group
        return (
            self.reduce_state is ReduceState.IDLE
            and len(self.params_with_grad) == len(self.params)
            and (previous is None or previous.reduce_state is not ReduceState.IDLE)
        )

    def start_grad_sync(self) -> None:
        """Start the reduction. Raises CommunicationStateError if it was started in this step already."""
        self.tell(BucketEvent.REDUCE_STARTING)
        if self.reduce_state is not ReduceState.IDLE:
            raise CommunicationStateError(
                f"the gradient reduction of {self.name} is {self.reduce_state.value}; start it once per step and call "
                "zero_grad_buffer() in between"
            )
        for param in self._overwritten:  # no gradient in this step
            param.main_grad.zero_()  # type: ignore[attr-defined]
        self._overwritten.clear()
        self.grad_reduce_handle = WorkList(self._reduce())
        self.reduce_state = ReduceState.IN_FLIGHT
        self.tell(BucketEvent.REDUCE_STARTED)
        if self.previous_reduce_group is not None:
            self.previous_reduce_group.start_second_reduction()

    def _reduce(self) -> list[Work]:
        for bucket in self.buckets:
            if self._scale_first(bucket):
                bucket.grad_data.mul_(bucket.gradient_scaling_factor)
        buffers, reduction = [bucket.grad_data for bucket in self.buckets], self.reduction
        if self.ddp_config.use_distributed_optimizer:
            shards = [self.local_shard(data) for data in buffers]
            return collectives.start_reduce_scatter(
                shards, buffers, self.group, reduction.op, staging=reduction.staging
            )  # over dp_cp (or one instance), dtype of the gradients, fp32 sums on CPU
        return collectives.start_all_reduce(buffers, self.group, reduction.op, rank_order=True, staging=reduction.staging)

    def finish_grad_sync(self, scale: float | torch.Tensor | None = None) -> None:
        """Wait for the reduction; starts it first where some parameter got no gradient or overlap is off.

        scale: multiplies the result.
        """
        if self.reduce_state in (ReduceState.IDLE, ReduceState.DONE):
            self.start_grad_sync()
        self.start_second_reduction()
        self._wait_reduce([self._final_factor(bucket, scale) for bucket in self.buckets])
        self.reduce_state = ReduceState.DONE
        self.tell(BucketEvent.REDUCED)

    def start_second_reduction(self) -> None:
        """Wait for the sum inside this rank's instance and start the one between instances, where there are several."""
        if self.reduce_state is not ReduceState.IN_FLIGHT or collectives.group_size(self.reduction.replica_group) == 1:
            return
        self._wait_reduce([None] * len(self.buckets))
        self.grad_reduce_handle = WorkList(self._reduce_between_instances())
        self.reduce_state = ReduceState.BETWEEN_INSTANCES
        self.tell(BucketEvent.SECOND_REDUCE_STARTED)

    def _reduce_between_instances(self) -> list[Work]:
        shards, reduction = [self.local_shard(bucket.grad_data) for bucket in self.buckets], self.reduction
        return collectives.start_all_reduce(
            shards, reduction.replica_group, reduction.op, rank_order=True, staging=reduction.staging
        )  # over the instances, dtype of the gradients

    def _wait_reduce(self, factors: Sequence[float | torch.Tensor | None]) -> None:
        assert isinstance(self.grad_reduce_handle, WorkList)
        works = self.grad_reduce_handle.works
        self.tell(BucketEvent.REDUCE_WAITING)  # may raise: the handle stays, since a message must not be dropped in flight
        self.grad_reduce_handle = None
        begun = time.perf_counter()
        for work, factor in zip(works, factors, strict=True):
            work.wait(factor)
        self.exposed_time_s += time.perf_counter() - begun
        self.tell(BucketEvent.REDUCE_WAITED)

    def _scale_first(self, bucket: _ParamAndGradBucket) -> bool:
        """A 16-bit sum formed by the backend can overflow; elsewhere the factor costs no pass of its own."""
        data = bucket.grad_data
        return bucket.gradient_scaling_factor != 1.0 and data.device.type != "cpu" and data.dtype.itemsize == 2

    def _final_factor(self, bucket: _ParamAndGradBucket, scale: float | torch.Tensor | None) -> float | torch.Tensor | None:
        own = 1.0 if self._scale_first(bucket) else bucket.gradient_scaling_factor
        if scale is None:
            return None if own == 1.0 else own
        return scale if own == 1.0 else scale * own

    # Parameters

    @property
    def param_gather_dispatched(self) -> bool:
        """Whether the gather of the last written parameters has been started."""
        return self.gather_state in (GatherState.IN_FLIGHT, GatherState.DONE)

    def local_shard(self, data: torch.Tensor) -> torch.Tensor:
        """This rank's part of a bucket's flat tensor."""
        return data.view(self.size, -1)[self.rank]

    def mark_written(self) -> None:
        """The optimizer wrote this rank's shard of the parameters. Raises CommunicationStateError during a gather."""
        self.tell(BucketEvent.PARAMS_WRITTEN)
        if self.gather_state is GatherState.IN_FLIGHT:
            raise CommunicationStateError(f"parameters of {self.name} were written while their gather was in flight")
        self.gather_state = GatherState.WRITTEN

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Gather the shards of all ranks; asynchronously with overlap_param_gather unless `force_sync`.

        With `force_sync` a gather in flight is only finished. Raises CommunicationStateError if one is in flight otherwise.
        """
        if self.gather_state is GatherState.IN_FLIGHT:
            if not force_sync:
                raise CommunicationStateError(
                    f"the parameter gather of {self.name} is already in flight; call finish_param_sync() before starting again"
                )
        else:
            self.dispatch_gather()
        if force_sync or not self.ddp_config.overlap_param_gather:
            self._wait_gather()

    def dispatch_gather(self) -> None:
        """Start the gather and return."""
        self.tell(BucketEvent.GATHER_STARTING)
        assert self.gather_state is not GatherState.IN_FLIGHT, self.name
        buffers = [bucket.param_data for bucket in self.buckets if bucket.param_data is not None]
        assert len(buffers) == len(self.buckets), "only the distributed optimizer gathers parameters"
        shards = [self.local_shard(data) for data in buffers]
        works = collectives.start_all_gather(buffers, shards, self.group)  # over dp_cp (or one instance), dtype of the parameters
        self.param_gather_handle = WorkList(works)
        self.gather_state = GatherState.IN_FLIGHT
        self.tell(BucketEvent.GATHER_STARTED)

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Wait for the gather; then start the next group's, if that one was written and waits for it.

        Nothing to do if it has arrived before. Raises CommunicationStateError if it was never started.
        """
        if self.gather_state is GatherState.DONE:
            return
        if self.gather_state is not GatherState.IN_FLIGHT:
            raise CommunicationStateError(
                f"finish_param_sync: the parameter gather of {self.name} was not started (state: {self.gather_state.value})"
            )
        self._wait_gather()
        following = self.next_param_gather_bucket_group
        if not skip_next_bucket_dispatch and following is not None and following.gather_state is GatherState.WRITTEN:
            following.dispatch_gather()

    def ensure_params(self) -> None:
        """Return with whole parameters, whatever the state: what a module calls before it reads them."""
        if self.gather_state is GatherState.WRITTEN:
            self.dispatch_gather()
        if self.gather_state is GatherState.IN_FLIGHT:
            self.finish_param_sync()

    def _wait_gather(self) -> None:
        assert self.param_gather_handle is not None, self.name
        self.tell(BucketEvent.GATHER_WAITING)
        begun = time.perf_counter()
        self.param_gather_handle.wait()
        self.exposed_time_s += time.perf_counter() - begun
        self.param_gather_handle = None
        self.gather_state = GatherState.DONE
        self.tell(BucketEvent.GATHERED)


class _ParamAndGradBuffer:
    """Flat memory of all parameters of one dtype and of their gradients. Replaces `param.data`, sets `param.main_grad`.

    Args:
        ddp_config: with use_distributed_optimizer the parameters move into `param_data`.
        param_dtype, grad_dtype: dtypes of the two halves.
        params: in registration order.
        data_parallel_group: ranks that share each bucket; None = one process.
        bucket_size: elements after which a bucket ends; None = one bucket.
        param_to_name: names for messages.
        gradient_scaling_factor: multiplies reduced gradients.
        param_indices: positions of `params` in the module's registration order, to merge buffers; default 0, 1, 2 ...
        reduction: op, replicas and receive buffers.
        name: for messages.
    """

    def __init__(
        self,
        ddp_config: DistributedDataParallelConfig,
        param_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        params: Sequence[torch.nn.Parameter],
        data_parallel_group: Group,
        bucket_size: int | None,
        param_to_name: dict[torch.nn.Parameter, str],
        gradient_scaling_factor: float = 1.0,
        param_indices: Sequence[int] | None = None,
        *,
        reduction: GradReduction | None = None,
        name: str = "buffer",
    ) -> None:
        self.ddp_config = ddp_config
        self.param_dtype, self.grad_dtype = param_dtype, grad_dtype
        self.params = list(params)
        self.param_to_name = {param: param_to_name[param] for param in self.params}
        self.data_parallel_group = data_parallel_group
        self.data_parallel_world_size = collectives.group_size(data_parallel_group)
        self.gradient_scaling_factor = gradient_scaling_factor
        self.param_indices = list(param_indices) if param_indices is not None else list(range(len(self.params)))
        self.reduction = reduction or GradReduction("mean" if ddp_config.average_in_collective else "sum")
        self.name = name
        self._bucket_groups: list[_ParamAndGradBucketGroup] = []

        self.layout = self._plan(bucket_size)
        self.numel, self.numel_unpadded = self.layout.numel, self.layout.numel_unpadded
        self.param_index_map = {
            param: (held.start, held.end, bucket)
            for param, held, bucket in zip(self.params, self.layout.params, self.layout.bucket_of, strict=True)
        }
        device = self.params[0].device if self.params else torch.device("cpu")
        self.grad_data = torch.zeros(self.numel, dtype=grad_dtype, device=device)
        self.param_data: torch.Tensor | None = None
        if ddp_config.use_distributed_optimizer:
            self.param_data = torch.zeros(self.numel, dtype=param_dtype, device=device)
        self._attach_params()
        self.buckets = [self._bucket(index) for index in range(len(self.layout.buckets))]

    def _plan(self, bucket_size: int | None) -> BufferLayout:
        distributed = self.ddp_config.use_distributed_optimizer
        specs = [
            ParamSpec(self.param_to_name[param], param.numel(), distributed and param_meta(param).shared_embedding)
            for param in self.params
        ]
        return plan_buffer(specs, bucket_size, self.data_parallel_world_size if distributed else 1)

    def _attach_params(self) -> None:
        for param in self.params:
            start, _, _ = self.param_index_map[param]
            if self.param_data is not None:
                data = self._get(param.shape, start, BufferType.PARAM)
                data.copy_(param.data)
                param.data = data
            param.main_grad = self._get(param.shape, start, BufferType.GRAD)  # type: ignore[attr-defined]

    def _get(self, shape: torch.Size, start_index: int, buffer_type: BufferType) -> torch.Tensor:
        """A view of the buffer with this shape, from element `start_index`."""
        data = self.grad_data if buffer_type is BufferType.GRAD else self.param_data
        assert data is not None
        return data[start_index : start_index + shape.numel()].view(shape)

    def _bucket(self, index: int) -> _ParamAndGradBucket:
        planned = self.layout.buckets[index]
        params = [self.params[position] for position in planned.params]
        part = planned.range.slice()
        names = [self.param_to_name[param] for param in params]
        return _ParamAndGradBucket(
            params,
            None if self.param_data is None else self.param_data[part],
            self.grad_data[part],
            planned.range.start,
            planned.numel_unpadded,
            self.gradient_scaling_factor,
            index,
            f"bucket {index} of {self.name} ({names[0]}" + (f" ... {names[-1]})" if len(names) > 1 else ")"),
        )

    def shard_range(self, bucket_index: int, rank: int) -> Range:
        """The part of the buffer that a rank of the data-parallel group owns in a bucket."""
        return self.layout.buckets[bucket_index].shard(rank, self.data_parallel_world_size)

    @property
    def bucket_groups(self) -> list[_ParamAndGradBucketGroup]:
        """The groups over this buffer's buckets, in backward order; made on first use if `partition_buckets` wasn't called."""
        if not self._bucket_groups:
            partition_buckets([self])
        return self._bucket_groups

    def start_param_sync(self, force_sync: bool = False) -> None:
        """`start_param_sync` of each group, in forward order."""
        for group in reversed(self.bucket_groups):
            group.start_param_sync(force_sync)

    def finish_param_sync(self) -> None:
        """`finish_param_sync` of each group, in forward order."""
        for group in reversed(self.bucket_groups):
            group.finish_param_sync()

    @property
    def param_gather_handle(self) -> WorkList | None:
        """The gathers in flight as one handle (forward order); None without any. To finish them use `finish_param_sync`."""
        handles = [group.param_gather_handle for group in reversed(self.bucket_groups) if group.param_gather_handle is not None]
        return WorkList(handles) if handles else None

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply all gradients."""
        self.grad_data.mul_(scaling_factor)

    def reset(self) -> None:
        """Zero all gradients."""
        self.grad_data.zero_()


def partition_buckets(
    buffers: Sequence[_ParamAndGradBuffer], force_single_bucket_group: bool = False
) -> list[_ParamAndGradBucketGroup]:
    """Bucket groups over all buffers, in backward order: a bucket each, or all in one with `force_single_bucket_group`.

    The order is by the parameter of each bucket that was registered first, since that one's gradient comes last.
    """
    if not buffers:
        return []
    if force_single_bucket_group:
        assert all(buffer.data_parallel_group is buffers[0].data_parallel_group for buffer in buffers)
        members = [[(buffer, bucket) for buffer in buffers for bucket in buffer.buckets]]
    else:
        members = [[(buffer, bucket)] for buffer in buffers for bucket in buffer.buckets]
        members.sort(key=lambda member: -_first_registered(*member[0]))
    groups = []
    for buffer in buffers:
        buffer._bucket_groups = []
    for member in members:
        owner = member[0][0]
        group = _ParamAndGradBucketGroup(
            [bucket for _, bucket in member], owner.ddp_config, owner.data_parallel_group, owner.reduction
        )
        groups.append(group)
        for buffer in {id(buffer): buffer for buffer, _ in member}.values():
            buffer._bucket_groups.append(group)
    link_reduce_order(groups)
    return groups


def link_reduce_order(groups: Sequence[_ParamAndGradBucketGroup]) -> None:
    """Make `groups` start their reductions in this order and their gathers in the opposite one."""
    for earlier, later in itertools.pairwise(groups):
        earlier.next_reduce_group, later.previous_reduce_group = later, earlier
        later.next_param_gather_bucket_group = earlier


def gather_params(groups: Sequence[_ParamAndGradBucketGroup]) -> None:
    """Gather all groups, one after the other in the order given, and return when everything has arrived."""
    for group in groups:
        if group.gather_state is not GatherState.IN_FLIGHT:
            group.dispatch_gather()
    for group in groups:
        group.finish_param_sync(skip_next_bucket_dispatch=True)


def _first_registered(buffer: _ParamAndGradBuffer, bucket: _ParamAndGradBucket) -> int:
    return min(buffer.param_indices[position] for position in buffer.layout.buckets[bucket.bucket_id].params)


def _accumulate(total: torch.Tensor, term: torch.Tensor) -> None:
    """total += term. On CPU a 16-bit term is widened block by block, which is several times faster than torch's mixed sum."""
    if total.dtype == term.dtype or total.device.type != "cpu" or total.numel() < _BLOCK:
        total.add_(term)
        return
    flat_total, flat_term = total.view(-1), term.reshape(-1)
    wide = _widened(total.dtype)
    for start in range(0, flat_total.numel(), _BLOCK):
        part = flat_term[start : start + _BLOCK]
        flat_total[start : start + _BLOCK].add_(wide[: part.numel()].copy_(part))


@functools.cache
def _widened(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(_BLOCK, dtype=dtype)
