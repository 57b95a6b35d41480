"""OptimizerConfig: which optimizer, its hyperparameters, precision of its states, clipping and loss scaling."""

import dataclasses
from typing import Any

import torch

from megatron.core.config_field import config_field, field_violations
from megatron.core.errors import ConfigError

# Iterations after which a Newton-Schulz iteration of this kind begins again (the coefficients are in `muon`).
NEWTON_SCHULZ_PERIODS = {"simple": 1, "quintic": 5, "polar_express": 8}
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Section `optimizer` of a run's configuration, and the `config` of `get_megatron_optimizer`."""

    optimizer: str = config_field(
        "adam",
        choices=("adam", "sgd", "lion", "muon"),
        help="Update rule. adam is AdamW with decoupled_weight_decay, its default; muon is for matrices, and the rest (embedding, "
        "output layer, vectors) takes muon_scalar_optimizer.",
    )
    optimizer_backend: str = config_field(
        "auto",
        choices=("auto", "te", "apex", "torch"),
        help="Implementation of Adam; auto = on CUDA Transformer Engine, Apex, torch fused in this order, on CPU torch fused.",
    )
    lr: float | None = config_field(None, minimum=0, help="Peak learning rate.")
    min_lr: float = config_field(0.0, minimum=0, help="Learning rate at the end of the decay.")
    decoupled_lr: float | None = config_field(
        None, minimum=0, help="Separate peak learning rate for embedding and output layer."
    )
    decoupled_min_lr: float | None = config_field(
        None, minimum=0, help="Separate final learning rate for embedding and output layer."
    )
    weight_decay: float = config_field(
        0.01, minimum=0, help="Weight decay, on tensors of two or more dimensions; decoupled but for SGD, which adds it to the gradient."
    )
    decoupled_weight_decay: bool = config_field(
        True,
        negative_flag="--no-decoupled-weight-decay",
        help="AdamW; if false weight decay is added to the gradient (Adam). Needs optimizer=adam when false.",
    )
    fp16: bool = config_field(False, linked="parallel.fp16", help="Model parameters are fp16.")
    bf16: bool = config_field(False, linked="parallel.bf16", help="Model parameters are bf16.")
    loss_scale: float | None = config_field(
        None, exclusive_minimum=0, help="Static loss scale for fp16; default: dynamic scaling."
    )
    initial_loss_scale: float = config_field(2.0**32, exclusive_minimum=0, help="First dynamic loss scale.")
    min_loss_scale: float = config_field(1.0, exclusive_minimum=0, help="Smallest dynamic loss scale; an overflow there is a non-finite gradient (nan_policy).")
    loss_scale_window: int = config_field(1000, minimum=1, unit="steps", help="Steps without overflow before the scale doubles.")
    hysteresis: int = config_field(2, minimum=1, unit="steps", help="Overflows since the last doubling from which on each one halves the scale.")
    adam_beta1: float = config_field(0.9, minimum=0, exclusive_maximum=1, help="First moment's decay.")
    adam_beta2: float = config_field(0.999, minimum=0, exclusive_maximum=1, help="Second moment's decay.")
    adam_eps: float = config_field(1e-8, minimum=0, help="Added to Adam's denominator.")
    sgd_momentum: float = config_field(0.9, minimum=0, exclusive_maximum=1, help="SGD's momentum.")
    lion_beta1: float = config_field(0.95, minimum=0, exclusive_maximum=1, help="Lion's interpolation of momentum and gradient, whose sign is taken.")
    lion_beta2: float = config_field(0.98, minimum=0, exclusive_maximum=1, help="Decay of Lion's momentum.")
    muon_momentum: float = config_field(0.95, minimum=0, exclusive_maximum=1, help="Muon's momentum.")
    muon_nesterov: bool = config_field(
        False, aliases=("muon_use_nesterov",), const_flags={"--muon-use-nesterov": True}, help="Nesterov's momentum in Muon."
    )
    muon_num_ns_steps: int = config_field(5, minimum=1, maximum=100, help="Newton-Schulz iterations.")
    muon_coefficient_type: str = config_field(
        "quintic",
        choices=tuple(NEWTON_SCHULZ_PERIODS),
        help="Newton-Schulz coefficients; quintic needs a multiple of 5 iterations, polar_express a multiple of 8.",
    )
    muon_scale_mode: str = config_field(
        "spectral",
        choices=("spectral", "shape_scaling", "unit_rms_norm"),
        help="Scale of an orthogonalised update: sqrt(max(rows, cols)), sqrt(max(1, rows/cols)) or sqrt(rows/cols).",
    )
    muon_extra_scale_factor: float = config_field(
        1.0, exclusive_minimum=0, help="Further factor on it; 0.2 with spectral gives the size of AdamW's updates."
    )
    muon_fp32_matmul_prec: str = config_field(
        "medium",
        choices=("medium", "high", "highest"),
        help="Precision of the Newton-Schulz products: bf16, TF32 (CUDA) or the main params' own.",
    )
    muon_split_qkv: bool = config_field(
        True,
        negative_flag="--muon-no-split-qkv",
        help="Orthogonalise query, key and value of the packed projection each for itself.",
    )
    muon_tp_mode: str = config_field(
        "blockwise",
        choices=("blockwise", "duplicated"),
        help="Matrices that tensor parallelism splits: orthogonalise each rank's block for itself, or gather the whole matrix.",
    )
    muon_scalar_optimizer: str = config_field(
        "adam", choices=("adam", "lion"), help="Rule of the parameters that Muon is not for."
    )
    clip_grad: float = config_field(1.0, minimum=0, help="Global L2 norm to which gradients are clipped; 0 = off.")
    log_param_group_norms: bool = config_field(
        False, help="Log the L2 norms of the gradients and of the parameters of each parameter group; reads both once more per step."
    )
    log_num_zeros_in_grad: bool = config_field(False, help="Count and log zeros in the gradient.")
    use_distributed_optimizer: bool = config_field(
        False, linked="ddp.use_distributed_optimizer", help="Shard optimizer state over data parallelism (ZeRO stage 1)."
    )
    overlap_param_gather_with_optimizer_step: bool = config_field(
        False,
        help="Start each bucket's gather as soon as its shard is updated, while later buckets are still being updated. "
        "Needs use_distributed_optimizer and overlap_param_gather.",
    )
    optimizer_cpu_offload: bool = config_field(
        False,
        help="Keep main params and moments in pinned host memory and update them on the CPU, bucket by bucket, while gradients and "
        "parameters are copied. Needs a CUDA device and use_distributed_optimizer.",
    )
    optimizer_offload_fraction: float = config_field(
        1.0, minimum=0, maximum=1, help="With optimizer_cpu_offload: least part of the optimizer values that is offloaded, in whole buckets."
    )
    use_precision_aware_optimizer: bool = config_field(
        False, help="Keep optimizer values in the dtypes below; updates are computed in fp32. Needs optimizer=adam."
    )
    main_grads_dtype: str = config_field(
        "fp32",
        choices=("fp32", "bf16"),
        help="dtype of the gradients that the optimizer reads; bf16 = gradients are accumulated, reduced and read in bf16 (needs bf16).",
    )
    main_params_dtype: str = config_field(
        "fp32",
        choices=("fp32", "fp16", "bf16"),
        help="dtype of the main params of 16-bit parameters. bf16 = of a bf16 model the parameters themselves; fp16 = fp16 numbers "
        "with a power of two per row of 32 elements.",
    )
    exp_avg_dtype: str = config_field(
        "fp32", choices=("fp32", "fp16", "bf16"), help="dtype of the first moment; fp16 as in main_params_dtype."
    )
    exp_avg_sq_dtype: str = config_field(
        "fp32", choices=("fp32", "fp16", "bf16"), help="dtype of the second moment; fp16 as in main_params_dtype."
    )
    store_param_remainders: bool | None = config_field(
        None,
        help="Keep of fp32 main params only what the bf16 parameters lack, in 2 bytes instead of 4; exact. Default: on with "
        "use_precision_aware_optimizer, bf16 and main_params_dtype=fp32, which it needs.",
    )
    stochastic_rounding: bool = config_field(
        False,
        help="Round 16-bit optimizer values up or down with probabilities that make the mean exact, so that small updates add up. "
        "Depends on seed, step and element only: the same with any number of data-parallel ranks and after a resume.",
    )
    seed: int = config_field(1234, minimum=0, linked="training.seed", help="Seed of stochastic_rounding.")

    def __post_init__(self) -> None:
        problems = [f"{name} {reason}" for name, reason in field_violations(self)]
        if self.fp16 and self.bf16:
            problems.append("fp16 and bf16 exclude each other; set at most one")
        if self.lr is not None and self.min_lr > self.lr:
            problems.append(f"min_lr={self.min_lr:g} is above lr={self.lr:g}; min_lr must be at most lr")
        if self.overlap_param_gather_with_optimizer_step and not self.use_distributed_optimizer:
            problems.append("overlap_param_gather_with_optimizer_step=True needs use_distributed_optimizer=True")
        period = NEWTON_SCHULZ_PERIODS.get(self.muon_coefficient_type, 1)
        if self.muon_num_ns_steps % period:
            problems.append(
                f"muon_num_ns_steps={self.muon_num_ns_steps} must be a multiple of {period} with muon_coefficient_type="
                f"{self.muon_coefficient_type}"
            )
        if not self.decoupled_weight_decay and self.optimizer != "adam":
            problems.append(
                f"decoupled_weight_decay=False is only used with optimizer=adam, got {self.optimizer}; leave it True"
            )
        if self.optimizer_cpu_offload and not self.use_distributed_optimizer:
            problems.append("optimizer_cpu_offload=True needs use_distributed_optimizer=True")
        if self.optimizer_cpu_offload and self.optimizer == "muon":
            problems.append("optimizer_cpu_offload=True is for rules that treat each element alone; optimizer=muon does not")
        if self.optimizer_offload_fraction != 1.0 and not self.optimizer_cpu_offload:
            problems.append("optimizer_offload_fraction is only used with optimizer_cpu_offload=True; remove it or set that")
        problems += self._precision_problems()
        if problems:
            raise ConfigError("; ".join(problems))

    def _precision_problems(self) -> list[str]:
        names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        narrow = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != "fp32"]
        problems = []
        if not self.use_precision_aware_optimizer:
            given = [*narrow, *(["stochastic_rounding=True"] if self.stochastic_rounding else [])]
            given += ["store_param_remainders=True"] if self.store_param_remainders else []
            return [f"{option} needs use_precision_aware_optimizer=True" for option in given]
        if self.optimizer != "adam":
            problems.append(f"use_precision_aware_optimizer=True needs optimizer=adam, got {self.optimizer}")
        if self.main_grads_dtype == "bf16" and not self.bf16:
            problems.append("main_grads_dtype=bf16 needs bf16=True")
        if self.main_params_dtype != "fp32" and not (self.bf16 or self.fp16):
            problems.append(
                f"main_params_dtype={self.main_params_dtype} needs bf16=True or fp16=True: fp32 parameters are their own main params"
            )
        if self.store_param_remainders and not (self.bf16 and self.main_params_dtype == "fp32"):
            problems.append("store_param_remainders=True needs bf16=True and main_params_dtype=fp32")
        if self.stochastic_rounding and not [text for text in narrow if "grads" not in text]:
            problems.append(f"stochastic_rounding=True needs one of {', '.join(names[1:])} to be fp16 or bf16")
        return problems

    @property
    def remainders(self) -> bool:
        """Whether main params are kept as remainders."""
        chosen = self.store_param_remainders
        return self.use_precision_aware_optimizer and self.bf16 and self.main_params_dtype == "fp32" and chosen is not False

    @property
    def params_dtype(self) -> torch.dtype:
        """dtype of the model parameters."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.float32

    def replace(self, **changes: Any) -> "OptimizerConfig":
        """A copy with `changes`, validated again."""
        return dataclasses.replace(self, **changes)
