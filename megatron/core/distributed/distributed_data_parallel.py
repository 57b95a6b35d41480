"""DistributedDataParallel: puts a module's parameters into buffers and keeps gradients and parameters in step over the ranks.

    backward   each gradient -> main_grad; the last microbatch's last gradient of a bucket starts that bucket's reduction
    optimizer  updates this rank's shards, marks buckets written, starts their gathers
    forward    a module waits for the buckets of its own parameters, just before it runs

Knows no model: it reads `ParamMeta`.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron.core import collectives
from megatron.core.collectives import Group, Staging
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.overlap_check import OverlapCheck
from megatron.core.distributed.param_and_grad_buffer import (
    BucketEvent,
    GatherState,
    GradReduction,
    ReduceState,
    _ParamAndGradBucketGroup,
    _ParamAndGradBuffer,
    gather_params,
    partition_buckets,
)
from megatron.core.distributed.param_layout import Range, default_bucket_size
from megatron.core.errors import ConfigError, ParallelStateError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.param_meta import param_meta
from megatron.core.process_groups_config import ProcessGroupCollection


@dataclasses.dataclass(frozen=True)
class ValidGrad:
    """The part of a reduced gradient that is valid on this rank: elements [start, start + len(grad)) of the flat parameter."""

    name: str
    param: torch.nn.Parameter
    start: int
    grad: torch.Tensor


class DistributedDataParallel(torch.nn.Module):
    """Wraps a module for training over data-parallel ranks (one is allowed).

    Args:
        config: the model's configuration; kept for callers.
        ddp_config: buckets, overlap, distributed optimizer.
        module: its trainable parameters get `main_grad`; frozen ones (requires_grad False) are left alone.
        disable_bucketing: one bucket per buffer.
        pg_collection: process groups; default: those that `initialize_model_parallel` installed.
        reduce_op: what gradients are after `finish_grad_sync`: the mean over the data-parallel ranks (default) or the sum.
            With average_in_collective it is always the mean.

    Attributes:
        buffers, expert_parallel_buffers: dense parameters, and experts' (reduced over expert-data-parallel).
        bucket_groups: all groups in backward order. param_to_bucket_group: the group of each parameter.

    A parameter that takes no part in a step has a zero gradient: its moments decay, and weight decay applies. A module that
    reads another module's parameter must call that module first (with overlap_param_gather, only a call waits).
    """

    buffers: list[_ParamAndGradBuffer]  # type: ignore[assignment]

    def __init__(
        self,
        config: ModelParallelConfig | None,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        reduce_op: str = "mean",
    ) -> None:
        super().__init__()
        if reduce_op not in ("mean", "sum"):
            raise ConfigError(f"reduce_op={reduce_op!r} must be mean or sum")
        self.config, self.ddp_config, self.module = config, ddp_config, module
        self.pg_collection = _resolved_groups(pg_collection)
        self.reduce_op = "mean" if ddp_config.average_in_collective else reduce_op
        self.data_parallel_size = self.pg_collection.size("dp_cp")
        self.staging = Staging()
        self.bucket_size = None if disable_bucketing else ddp_config.bucket_size or default_bucket_size(self.data_parallel_size)
        self.param_to_name = {param: name for name, param in module.named_parameters() if param.requires_grad}

        self.buffers = self._build_buffers(expert=False)
        self.expert_parallel_buffers = self._build_buffers(expert=True)
        self.bucket_groups = self._build_bucket_groups()
        self.param_to_bucket_group = {param: group for group in self.bucket_groups for param in group.params}

        self._nonfinite: list[str] = []
        self._unread_checks: list[tuple[list[str], torch.Tensor]] = []
        self._grad_accumulators = [self._hook_up(param) for param in self.param_to_name]  # kept: a hook dies with its node
        self._forward_hooks_of_params: list[Any] = []
        if ddp_config.overlap_param_gather:
            self.enable_forward_pre_hook()
        if ddp_config.check_overlap:
            OverlapCheck(module, self.bucket_groups, self.param_to_name)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module."""
        return self.module(*inputs, **kwargs)

    def all_buffers(self) -> list[_ParamAndGradBuffer]:
        """Dense buffers, then experts'."""
        return [*self.buffers, *self.expert_parallel_buffers]

    # Gradients

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, gradients are only accumulated: for all microbatches of a step but the last."""
        for group in self.bucket_groups:
            group.is_last_microbatch = False
        try:
            yield
        finally:
            for group in self.bucket_groups:
                group.is_last_microbatch = True

    def start_grad_sync(self, *unused: Any) -> None:
        """Start the reductions that have not started yet, in the one order that all ranks keep."""
        for group in self.bucket_groups:
            if group.reduce_state is ReduceState.IDLE:
                self._look_for_nonfinite(group)
                group.start_grad_sync()

    def finish_grad_sync(self, scale: float | torch.Tensor | None = None) -> None:
        """Wait for all reductions (starting those that haven't): gradients are the mean or sum over the ranks, times `scale`.

        With the distributed optimizer only this rank's shards hold the result.
        """
        self.start_grad_sync()
        for group in self.bucket_groups:
            group.start_second_reduction()
        for group in self.bucket_groups:
            group.finish_grad_sync(scale)

    def zero_grad_buffer(self, overwrite: bool = False) -> None:
        """Begin a step with zero gradients.

        overwrite: don't write zeros; each parameter's first gradient replaces the old values instead. Saves two passes over
            the gradients. For loops in which nothing but backward hooks writes to `main_grad`.
        """
        for group in self.bucket_groups:
            group.reset(overwrite)
        if not overwrite:
            for buffer in self.all_buffers():
                buffer.reset()
        self._nonfinite, self._unread_checks = [], []

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply all gradients."""
        for buffer in self.all_buffers():
            buffer.scale_gradients(scaling_factor)

    def nonfinite_grads(self) -> list[str]:
        """Names of the parameters whose gradient on this rank was not finite in this step, before it was reduced.

        Empty without check_for_nan_in_grad, and for fp16 (whose overflows the loss scaler handles).
        """
        for names, largest in self._unread_checks:
            self._nonfinite += [name for name, value in zip(names, largest.tolist(), strict=True) if not math.isfinite(value)]
        self._unread_checks = []
        return sorted(set(self._nonfinite))

    def valid_grads(self) -> Iterator[ValidGrad]:
        """After `finish_grad_sync`: the reduced gradients that this rank holds, in an order that all ranks of a stage share."""
        for buffer in self.all_buffers():
            for param, (start, end, bucket) in buffer.param_index_map.items():
                held = Range(start, end)
                if self.ddp_config.use_distributed_optimizer:
                    rank = collectives.group_rank(buffer.data_parallel_group)
                    held = held.intersection(buffer.shard_range(bucket, rank))
                if held.size:
                    yield ValidGrad(buffer.param_to_name[param], param, held.start - start, buffer.grad_data[held.slice()])

    def before_grads_are_read(self) -> None:
        """The optimizer is about to read the reduced gradients: observers are told."""
        for group in self.bucket_groups:
            group.tell(BucketEvent.GRADS_READING)

    def take_exposed_comm_time(self) -> float:
        """Seconds that this thread has waited for gradient reductions and parameter gathers since the last call.

        On CUDA a wait only orders streams, so the figure is the host's share; on CPU it is the communication left uncovered.
        """
        total = sum(group.exposed_time_s for group in self.bucket_groups)
        for group in self.bucket_groups:
            group.exposed_time_s = 0.0
        return total

    # Parameters

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather the parameters of all buckets, in forward order; asynchronously with overlap_param_gather.

        Args:
            force_sync: return only when all have arrived (gathers in flight are finished first).
            force_dispatch: start the gathers although forward pre-hooks are disabled.
        """
        if not self.ddp_config.use_distributed_optimizer:
            return
        in_forward_order = self.bucket_groups[::-1]
        if force_sync or not (self._forward_hooks_of_params or force_dispatch):
            gather_params(in_forward_order)
            return
        for group in in_forward_order:
            group.dispatch_gather()

    def finish_param_sync(self) -> None:
        """Complete what the last optimizer step started: afterwards parameters may be read without calling modules."""
        for group in reversed(self.bucket_groups):
            group.ensure_params()

    def enable_forward_pre_hook(self) -> None:
        """Let each module wait for its own parameters before it runs."""
        if self._forward_hooks_of_params:
            raise ConfigError("forward pre-hooks are already enabled; call disable_forward_pre_hook() first")
        covered: set[torch.nn.Module] = set()
        for module in self.module.modules():
            if module in covered:
                continue
            compiled = getattr(module, "_compiled_call_impl", None) is not None
            if compiled:  # one wait at its door: a hook inside would break the compiled graph
                covered.update(module.modules())
            groups = self._groups_of(module, recurse=compiled)
            if groups:
                hook: Any = functools.partial(_wait_for, groups)
                hook = torch.compiler.disable(hook) if compiled else hook
                self._forward_hooks_of_params.append(module.register_forward_pre_hook(hook))

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Remove the hooks. param_sync: first complete the gathers."""
        if not self._forward_hooks_of_params:
            raise ConfigError("forward pre-hooks are not enabled; call enable_forward_pre_hook() first")
        for handle in self._forward_hooks_of_params:
            handle.remove()
        self._forward_hooks_of_params = []
        if param_sync:
            self.finish_param_sync()

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Copy all parameters, trainable or not, from data-parallel rank 0."""
        for param in self.module.parameters():
            name = "expt_dp" if param_meta(param).is_expert else "dp_cp"
            collectives.broadcast(param.data, getattr(self.pg_collection, name))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's, with whole parameters."""
        self.finish_param_sync()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Into the wrapped module, in place (`assign` would take the parameters out of the buffers and is refused)."""
        if assign:
            raise ConfigError("load_state_dict(assign=True) would detach the parameters from their buffers; leave it False")
        self.finish_param_sync()
        return self.module.load_state_dict(state_dict, strict=strict)

    # Construction

    def _build_buffers(self, expert: bool) -> list[_ParamAndGradBuffer]:
        chosen: dict[tuple[torch.dtype, torch.dtype], list[tuple[int, torch.nn.Parameter]]] = {}
        for index, param in enumerate(self.param_to_name):
            if param_meta(param).is_expert == expert:
                grad_dtype = torch.float32 if self.ddp_config.grad_reduce_in_fp32 else param.dtype
                chosen.setdefault((param.dtype, grad_dtype), []).append((index, param))
        group, replica_group, factor = self._reduction_of(expert)
        op = "mean" if self.ddp_config.average_in_collective else "sum"
        kind = "expert " if expert else ""
        return [
            _ParamAndGradBuffer(
                self.ddp_config,
                param_dtype,
                grad_dtype,
                [param for _, param in members],
                group,
                self.bucket_size,
                self.param_to_name,
                factor,
                [index for index, _ in members],
                reduction=GradReduction(op, replica_group, self.staging),
                name=f"{kind}{str(param_dtype).removeprefix('torch.')} buffer",
            )
            for (param_dtype, grad_dtype), members in chosen.items()
        ]

    def _reduction_of(self, expert: bool) -> tuple[Group, Group, float]:
        """(ranks that share shards, ranks that repeat them, factor on what the collective gives)."""
        groups, instances = self.pg_collection, self.ddp_config.num_distributed_optimizer_instances
        group, replica_group = (groups.expt_dp if expert else groups.dp_cp), None
        if instances > 1:
            group = groups.intra_expt_dp if expert else groups.intra_dp_cp
            replica_group = groups.inter_expt_dp if expert else groups.inter_dist_opt
        size = collectives.group_size(group) * collectives.group_size(replica_group)
        used = any(param_meta(param).is_expert == expert for param in self.param_to_name)
        if used and (collectives.group_size(replica_group), size) != (instances, groups.size("expt_dp" if expert else "dp_cp")):
            raise ConfigError(
                f"num_distributed_optimizer_instances={instances} does not match the {'expert ' * expert}process groups "
                f"({collectives.group_size(replica_group)} instances of {collectives.group_size(group)} ranks); pass the same "
                "number to initialize_model_parallel"
            )
        if self.reduce_op == "sum":
            return group, replica_group, 1.0
        wanted = 1.0 / self.data_parallel_size  # also of experts: their tokens came from all data-parallel ranks
        return group, replica_group, wanted * size if self.ddp_config.average_in_collective else wanted

    def _build_bucket_groups(self) -> list[_ParamAndGradBucketGroup]:
        """All groups in one backward order, experts' among them."""
        return partition_buckets(self.all_buffers())

    def _groups_of(self, module: torch.nn.Module, recurse: bool) -> tuple[_ParamAndGradBucketGroup, ...]:
        params = [param for param in module.parameters(recurse=recurse) if param in self.param_to_bucket_group]
        return tuple(dict.fromkeys(self.param_to_bucket_group[param] for param in params))

    # Hooks

    def _hook_up(self, param: torch.nn.Parameter) -> Any:
        """Have `_on_grad` called once per backward, when all uses of the parameter have given their gradients.

        A layer that forms its weight's gradient itself puts it into `main_grad` as `begin_main_grad` says, and gives autograd
        none: the node's hook runs all the same. Where the backward is split, such a layer may also leave the gradient for later:
        it counts up `deferred_main_grads` meanwhile, and calls `main_grad_done` in the end.
        """
        # Weak: autograd's node keeps the parameter, and Python's collector cannot see through it.
        group, own = weakref.ref(self.param_to_bucket_group[param]), weakref.ref(self)
        if self.config is None or self.config.gradient_accumulation_fusion:
            param.begin_main_grad = functools.partial(_begin_grad, group, param)  # type: ignore[attr-defined]
        if self.config is not None and self.config.splits_backward:
            param.main_grad_done = functools.partial(_grad_is_there, own, param)  # type: ignore[attr-defined]
        view = param.expand_as(param)
        accumulator = None if view.grad_fn is None else view.grad_fn.next_functions[0][0]
        assert accumulator is not None
        accumulator.register_hook(functools.partial(_grad_is_there, own, param))
        return accumulator

    def _on_grad(self, param: torch.nn.Parameter) -> None:
        if getattr(param, "deferred_main_grads", 0):
            return
        group = self.param_to_bucket_group[param]
        group.add_grad(param)
        if group.is_last_microbatch:
            if param.device.type == "cpu":
                self._look_at(param)
            elif len(group.params_with_grad) == len(group.params) - 1:
                self._look_for_nonfinite(group)
            group.register_grad_ready(param)

    def _checks(self, param: torch.nn.Parameter) -> bool:
        return self.ddp_config.check_for_nan_in_grad and param.dtype != torch.float16

    def _look_at(self, param: torch.nn.Parameter) -> None:
        """Right after the gradient was written, while it is in the cache. A sum that overflows is looked at again."""
        if not self._checks(param):
            return
        grad = param.main_grad  # type: ignore[attr-defined]
        if not math.isfinite(grad.sum().item()) and not grad.isfinite().all():
            self._nonfinite.append(self.param_to_name[param])

    def _look_for_nonfinite(self, group: _ParamAndGradBucketGroup) -> None:
        """On a GPU: the largest magnitude of each gradient, read on demand only (no synchronisation)."""
        params = [param for param in self._ordered(group) if param.device.type != "cpu" and self._checks(param)]
        if params:
            largest = torch._foreach_norm([param.main_grad for param in params], math.inf)  # type: ignore[attr-defined]
            self._unread_checks.append(([self.param_to_name[param] for param in params], torch.stack(list(largest))))

    @staticmethod
    def _ordered(group: _ParamAndGradBucketGroup) -> list[torch.nn.Parameter]:
        return list(group.param_to_bucket)


def _resolved_groups(given: ProcessGroupCollection | None) -> ProcessGroupCollection:
    groups = ProcessGroupCollection.resolve(given)
    if groups.world is None and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ParallelStateError(
            f"{torch.distributed.get_world_size()} processes but no process groups: gradients would not be reduced; call "
            "initialize_model_parallel() before DistributedDataParallel, or pass pg_collection"
        )
    return groups


def link_model_chunks(model_chunks: list[DistributedDataParallel]) -> None:
    """Let each chunk's gathers follow the previous chunk's: its first group is started when the one before it has arrived."""
    for earlier, later in itertools.pairwise(model_chunks):
        if earlier.bucket_groups and later.bucket_groups:
            earlier.bucket_groups[0].next_param_gather_bucket_group = later.bucket_groups[-1]


def _begin_grad(group: "weakref.ref[_ParamAndGradBucketGroup]", param: torch.nn.Parameter) -> bool:
    found = group()
    assert found is not None, "the parameter's DistributedDataParallel is gone"
    return found.begin_grad(param)


def _grad_is_there(model: "weakref.ref[DistributedDataParallel]", param: torch.nn.Parameter, *unused: Any) -> None:
    found = model()
    if found is not None:
        found._on_grad(param)


def _wait_for(groups: tuple[_ParamAndGradBucketGroup, ...], module: torch.nn.Module, args: Any) -> None:
    for group in groups:
        if group.gather_state in (GatherState.WRITTEN, GatherState.IN_FLIGHT):
            group.ensure_params()
