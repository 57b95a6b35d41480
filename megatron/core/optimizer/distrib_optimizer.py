"""DistributedOptimizer: ZeRO stage 1. Each data-parallel rank keeps main params and states of its shards only.

    grad buffer --reduce-scatter--> grad shard --update--> main shard --cast--> param shard --all-gather--> param buffer

Bucket by bucket in forward order; with overlap_param_gather_with_optimizer_step a bucket's gather starts as soon as its shard
is written, else after the last bucket. In fp32 the main shard is the param shard: nothing is copied.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core import collectives
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel, link_model_chunks
from megatron.core.distributed.param_and_grad_buffer import (
    GatherState,
    _ParamAndGradBucket,
    _ParamAndGradBucketGroup,
    _ParamAndGradBuffer,
    gather_params,
)
from megatron.core.distributed.param_layout import Range
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.optimizer.distrib_optimizer_state import cut_params, gather_flat, logical_tensor, scatter_flat
from megatron.core.optimizer.offload import OffloadedShard, offloaded
from megatron.core.optimizer.optimizer import WIDE_DTYPES, MainParam, MegatronOptimizer, UpdateUnit, main_dtype
from megatron.core.optimizer.shard_map import build_shard_map, pack_states
from megatron.core.optimizer.stored_values import Stored, StoredFlats
from megatron.core.param_meta import ParamMeta, param_meta

__all__ = ["DistributedOptimizer", "Range"]

DP_ZERO_FORMAT = "megadlms optimizer dp-zero 1"


class DistributedOptimizer(MegatronOptimizer):
    """Optimizer over the shards of DistributedDataParallel's buckets (ddp_config.use_distributed_optimizer)."""

    # Units

    def _build_units(self) -> list[UpdateUnit]:
        link_model_chunks(self.model_chunks)
        groups = [group for chunk in self.model_chunks for group in reversed(chunk.bucket_groups)]
        owner = {id(bucket): buffer for chunk in self.model_chunks for buffer in chunk.all_buffers() for bucket in buffer.buckets}
        sizes = [sum(bucket.grad_data.numel() for bucket in group.buckets) for group in groups]
        fraction = self.config.optimizer_offload_fraction if self.config.optimizer_cpu_offload else 0.0
        units = []
        for group, on_host in zip(groups, offloaded(sizes, fraction), strict=True):
            unit = UpdateUnit([], [], [], [], [], bucket_group=group, rounding=self._rounding())
            for bucket in group.buckets:
                self._add_bucket(unit, group, owner[id(bucket)], bucket, on_host)
            units.append(unit)
        return units

    def _add_bucket(
        self,
        unit: UpdateUnit,
        group: _ParamAndGradBucketGroup,
        buffer: _ParamAndGradBuffer,
        bucket: _ParamAndGradBucket,
        on_host: bool,
    ) -> None:
        assert bucket.param_data is not None
        param_shard, grad_shard = group.local_shard(bucket.param_data), group.local_shard(bucket.grad_data)
        device_grad = grad_shard
        if on_host:
            assert self.transfers is not None
            unit.offload.append(OffloadedShard.of(self.transfers, param_shard, grad_shard))
            param_shard, grad_shard = unit.offload[-1].host_param, unit.offload[-1].host_grad
        grad = self._fp32_grads(grad_shard, unit)
        shard_map = self._build_model_gbuf_range(buffer, bucket.bucket_id)["param_map"]
        if self.config.use_precision_aware_optimizer:
            stored = StoredFlats(self.config, param_shard, self.state_names)
            unit.stored.append(stored)
            for param, ranges in shard_map.items():
                part, name = ranges["gbuf_local"].slice(), buffer.param_to_name[param]
                unit.main_params.append(self._blockwise_main(stored, part, param, name, ranges["param"].start, grad[part]))
        else:
            self._add_main_params(unit, buffer, param_shard, grad, shard_map)
            self._add_matrices(unit, buffer, bucket)
        for main in unit.main_params if on_host else ():
            if main.param in shard_map:
                main.device_grad = device_grad[shard_map[main.param]["gbuf_local"].slice()]
        counted = {param: ranges["gbuf_local"] for param, ranges in shard_map.items() if self.counts(param)}
        self._count(unit, device_grad if on_host else grad, counted)

    def _add_main_params(
        self,
        unit: UpdateUnit,
        buffer: _ParamAndGradBuffer,
        param_shard: torch.Tensor,
        grad: torch.Tensor,
        shard_map: dict[torch.nn.Parameter, dict[str, Range]],
    ) -> None:
        """Main params and states in fp32. grad: flat, like the shard."""
        main = param_shard
        if param_shard.dtype not in WIDE_DTYPES:
            main = param_shard.float()
            unit.param_copies.append((param_shard, main))
        states, state_of = self._allocate_states(main, {param: ranges["gbuf_local"] for param, ranges in shard_map.items()})
        unit.flats.append({"main_param": main, **states})
        for param, ranges in shard_map.items():
            local = ranges["gbuf_local"].slice()
            unit.main_params.append(
                MainParam(
                    buffer.param_to_name[param],
                    param,
                    ranges["param"].start,
                    main[local],
                    grad[local],
                    state_of[param],
                    self._group_of[param],
                )
            )

    def _add_matrices(self, unit: UpdateUnit, buffer: _ParamAndGradBuffer, bucket: _ParamAndGradBucket) -> None:
        """What each rank holds of the bucket's matrices for Muon."""
        shards = [buffer.shard_range(bucket.bucket_id, rank) for rank in range(buffer.data_parallel_world_size)]
        mains = {main.param: main for main in unit.main_params}
        for param in bucket.params_list:
            if self._group_of[param]["optimizer"] == "muon":
                start, end, _ = buffer.param_index_map[param]
                held = [shard.intersection(Range(start, end)).shifted(-start) for shard in shards]
                unit.matrices.append(self._shared_matrix(param, mains.get(param), held))

    def _allocate_states(
        self, main: torch.Tensor, held: Mapping[torch.nn.Parameter, Range]
    ) -> tuple[dict[str, torch.Tensor], dict[torch.nn.Parameter, dict[str, torch.Tensor]]]:
        """A bucket's states as flat tensors by name, and each parameter's views of them.

        main: flat main shard. held: parameter -> its part of the shard. With one rule a state lies like the shard.
        """
        if len(self.rules) == 1:
            places = {param: dict.fromkeys(self.state_names[1:], part) for param, part in held.items()}
            sizes = dict.fromkeys(self.state_names[1:], main.numel())
        else:
            places, sizes = pack_states(held, {param: self.state_names_of(param)[1:] for param in held})
        flats = {name: main.new_zeros(size) for name, size in sizes.items()}
        views = {param: {name: flats[name][at.slice()] for name, at in where.items()} for param, where in places.items()}
        return flats, views

    @classmethod
    def _build_model_gbuf_param_range_map(
        cls,
        param_world_index_map: Mapping[torch.nn.Parameter, tuple[int, int, int]],
        gbuf_world_range: Range,
        bucket_offset: int,
    ) -> dict[torch.nn.Parameter, dict[str, Range]]:
        """Megatron's name for `shard_map.build_shard_map`."""
        return build_shard_map(param_world_index_map, gbuf_world_range, bucket_offset)

    @classmethod
    def _build_model_gbuf_range(
        cls, param_and_grad_buffer: _ParamAndGradBuffer, bucket_index: int
    ) -> dict[str, dict[torch.nn.Parameter, dict[str, Range]]]:
        """{"param_map": ranges of the parameters in this rank's shard of one bucket}."""
        rank = collectives.group_rank(param_and_grad_buffer.data_parallel_group)
        bucket = param_and_grad_buffer.layout.buckets[bucket_index]
        params = [param_and_grad_buffer.params[index] for index in sorted(bucket.params)]
        index_map = {param: param_and_grad_buffer.param_index_map[param] for param in params}
        shard = param_and_grad_buffer.shard_range(bucket_index, rank)
        return {"param_map": cls._build_model_gbuf_param_range_map(index_map, shard, bucket.range.start)}

    @classmethod
    def _build_gbuf_range_map(
        cls, param_and_grad_buffer: _ParamAndGradBuffer
    ) -> dict[tuple[torch.dtype, torch.dtype], list[dict[str, dict[torch.nn.Parameter, dict[str, Range]]]]]:
        """{(param dtype, grad dtype): one `_build_model_gbuf_range` per bucket}."""
        key = (param_and_grad_buffer.param_dtype, param_and_grad_buffer.grad_dtype)
        buckets = range(len(param_and_grad_buffer.buckets))
        return {key: [cls._build_model_gbuf_range(param_and_grad_buffer, index) for index in buckets]}

    # Step

    def _after_unit(self, unit: UpdateUnit) -> None:
        assert unit.bucket_group is not None
        unit.bucket_group.mark_written()
        if self.config.overlap_param_gather_with_optimizer_step:
            unit.bucket_group.dispatch_gather()

    def _after_update(self) -> None:
        for index, chunk in enumerate(self.model_chunks):
            waiting = [group for group in reversed(chunk.bucket_groups) if group.gather_state is GatherState.WRITTEN]
            if not chunk.ddp_config.overlap_param_gather:
                gather_params(waiting)
            elif index == 0 or chunk.ddp_config.align_param_gather:
                for group in waiting:
                    group.dispatch_gather()

    def _norm_groups(self, expert: bool) -> tuple[str, ...]:
        return (self._shard_group(expert), "tp_ep_pp" if expert else "mp")

    def _shard_group(self, expert: bool = False) -> str:
        """Group whose ranks share the shards: data x context parallel (of experts: expert-data-parallel), or one instance of it."""
        whole = "expt_dp" if expert else "dp_cp"
        return f"intra_{whole}" if self.model_chunks[0].ddp_config.num_distributed_optimizer_instances > 1 else whole

    @torch.no_grad()
    def reload_after_load(self) -> None:
        """Main params were loaded: write them into the model and gather (a collective)."""
        super().reload_after_load()
        for chunk in self.model_chunks:
            for group in chunk.bucket_groups:
                group.mark_written()
            chunk.start_param_sync(force_sync=True)

    # State

    def _replica_groups(self, meta: ParamMeta) -> tuple[str, ...]:
        instances = self.model_chunks[0].ddp_config.num_distributed_optimizer_instances
        data = ("inter_expt_dp" if meta.is_expert else "inter_dist_opt",) if instances > 1 else ()
        return (*data, *meta.replica_groups)

    def _layout(self) -> dict[str, Any]:
        group = self._shard_group()
        rank_and_size = [self.groups.rank(group), self.groups.size(group)]
        return {"data-parallel rank and size": rank_and_size, **super()._layout()}

    def sharded_state_dict(self, sharding_type: str = "fully_sharded_model_space") -> dict[str, ShardedTensor]:
        """Logical tensors of the state.

        sharding_type: fully_sharded_model_space = every rank gives its own parts (views: loading copies in place);
            dp_zero_gather_scatter = data-parallel rank 0 gives all of its group's (copies, gathered here: a collective; for
            saving only). Both write the same names and shapes, so either loads what the other wrote.
        """
        if sharding_type == "fully_sharded_model_space":
            return self.sharded_param_state_fs_model_space()
        if sharding_type == "dp_zero_gather_scatter":
            return self.sharded_param_state_dp_zero()
        raise ConfigError(
            f"sharding_type={sharding_type!r} is unknown; use fully_sharded_model_space or dp_zero_gather_scatter"
        )

    def sharded_param_state_fs_model_space(self) -> dict[str, ShardedTensor]:
        """What this rank holds of each logical tensor."""
        return super().sharded_state_dict()

    def sharded_param_state_dp_zero(self) -> dict[str, ShardedTensor]:
        """All logical tensors on data-parallel rank 0, none on the others (a collective)."""
        state = self.get_parameter_state_dp_zero()
        tensors = {}
        for name, values in state["params"].items() if state is not None else ():
            param = self._param_by_name(name)
            for key, value in values.items():
                replication = self._replication(param_meta(param))
                tensor = logical_tensor(f"optimizer.{key}.{name}", param, 0, value.view(-1), replication)
                tensors[tensor.name] = tensor
        return tensors

    @torch.no_grad()
    def get_parameter_state_dp_zero(self) -> dict[str, Any] | None:
        """Whole main params and states of all parameters on data-parallel rank 0 (a collective over its group).

        {"format", "common", "params": {parameter: {"main_param" | state name: tensor of the parameter's shape}}}, on CPU; None
        on the other ranks.
        """
        params: dict[str, dict[str, torch.Tensor]] = {}
        for buffer, bucket in self._buckets():
            for key in self.state_names:
                ranges = self._ranges(buffer, bucket, key)
                shard, parts = self._as_shard(buffer, bucket, key)
                for view, stored in parts:
                    view.copy_(stored.values())
                whole = gather_flat(shard, buffer.data_parallel_group)
                if whole is not None:
                    for name, value in cut_params(whole.cpu(), ranges, bucket.offset).items():
                        params.setdefault(name, {})[key] = value.clone()
        if any(collectives.group_rank(buffer.data_parallel_group) for buffer, _ in self._buckets()):
            return None
        return {"format": DP_ZERO_FORMAT, "common": self.common_state_dict(), "params": params}

    @torch.no_grad()
    def load_parameter_state_from_dp_zero(self, state: Mapping[str, Any] | None) -> None:
        """Inverse of `get_parameter_state_dp_zero`: rank 0 gives the state, every rank takes its shard (a collective).

        Raises CheckpointError on all ranks of the group if the state doesn't fit.
        """
        problem = _common_problem(self._dp_zero_problem(state), self.model_chunks[0])
        if problem is not None:
            raise CheckpointError(problem)
        self.finish_param_sync()
        for buffer, bucket in self._buckets():
            for key in self.state_names:
                ranges = self._ranges(buffer, bucket, key)
                shard, parts = self._as_shard(buffer, bucket, key)
                whole = None
                if collectives.group_rank(buffer.data_parallel_group) == 0:
                    assert state is not None
                    whole = shard.new_zeros(bucket.grad_data.numel())
                    for name, view in cut_params(whole, ranges, bucket.offset).items():
                        view.copy_(state["params"][name][key])
                scatter_flat(whole, shard, buffer.data_parallel_group)
                for view, stored in parts:
                    stored.assign(view)
        common = collectives.gather_objects(None if state is None else state["common"], self._main_group())[0]
        self.load_common_state_dict(common)
        self.reload_after_load()

    def save_parameter_state(self, filename: str | Path) -> None:
        """Write `get_parameter_state_dp_zero` to a file on data-parallel rank 0 (a collective)."""
        state = self.get_parameter_state_dp_zero()
        if state is not None:
            torch.save(state, filename)

    def load_parameter_state(self, filename: str | Path) -> None:
        """Read what `save_parameter_state` wrote, with any data-parallel size (a collective; rank 0 reads the file)."""
        state = None
        if collectives.group_rank(self._main_group()) == 0:
            state = torch.load(filename, map_location="cpu", weights_only=True)
        self.load_parameter_state_from_dp_zero(state)

    def _main_group(self) -> collectives.Group:
        return getattr(self.groups, self._shard_group())

    def _buckets(self) -> list[tuple[_ParamAndGradBuffer, _ParamAndGradBucket]]:
        """Every bucket with its buffer, in the order of the updates."""
        owner = {id(b): buffer for chunk in self.model_chunks for buffer in chunk.all_buffers() for b in buffer.buckets}
        found = []
        for unit in self.units:
            assert unit.bucket_group is not None
            found += [(owner[id(bucket)], bucket) for bucket in unit.bucket_group.buckets]
        return found

    def _as_shard(
        self, buffer: _ParamAndGradBuffer, bucket: _ParamAndGradBucket, key: str
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, Stored]]]:
        """Memory that lies like this rank's shard of a bucket (zeros), and pairs of (its view, a parameter's value `key`)."""
        shard_map = self._build_model_gbuf_range(buffer, bucket.bucket_id)["param_map"]
        values = {main.param: main.stored() for main in self.main_params() if main.param in shard_map}
        size = buffer.shard_range(bucket.bucket_id, 0).size
        shard = torch.zeros(size, dtype=main_dtype(bucket.params_list[0]), device=bucket.grad_data.device)
        pairs = [
            (shard[shard_map[param]["gbuf_local"].slice()], stored[key]) for param, stored in values.items() if key in stored
        ]
        return shard, pairs

    def _ranges(
        self, buffer: _ParamAndGradBuffer, bucket: _ParamAndGradBucket, key: str
    ) -> dict[str, tuple[int, torch.Size]]:
        """Name -> (start in the buffer, shape) of the bucket's parameters that have the value `key`."""
        params = [param for param in bucket.params_list if key in self.state_names_of(param)]
        return {buffer.param_to_name[param]: (buffer.param_index_map[param][0], param.shape) for param in params}

    def _param_by_name(self, name: str) -> torch.nn.Parameter:
        return next(param for chunk in self.model_chunks for param, known in chunk.param_to_name.items() if known == name)

    def _dp_zero_problem(self, state: Mapping[str, Any] | None) -> str | None:
        """Why rank 0's state can't be loaded; None elsewhere and if it can."""
        if collectives.group_rank(self._main_group()) != 0:
            return None
        if state is None or state.get("format") != DP_ZERO_FORMAT:
            return "not a parameter state that save_parameter_state wrote"
        try:
            self.check_common_state_dict(state["common"])
        except CheckpointError as error:
            return str(error)
        for chunk in self.model_chunks:
            for param, name in chunk.param_to_name.items():
                saved = state["params"].get(name)
                wanted = self.state_names_of(param)
                if saved is None or sorted(saved) != sorted(wanted):
                    return f"the parameter state has no {', '.join(wanted)} of {name}"
                shape = list(saved["main_param"].shape)
                if shape != list(param.shape):
                    return f"{name} is {shape} in the parameter state, {list(param.shape)} in the model"
        return None


def _common_problem(own: str | None, chunk: DistributedDataParallel) -> str | None:
    """The first problem that any data-parallel rank has, on all of them."""
    problems = collectives.gather_objects(own, chunk.pg_collection.dp_cp)
    return next((problem for problem in problems if problem is not None), None)
