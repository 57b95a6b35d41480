"""Facade over the installed ProcessGroupCollection, under Megatron's names. No logic of its own.

`initialize_model_parallel` builds a `RankGrid`, creates its groups and installs them; every `get_*` reads the installed
collection. New code takes a `ProcessGroupCollection` instead.
"""

import datetime

import torch.distributed as dist

from megatron.core import process_groups_config
from megatron.core.errors import ConfigError, ParallelStateError
from megatron.core.process_groups_config import Group, ProcessGroupCollection, create_process_groups
from megatron.core.rank_grid import DEFAULT_ORDER, RankGrid

_virtual_size: int | None = None
_virtual_rank: int | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    distributed_timeout_minutes: float | None = None,
    order: str = DEFAULT_ORDER,
) -> None:
    """Create this job's process groups and install them. Collective over all ranks of torch.distributed.

    distributed_timeout_minutes: of each group; None = that of the group of all ranks.

    Raises ConfigError naming the options when the processes cannot be divided so, ParallelStateError when groups are installed
    already.
    """
    global _virtual_size, _virtual_rank
    if model_parallel_is_initialized():
        raise ParallelStateError("model parallel groups exist already; call destroy_model_parallel() first")
    if virtual_pipeline_model_parallel_size is not None and pipeline_model_parallel_size < 2:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size={virtual_pipeline_model_parallel_size} needs "
            f"pipeline_model_parallel_size of at least 2, got {pipeline_model_parallel_size}"
        )
    grid = RankGrid.for_world(
        dist.get_world_size() if dist.is_initialized() else 1,
        tp=tensor_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        pp=pipeline_model_parallel_size,
        order=order,
        expert_tp=expert_tensor_parallel_size,
    )
    timeout = None if distributed_timeout_minutes is None else datetime.timedelta(minutes=distributed_timeout_minutes)
    process_groups_config.install(
        create_process_groups(grid, optimizer_instances=num_distributed_optimizer_instances, timeout=timeout)
    )
    _virtual_size = virtual_pipeline_model_parallel_size
    _virtual_rank = None if virtual_pipeline_model_parallel_size is None else 0


def destroy_model_parallel() -> None:
    """Forget the installed groups. Not a collective; does nothing when none are installed."""
    global _virtual_size, _virtual_rank
    process_groups_config.install(None)
    _virtual_size = _virtual_rank = None


def model_parallel_is_initialized() -> bool:
    """Whether groups are installed."""
    return process_groups_config.installed() is not None


def is_initialized() -> bool:
    """Whether groups are installed."""
    return model_parallel_is_initialized()


def get_process_groups() -> ProcessGroupCollection:
    """The installed groups. Raises ParallelStateError when there are none."""
    groups = process_groups_config.installed()
    if groups is None:
        raise ParallelStateError(
            "process groups do not exist yet; call megatron.core.parallel_state.initialize_model_parallel(...) first"
        )
    return groups


def _group(name: str, check_initialized: bool = True) -> Group:
    return getattr(get_process_groups(), name) if check_initialized or model_parallel_is_initialized() else None


def _size(name: str) -> int:
    return get_process_groups().size(name)


def _rank(name: str) -> int:
    return get_process_groups().rank(name)


# Groups


def get_model_parallel_group(check_initialized: bool = True) -> Group:
    """Ranks of one copy of the model (tp x pp)."""
    return _group("mp", check_initialized)


def get_tensor_model_parallel_group(check_initialized: bool = True) -> Group:
    """Ranks that share each layer's matrices."""
    return _group("tp", check_initialized)


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> Group:
    """Stages of this rank's pipeline."""
    return _group("pp", check_initialized)


def get_data_parallel_group(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Group:
    """Ranks with copies of the same weights. partial_data_parallel: those of this optimizer instance only."""
    if partial_data_parallel and not with_context_parallel:
        raise ParallelStateError("partial_data_parallel=True needs with_context_parallel=True")
    return _group("intra_dp_cp" if partial_data_parallel else "dp_cp" if with_context_parallel else "dp")


def get_context_parallel_group(check_initialized: bool = True) -> Group:
    """Ranks that share each sequence."""
    return _group("cp", check_initialized)


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> Group:
    """tp x cp."""
    return _group("tp_cp", check_initialized)


def get_tensor_and_data_parallel_group(with_context_parallel: bool = False) -> Group:
    """tp x dp, or tp x dp x cp."""
    return _group("tp_dp_cp" if with_context_parallel else "tp_dp")


def get_embedding_group(check_initialized: bool = True) -> Group:
    """First and last stage of this rank's pipeline; None on a stage between."""
    return _group("embd", check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> Group:
    """The first stage; None on others."""
    return _group("pos_embd", check_initialized)


def get_expert_model_parallel_group(check_initialized: bool = True) -> Group:
    """Ranks that share the experts."""
    return _group("ep", check_initialized)


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> Group:
    """Ranks that share each expert's matrices."""
    return _group("expt_tp", check_initialized)


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> Group:
    """expert tp x ep."""
    return _group("tp_ep", check_initialized)


def get_expert_tensor_model_pipeline_parallel_group(check_initialized: bool = True) -> Group:
    """expert tp x ep x pp."""
    return _group("tp_ep_pp", check_initialized)


def get_expert_data_parallel_group() -> Group:
    """Ranks with copies of the same experts."""
    return _group("expt_dp")


def get_inter_distributed_optimizer_instance_group() -> Group:
    """Ranks with the same optimizer shard in other instances."""
    return _group("inter_dist_opt")


def get_intra_distributed_optimizer_instance_group() -> Group:
    """All ranks of this optimizer instance."""
    return _group("intra_dist_opt")


# Sizes and ranks


def get_tensor_model_parallel_world_size() -> int:
    """Tensor-parallel size."""
    return _size("tp")


def get_tensor_model_parallel_rank() -> int:
    """Position in the tensor-parallel group."""
    return _rank("tp")


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    return _size("pp")


def get_pipeline_model_parallel_rank() -> int:
    """This rank's stage."""
    return _rank("pp")


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Data-parallel size."""
    return _size_of(get_data_parallel_group(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Position in the data-parallel group."""
    group = get_data_parallel_group(with_context_parallel, partial_data_parallel)
    return 0 if group is None else dist.get_rank(group)


def get_context_parallel_world_size() -> int:
    """Context-parallel size."""
    return _size("cp")


def get_context_parallel_rank() -> int:
    """Position in the context-parallel group."""
    return _rank("cp")


def get_tensor_and_context_parallel_world_size() -> int:
    """tp x cp."""
    return _size("tp_cp")


def get_tensor_and_context_parallel_rank() -> int:
    """Position in tp x cp."""
    return _rank("tp_cp")


def get_expert_model_parallel_world_size() -> int:
    """Expert-parallel size."""
    return _size("ep")


def get_expert_model_parallel_rank() -> int:
    """Position in the expert-parallel group."""
    return _rank("ep")


def get_expert_tensor_parallel_world_size() -> int:
    """Tensor-parallel size inside experts."""
    return _size("expt_tp")


def get_expert_tensor_parallel_rank() -> int:
    """Position in the tensor-parallel group inside experts."""
    return _rank("expt_tp")


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """expert tp x ep."""
    return _size("tp_ep")


def get_expert_tensor_and_model_parallel_rank() -> int:
    """Position in expert tp x ep."""
    return _rank("tp_ep")


def get_expert_data_parallel_world_size() -> int:
    """Copies of each expert."""
    return _size("expt_dp")


def get_expert_data_parallel_rank() -> int:
    """Position among the copies of an expert."""
    return _rank("expt_dp")


def _size_of(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


# Global ranks


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first rank of the tensor-parallel group."""
    return get_process_groups().ranks("tp")[0]


def get_model_parallel_src_rank() -> int:
    """Global rank of the first rank of this copy of the model."""
    return get_process_groups().ranks("mp")[0]


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first rank of the data-parallel group."""
    return get_process_groups().ranks("dp_cp" if with_context_parallel else "dp")[0]


def get_context_parallel_global_ranks() -> list[int]:
    """Global ranks of the context-parallel group."""
    return get_process_groups().ranks("cp")


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first stage."""
    return get_process_groups().ranks("pp")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last stage."""
    return get_process_groups().ranks("pp")[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage, the first after the last."""
    ranks = get_process_groups().ranks("pp")
    return ranks[(_rank("pp") + 1) % len(ranks)]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the stage before, the last before the first."""
    ranks = get_process_groups().ranks("pp")
    return ranks[(_rank("pp") - 1) % len(ranks)]


# Stages


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Model chunks per stage; None without a virtual pipeline."""
    return _virtual_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The chunk that runs now; None without a virtual pipeline."""
    return _virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Say which chunk runs now."""
    global _virtual_rank
    _virtual_rank = rank


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank (and chunk, unless ignore_virtual) holds the embedding."""
    chunk = _virtual_rank if vp_stage is None else vp_stage
    return _rank("pp") == 0 and (ignore_virtual or not chunk)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank (and chunk, unless ignore_virtual) holds the output layer."""
    chunk = _virtual_rank if vp_stage is None else vp_stage
    last_chunk = ignore_virtual or _virtual_size is None or chunk == _virtual_size - 1
    return _rank("pp") == _size("pp") - 1 and last_chunk


def is_rank_in_embedding_group() -> bool:
    """Whether this rank's stage is the first or the last."""
    return _rank("pp") in (0, _size("pp") - 1)


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank's stage is the first."""
    return _rank("pp") == 0
