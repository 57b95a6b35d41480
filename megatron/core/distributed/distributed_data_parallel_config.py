"""DistributedDataParallelConfig: buckets, reductions and overlap of the data-parallel engine."""

import dataclasses

from megatron.core.config_field import config_field, field_violations
from megatron.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedDataParallelConfig:
    """Section `ddp` of a run's configuration, and the `ddp_config` of `DistributedDataParallel`."""

    grad_reduce_in_fp32: bool = config_field(
        False,
        flag="--accumulate-allreduce-grads-in-fp32",
        aliases=("accumulate_allreduce_grads_in_fp32",),
        help="Accumulate and reduce gradients in fp32 whatever the parameter dtype (set automatically for bf16).",
    )
    overlap_grad_reduce: bool = config_field(False, help="Reduce each bucket's gradients while the backward still runs.")
    overlap_param_gather: bool = config_field(
        False, help="Gather updated parameters under the next forward. Needs the distributed optimizer and overlap_grad_reduce."
    )
    align_param_gather: bool = config_field(
        False, help="Start the gathers of all pipeline stages at the same time (virtual pipeline)."
    )
    use_distributed_optimizer: bool = config_field(
        False, help="Shard fp32 main params and optimizer moments over the data-parallel ranks (ZeRO stage 1)."
    )
    num_distributed_optimizer_instances: int = config_field(
        1, minimum=1, help="Number of replicas of the sharded optimizer state inside data parallelism."
    )
    check_for_nan_in_grad: bool = config_field(
        True,
        flag="--check-for-nan-in-loss-and-grad",
        negative_flag="--no-check-for-nan-in-loss-and-grad",
        aliases=("check_for_nan_in_loss_and_grad",),
        help="Look for NaN and infinity in loss and local gradients before they are reduced, and name rank and parameter.",
    )
    bucket_size: int | None = config_field(
        None,
        flag="--ddp-bucket-size",
        aliases=("ddp_bucket_size",),
        minimum=1,
        unit="elements",
        help="Elements per bucket; default max(40,000,000, 1,000,000 x data-parallel size).",
    )
    check_overlap: bool = config_field(
        False,
        help="Proof mode: check every read and write of parameters and gradients against the collectives in flight, and raise "
        "at the first out of order. Same numbers, slower.",
    )
    average_in_collective: bool = config_field(
        False,
        flag="--ddp-average-in-collective",
        aliases=("ddp_average_in_collective",),
        help="Average inside the reduction instead of scaling gradients before it.",
    )

    def __post_init__(self) -> None:
        problems = [f"{name} {reason}" for name, reason in field_violations(self)]
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            problems.append("overlap_param_gather=True needs use_distributed_optimizer=True (only it gathers parameters)")
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            problems.append("overlap_param_gather=True needs overlap_grad_reduce=True")
        if self.num_distributed_optimizer_instances > 1 and not self.use_distributed_optimizer:
            problems.append("num_distributed_optimizer_instances > 1 needs use_distributed_optimizer=True")
        if problems:
            raise ConfigError("; ".join(problems))
