"""ModelParallelConfig: how the job is cut over ranks, and the precision it computes in."""

import dataclasses

import torch

from megatron.core.config_field import config_field, field_violations
from megatron.core.errors import ConfigError
from megatron.core.pipeline_parallel.schedule_plan import SCHEDULES, SPLIT_BACKWARD

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelParallelConfig:
    """Sizes of the parallel axes and the compute precision. Section `parallel` of a run's configuration."""

    tensor_model_parallel_size: int = config_field(
        1, minimum=1, help="Ranks that share each layer's matrices (tensor parallelism)."
    )
    pipeline_model_parallel_size: int = config_field(1, minimum=1, help="Pipeline stages.")
    virtual_pipeline_model_parallel_size: int | None = config_field(
        None,
        minimum=1,
        aliases=("num_virtual_stages_per_pipeline_rank",),
        help="Model chunks per pipeline stage (interleaved schedule; 2 with zb_v).",
    )
    pipeline_schedule: str = config_field(
        "1f1b",
        choices=SCHEDULES,
        help="Order of forwards and backwards: 1f1b (interleaved where stages have several model chunks), or with the backward split "
        "so that the weights' gradients fill the bubbles: zb_h1 (memory of 1f1b), zb_v (two chunks per stage, placed like a V).",
    )
    decoder_first_pipeline_num_layers: int | None = config_field(
        None, minimum=0, help="Layers of the first part of the pipeline; the others share the rest evenly."
    )
    decoder_last_pipeline_num_layers: int | None = config_field(
        None, minimum=0, help="Layers of the last part of the pipeline; the others share the rest evenly."
    )
    account_for_embedding_in_pipeline_split: bool = config_field(
        False, help="The embedding weighs as much as a layer when layers are split over the pipeline."
    )
    account_for_loss_in_pipeline_split: bool = config_field(
        False, help="Head and loss weigh as much as a layer when layers are split over the pipeline."
    )
    pipeline_model_parallel_layout: str | None = config_field(
        None,
        help="Where everything is: E embedding, t layer, L head and loss, | ends a part, *n repeats; such as E|t*3|t*3|L for 4 stages.",
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
    fp64: bool = config_field(
        False, help="Compute in fp64 throughout: tells rounding from a fault when two layouts differ (tools/parity.py); slow."
    )
    gradient_accumulation_fusion: bool = config_field(
        True,
        help="Linear layers put their weights' gradients straight into the gradient buffer, where its dtype is the computation's.",
    )

    def __post_init__(self) -> None:
        problems = [f"{name} {reason}" for name, reason in field_violations(self)]
        if self.fp16 + self.bf16 + self.fp64 > 1:
            problems.append("fp16, bf16 and fp64 exclude each other; set at most one")
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def params_dtype(self) -> torch.dtype:
        """dtype of parameters and of the computation."""
        if self.fp64:
            return torch.float64
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.float32

    @property
    def pipeline_chunks(self) -> int:
        """Model chunks per pipeline stage."""
        return self.virtual_pipeline_model_parallel_size or (2 if self.pipeline_schedule == "zb_v" else 1)

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule forms the gradients of weights apart from those of activations."""
        return self.pipeline_schedule in SPLIT_BACKWARD
