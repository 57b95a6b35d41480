"""Optimizers: plain and distributed, over DistributedDataParallel's buffers. Start at `get_megatron_optimizer`."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.errors import ConfigError
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.memory_report import MemoryReport, memory_report
from megatron.core.optimizer.offload import Transfers
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import Condition, describe_param_groups
from megatron.core.process_groups_config import ProcessGroupCollection

__all__ = [
    "ChainedOptimizer",
    "DistributedOptimizer",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "MegatronOptimizer",
    "MemoryReport",
    "OptimizerConfig",
    "describe_param_groups",
    "get_megatron_optimizer",
    "memory_report",
]


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: DistributedDataParallel | Sequence[DistributedDataParallel],
    *,
    no_weight_decay_cond: Condition | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
    pg_collection: ProcessGroupCollection | None = None,
    transfers: Transfers | None = None,
) -> MegatronOptimizer:
    """The optimizer that fits the configuration and the model's dtypes.

    Args:
        config: hyperparameters; must agree with the chunks' `DistributedDataParallelConfig`.
        model_chunks: this rank's model, each chunk wrapped in DistributedDataParallel.
        no_weight_decay_cond(name, param): True = not decayed; default: by ParamMeta, else tensors of one dimension are not.
        scale_lr_cond(name, param): True = learning rate times `lr_mult`.
        pg_collection: must be the one the chunks were built with; None = take theirs.
        transfers: how values are copied with optimizer_cpu_offload; None = as fits the device.

    Raises ConfigError naming each disagreement.
    """
    chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
    _check(config, chunks, pg_collection)
    dtypes = {param.dtype for chunk in chunks for param in chunk.param_to_name}
    kind: type[MegatronOptimizer]
    if config.use_distributed_optimizer:
        kind = DistributedOptimizer
    elif dtypes & {torch.float16, torch.bfloat16}:
        kind = Float16OptimizerWithFloat16Params
    else:
        kind = FP32Optimizer
    return kind(
        config,
        chunks,
        no_weight_decay_cond=no_weight_decay_cond,
        scale_lr_cond=scale_lr_cond,
        lr_mult=lr_mult,
        transfers=transfers,
    )


def _check(config: OptimizerConfig, chunks: Sequence[Any], groups: ProcessGroupCollection | None) -> None:
    problems = []
    if not chunks:
        problems.append("model_chunks is empty; pass at least one DistributedDataParallel")
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel):
            raise ConfigError(
                f"model_chunks holds a {type(chunk).__name__}; wrap it: DistributedDataParallel(config, ddp_config, module)"
            )
        problems += _disagreements(config, chunk)
        if groups is not None and groups is not chunk.pg_collection:
            problems.append("pg_collection is not the one that DistributedDataParallel was given")
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))


def _disagreements(config: OptimizerConfig, chunk: DistributedDataParallel) -> list[str]:
    ddp, problems = chunk.ddp_config, []
    if config.use_distributed_optimizer != ddp.use_distributed_optimizer:
        problems.append(
            f"use_distributed_optimizer is {config.use_distributed_optimizer} in OptimizerConfig and "
            f"{ddp.use_distributed_optimizer} in DistributedDataParallelConfig; set both alike"
        )
    if config.overlap_param_gather_with_optimizer_step and not ddp.overlap_param_gather:
        problems.append("overlap_param_gather_with_optimizer_step=True needs overlap_param_gather=True")
    grads = {buffer.grad_dtype for buffer in chunk.all_buffers()}
    if config.main_grads_dtype == "bf16" and torch.float32 in grads:
        problems.append("main_grads_dtype=bf16 needs grad_reduce_in_fp32=False in DistributedDataParallelConfig")
    dtypes = {param.dtype for param in chunk.param_to_name}
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if dtype in dtypes and not getattr(config, name):
            problems.append(f"the model has {name} parameters but OptimizerConfig.{name} is False; set it")
    return problems
