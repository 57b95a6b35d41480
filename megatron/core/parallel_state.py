"""Facade under Megatron's names: `initialize_model_parallel` installs a ProcessGroupCollection; the getters read it.

No logic lives here. Core code takes a `ProcessGroupCollection` instead; only facades, entry points and tests import this module.
"""

import datetime
from typing import Any

import torch.distributed

from megatron.core import process_groups_config
from megatron.core.errors import ParallelStateError
from megatron.core.process_groups_config import ProcessGroupCollection, create_process_groups
from megatron.core.rank_grid import DEFAULT_ORDER, RankGrid

_virtual_rank: int | None = None
_virtual_size: int | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    distributed_timeout_minutes: float | None = None,
    order: str = DEFAULT_ORDER,
) -> ProcessGroupCollection:
    """Create and install all groups; every rank calls it, after `torch.distributed.init_process_group`.

    Raises ConfigError when the sizes do not fit the number of processes, ParallelStateError when called twice.
    """
    global _virtual_rank, _virtual_size
    if model_parallel_is_initialized():
        raise ParallelStateError("model parallel groups exist already; call destroy_model_parallel() first")
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    grid = RankGrid.for_world(
        world,
        tp=tensor_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        pp=pipeline_model_parallel_size,
        order=order,
        expert_tp=expert_tensor_parallel_size,
    )
    timeout = None if distributed_timeout_minutes is None else datetime.timedelta(minutes=distributed_timeout_minutes)
    groups = create_process_groups(grid, optimizer_instances=num_distributed_optimizer_instances, timeout=timeout)
    process_groups_config.install(groups)
    _virtual_size = virtual_pipeline_model_parallel_size
    _virtual_rank = None if _virtual_size is None else 0
    return groups


def destroy_model_parallel() -> None:
    """Forget the installed groups."""
    global _virtual_rank, _virtual_size
    process_groups_config.install(None)
    _virtual_rank = _virtual_size = None


def model_parallel_is_initialized() -> bool:
    """Whether `initialize_model_parallel` was called."""
    return process_groups_config.installed() is not None


def is_initialized() -> bool:
    """The same."""
    return model_parallel_is_initialized()


def get_process_groups() -> ProcessGroupCollection:
    """The installed collection; ParallelStateError before `initialize_model_parallel`."""
    groups = process_groups_config.installed()
    if groups is None:
        raise ParallelStateError("model parallel groups do not exist yet; call initialize_model_parallel() first")
    return groups


def _group(name: str) -> Any:
    return getattr(get_process_groups(), name)


def get_tensor_model_parallel_group(check_initialized: bool = True) -> Any:
    """Group of the tensor axis."""
    return _group("tp")


def get_tensor_model_parallel_world_size() -> int:
    """Size of the tensor axis."""
    return get_process_groups().size("tp")


def get_tensor_model_parallel_rank() -> int:
    """This rank's position on the tensor axis."""
    return get_process_groups().rank("tp")


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> Any:
    """Group of the pipeline axis."""
    return _group("pp")


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline stages."""
    return get_process_groups().size("pp")


def get_pipeline_model_parallel_rank() -> int:
    """This rank's stage."""
    return get_process_groups().rank("pp")


def is_pipeline_first_stage(ignore_virtual: bool = True) -> bool:
    """Whether this rank holds the first stage (and, unless ignored, its first chunk)."""
    first_chunk = ignore_virtual or _virtual_rank in (None, 0)
    return get_pipeline_model_parallel_rank() == 0 and first_chunk


def is_pipeline_last_stage(ignore_virtual: bool = True) -> bool:
    """Whether this rank holds the last stage (and, unless ignored, its last chunk)."""
    last_chunk = ignore_virtual or _virtual_size is None or _virtual_rank == _virtual_size - 1
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1 and last_chunk


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The model chunk in use; None without interleaving."""
    return _virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the model chunk in use."""
    global _virtual_rank
    _virtual_rank = rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Number of model chunks per stage; None without interleaving."""
    return _virtual_size


def get_context_parallel_group(check_initialized: bool = True) -> Any:
    """Group of the context axis."""
    return _group("cp")


def get_context_parallel_world_size() -> int:
    """Size of the context axis."""
    return get_process_groups().size("cp")


def get_context_parallel_rank() -> int:
    """This rank's position on the context axis."""
    return get_process_groups().rank("cp")


def _data_name(with_context_parallel: bool, partial_data_parallel: bool) -> str:
    if partial_data_parallel:
        return "intra_dp_cp"
    return "dp_cp" if with_context_parallel else "dp"


def get_data_parallel_group(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Any:
    """Group of the data axis; with the context axis; or this optimizer instance's part of both."""
    return _group(_data_name(with_context_parallel, partial_data_parallel))


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Size of `get_data_parallel_group`."""
    return get_process_groups().size(_data_name(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """This rank's position in `get_data_parallel_group`."""
    return get_process_groups().rank(_data_name(with_context_parallel, partial_data_parallel))


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first member of this rank's data-parallel group."""
    group = get_data_parallel_group(with_context_parallel)
    return 0 if group is None else torch.distributed.get_global_rank(group, 0)


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first member of this rank's tensor-parallel group."""
    group = get_tensor_model_parallel_group()
    return 0 if group is None else torch.distributed.get_global_rank(group, 0)


def get_model_parallel_group(check_initialized: bool = True) -> Any:
    """Group of the tensor and pipeline axes: the ranks that share one model."""
    return _group("mp")


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> Any:
    """Group of the tensor and context axes."""
    return _group("tp_cp")


def get_tensor_and_data_parallel_group(check_initialized: bool = True, with_context_parallel: bool = False) -> Any:
    """Group of the tensor, data and context axes."""
    return _group("tp_dp_cp")


def get_embedding_group(check_initialized: bool = True) -> Any:
    """First and last stage of this rank's pipeline; None on the stages between."""
    return _group("embd")


def get_position_embedding_group(check_initialized: bool = True) -> Any:
    """First stage of this rank's pipeline; None elsewhere."""
    return _group("pos_embd")


def get_expert_model_parallel_group(check_initialized: bool = True) -> Any:
    """Group of the expert axis."""
    return _group("ep")


def get_expert_model_parallel_world_size() -> int:
    """Size of the expert axis."""
    return get_process_groups().size("ep")


def get_expert_model_parallel_rank() -> int:
    """This rank's position on the expert axis."""
    return get_process_groups().rank("ep")


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> Any:
    """Tensor-parallel group inside experts."""
    return _group("expt_tp")


def get_expert_tensor_parallel_world_size() -> int:
    """Tensor-parallel size inside experts."""
    return get_process_groups().size("expt_tp")


def get_expert_tensor_parallel_rank() -> int:
    """This rank's position inside an expert's tensor-parallel group."""
    return get_process_groups().rank("expt_tp")


def get_expert_data_parallel_group(check_initialized: bool = True, partial_expert_data_parallel: bool = False) -> Any:
    """Ranks that hold the same experts."""
    return _group("expt_dp")


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Number of ranks that hold the same experts."""
    return get_process_groups().size("expt_dp")


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """This rank's position among the ranks that hold the same experts."""
    return get_process_groups().rank("expt_dp")


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> Any:
    """Equal ranks of all optimizer instances."""
    return _group("inter_dist_opt")
