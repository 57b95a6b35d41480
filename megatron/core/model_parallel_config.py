"""ModelParallelConfig: how the job is cut over ranks, and the precision it computes in."""

import dataclasses

import torch

from megatron.core.config_field import config_field, field_violations
from megatron.core.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelParallelConfig:
    """Sizes of the parallel axes and the compute precision. Section `parallel` of a run's configuration."""

    tensor_model_parallel_size: int = config_field(
        1, minimum=1, help="Ranks that share each layer's matrices (tensor parallelism)."
    )
    pipeline_model_parallel_size: int = config_field(1, minimum=1, help="Pipeline stages.")
    virtual_pipeline_model_parallel_size: int | None = config_field(
        None, minimum=1, help="Model chunks per pipeline stage (interleaved schedule)."
    )
    context_parallel_size: int = config_field(1, minimum=1, help="Ranks that share each sequence (context parallelism).")
    expert_model_parallel_size: int = config_field(
        1, minimum=1, help="Ranks that share the experts (expert parallelism), carved out of data parallelism."
    )
    expert_tensor_parallel_size: int | None = config_field(
        None, minimum=1, help="Tensor-parallel size inside experts; default: tensor_model_parallel_size."
    )
    sequence_parallel: bool = config_field(
        False, help="Split norms and dropout along the sequence over the tensor-parallel ranks."
    )
    fp16: bool = config_field(False, help="Train in fp16 with loss scaling; fp32 main params in the optimizer.")
    bf16: bool = config_field(False, help="Train in bf16; fp32 gradients and main params.")
    gradient_accumulation_fusion: bool = config_field(
        True,
        help="Linear layers put their weights' gradients straight into the gradient buffer, where its dtype is the computation's.",
    )

    def __post_init__(self) -> None:
        problems = [f"{name} {reason}" for name, reason in field_violations(self)]
        if self.fp16 and self.bf16:
            problems.append("fp16 and bf16 exclude each other; set at most one")
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def params_dtype(self) -> torch.dtype:
        """dtype of parameters and of the computation."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.float32
