"""RunConfig: the one configuration tree of a run. Each section owns its fields; loaders, flags, docs are generated from it."""

import dataclasses
from collections.abc import Iterator

from megatron.core.config_field import config_field, field_info, field_violations
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.rank_grid import RankGrid
from megatron.core.tokenizers import TOKENIZER_TYPES
from megatron.core.transformer.transformer_config import ModelArchitectureConfig, TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Base of the training sections: checks choices and bounds at construction."""

    def __post_init__(self) -> None:
        problems = [f"{name} {reason}" for name, reason in field_violations(self)]
        if problems:
            raise ConfigError("; ".join(problems))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig(Section):
    """How processes find each other. Section `launch`."""

    distributed_backend: str = config_field(
        "auto", choices=("auto", "nccl", "gloo"), help="auto = nccl where there is a GPU, else gloo; gloo computes on the CPU."
    )
    distributed_timeout_minutes: float = config_field(
        10.0, exclusive_minimum=0, unit="minutes", help="A collective that takes longer ends the run."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """Batches, length of the run, seeds, evaluation, exits. Section `training`."""

    micro_batch_size: int = config_field(minimum=1, unit="samples", help="Samples per rank per forward.")
    global_batch_size: int | None = config_field(
        None, minimum=1, unit="samples", help="Samples per step over all ranks; default micro_batch_size x data-parallel size."
    )
    rampup_batch_size: tuple[int, ...] | None = config_field(
        None, help="START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES samples."
    )
    train_iters: int | None = config_field(
        None, minimum=0, unit="steps", help="Length of the run; exclusive with train_samples."
    )
    train_samples: int | None = config_field(None, minimum=0, unit="samples", help="Length of the run in samples.")
    seed: int = config_field(1234, minimum=0, help="Seed of weights, data order and dropout.")
    eval_interval: int | None = config_field(
        1000, minimum=1, unit="steps", help="Steps between evaluations on the validation set."
    )
    eval_iters: int = config_field(100, minimum=0, unit="steps", help="Global batches per evaluation; 0 = no evaluation.")
    skip_train: bool = config_field(False, help="Only evaluate the loaded checkpoint.")
    exit_interval: int | None = config_field(None, minimum=1, unit="steps", help="Save and exit at a multiple of this step.")
    exit_duration_in_mins: float | None = config_field(
        None, exclusive_minimum=0, unit="minutes", help="Save and exit after this long."
    )
    exit_signal_handler: bool = config_field(
        True, negative_flag="--no-exit-signal-handler", help="SIGTERM and SIGUSR1 lead to a checkpoint and exit code 0."
    )
    nan_policy: str = config_field(
        "stop",
        choices=("stop", "skip"),
        help="A non-finite loss or gradient: stop every rank with an error, or skip the step on every rank alike. In fp16 only if "
        "no smaller loss scale can follow: at min_loss_scale, or with a constant loss_scale.",
    )
    max_consecutive_skips: int = config_field(
        20, minimum=1, unit="steps", help="With nan_policy=skip: stop after this many skipped steps in a row."
    )
    deterministic_mode: bool = config_field(False, help="Only deterministic kernels (torch.use_deterministic_algorithms).")
    manual_gc: bool = config_field(
        False, help="Disable Python's automatic garbage collection and collect at manual_gc_interval."
    )
    manual_gc_interval: int = config_field(
        0, minimum=0, unit="steps", help="Steps between collections; 0 = only at evaluation and save."
    )
    freeze: tuple[str, ...] = config_field(
        (), help="Patterns (shell style) of logical parameter names that are not trained, e.g. 'embedding.*'."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Section):
    """Learning-rate and weight-decay schedule. Section `scheduler`."""

    lr_decay_style: str = config_field(
        "linear", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"), help="Shape of the decay."
    )
    lr_decay_iters: int | None = config_field(None, minimum=0, unit="steps", help="Steps until min_lr; default: the whole run.")
    lr_decay_samples: int | None = config_field(None, minimum=0, unit="samples", help="The same, in samples.")
    lr_warmup_iters: int = config_field(0, minimum=0, unit="steps", help="Linear warm-up.")
    lr_warmup_samples: int = config_field(0, minimum=0, unit="samples", help="Linear warm-up, in samples.")
    lr_warmup_fraction: float | None = config_field(
        None, minimum=0, maximum=1, help="Warm-up as a fraction of the decay length."
    )
    lr_warmup_init: float = config_field(0.0, minimum=0, help="Learning rate at step 0 of the warm-up.")
    lr_wsd_decay_style: str = config_field(
        "exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"), help="WSD: shape of the final annealing."
    )
    lr_wsd_decay_iters: int | None = config_field(None, minimum=1, unit="steps", help="WSD: length of the annealing.")
    lr_wsd_decay_samples: int | None = config_field(
        None, minimum=1, unit="samples", help="WSD: length of the annealing, in samples."
    )
    start_weight_decay: float | None = config_field(None, minimum=0, help="Weight decay at the start; default weight_decay.")
    end_weight_decay: float | None = config_field(None, minimum=0, help="Weight decay at the end; default weight_decay.")
    weight_decay_incr_style: str = config_field(
        "constant", choices=("constant", "linear", "cosine"), help="How weight decay goes from start to end."
    )
    override_opt_param_scheduler: bool = config_field(
        False,
        flag="--override-opt_param-scheduler",
        help="Take the schedule from this configuration, not from the checkpoint.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Data sets and tokenizer. Section `data`."""

    seq_length: int = config_field(minimum=1, unit="tokens", help="Tokens per sample.")
    data_path: tuple[str, ...] = config_field(
        (), help="Prefix of a .bin/.idx pair, or a blend: WEIGHT PREFIX WEIGHT PREFIX ... (or just several prefixes)."
    )
    train_data_path: tuple[str, ...] = config_field((), help="Blend for training only (exclusive with data_path and split).")
    valid_data_path: tuple[str, ...] = config_field((), help="Blend for validation only.")
    test_data_path: tuple[str, ...] = config_field((), help="Blend for test only.")
    split: str | None = config_field(None, help="Shares of train, validation, test documents; default 969,30,1.")
    mock_data: bool = config_field(False, help="Synthetic tokens; no files needed.")
    data_cache_path: str | None = config_field(None, help="Folder of the index cache; default: cache/ beside the data.")
    data_shuffle: str = config_field(
        "megatron",
        choices=("megatron", "epoch"),
        help="megatron = Megatron-LM's order (documents of several epochs mixed); "
        "epoch = each epoch is a permutation of all samples.",
    )
    num_workers: int = config_field(2, minimum=0, help="Data loader processes per rank; 0 = in the training process.")
    reset_position_ids: bool = config_field(False, help="Positions restart after each EOD.")
    reset_attention_mask: bool = config_field(False, help="No attention across documents.")
    eod_mask_loss: bool = config_field(False, help="No loss where the input token is EOD.")
    mmap_bin_files: bool = config_field(
        True, negative_flag="--no-mmap-bin-files", help="Memory-map .bin files, else read them with file calls."
    )
    tokenizer_type: str | None = config_field(
        None,
        choices=TOKENIZER_TYPES,
        help="Tokenizer; default NullTokenizer if vocab_size is set.",
    )
    tokenizer_model: str | None = config_field(
        None, help="SentencePiece model, tokenizer.json (or its folder), or tiktoken file."
    )
    vocab_file: str | None = config_field(None, help="GPT-2 vocabulary (encoder.json).")
    merge_file: str | None = config_field(None, help="GPT-2 merges (vocab.bpe).")
    tiktoken_pattern: str = config_field(
        "v2", choices=("v1", "v2"), help="TikTokenizer: splitting pattern (v1 = cl100k, v2 = o200k)."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Saving and loading. Section `checkpoint`."""

    save: str | None = config_field(None, help="Folder of the run: checkpoints, config.yaml, metrics.jsonl.")
    load: str | None = config_field(
        None, help="Folder to load from; default: save, if it holds a checkpoint (so that the same command resumes)."
    )
    save_interval: int | None = config_field(
        None, minimum=1, unit="steps", help="Steps between checkpoints; the last step is always saved."
    )
    ckpt_step: int | None = config_field(None, minimum=0, unit="steps", help="Load this step instead of the newest.")
    save_keep_last: int | None = config_field(
        None, minimum=1, flag="--save-keep-last", help="Keep only this many newest checkpoints; default: all."
    )
    finetune: bool = config_field(False, help="Load only the weights; start at step 0 with fresh optimizer, schedule and data.")
    no_load_optim: bool = config_field(False, help="Do not load optimizer state.")
    no_load_rng: bool = config_field(False, help="Do not load random-number state.")
    no_save_optim: bool = config_field(False, help="Do not save optimizer state.")
    no_save_rng: bool = config_field(False, help="Do not save random-number state.")
    exit_on_missing_checkpoint: bool = config_field(
        False, help="Fail if load holds no checkpoint, instead of starting from step 0."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section):
    """Console, metrics, TensorBoard. Section `logging`."""

    log_interval: int = config_field(100, minimum=1, unit="steps", help="Steps between log lines.")
    metrics_file: str | None = config_field(None, help="Metrics as JSON lines; default <save>/metrics.jsonl.")
    tensorboard_dir: str | None = config_field(None, help="TensorBoard folder; default: no TensorBoard.")
    tensorboard_log_interval: int | None = config_field(
        None, minimum=1, unit="steps", help="Steps between points; default log_interval."
    )
    log_params_norm: bool = config_field(False, help="Log the L2 norm of the parameters.")
    wandb_project: str | None = config_field(None, help="Weights & Biases project; needs the wandb extra.")
    wandb_exp_name: str | None = config_field(None, help="Weights & Biases run name.")
    wandb_save_dir: str | None = config_field(None, help="Weights & Biases folder; default <save>/wandb.")
    wandb_mode: str = config_field("offline", choices=("offline", "online", "disabled"), help="Weights & Biases mode.")
    progress_bar: str = config_field("auto", choices=("auto", "on", "off"), help="Progress bar with ETA; auto = on a terminal.")
    timing_log_level: int = config_field(0, minimum=0, maximum=2, help="0 = step time only, 1 = also the phases of a step, 2 = also forward and backward; in ms per step, of rank 0.")
    trace_overlap: str | None = config_field(
        None,
        help="Write a Chrome trace of one step to this file: collectives in flight, the compute over them, and the waits.",
    )
    trace_overlap_step: int | None = config_field(
        None,
        minimum=1,
        unit="steps",
        help="The step that trace_overlap shows; default: the third after the start, or the last if there are fewer.",
    )
    peak_tflops: float | None = config_field(
        None,
        exclusive_minimum=0,
        unit="TFLOP/s",
        help="The device's dense peak for MFU; default: known GPUs' data sheet, on CPU measured.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Section):
    """What is learned. Section `objective`."""

    objective: str = config_field("causal_lm", choices=("causal_lm",), help="causal_lm = next-token prediction.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run. Build it with `megatron.training.config.load`; derive with `dataclasses.replace`."""

    model: ModelArchitectureConfig
    parallel: ModelParallelConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    ddp: DistributedDataParallelConfig
    training: TrainingConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    objective: ObjectiveConfig
    launch: LaunchConfig

    def __post_init__(self) -> None:
        problems = list(_linked_mismatches(self))
        if self.optimizer.overlap_param_gather_with_optimizer_step and not self.ddp.overlap_param_gather:
            problems.append("overlap_param_gather_with_optimizer_step=True needs overlap_param_gather=True")
        if problems:
            raise ConfigError("; ".join(problems))

    def transformer_config(self) -> TransformerConfig:
        """Architecture and parallel sizes as the one value that model code takes."""
        fields = {f.name: getattr(part, f.name) for part in (self.model, self.parallel) for f in dataclasses.fields(part)}
        return TransformerConfig(**fields)

    def optimizer_config(self) -> OptimizerConfig:
        """What `get_megatron_optimizer` takes; precision and sharding agree with the other sections by construction."""
        return self.optimizer

    def ddp_config(self, data_parallel_size: int) -> DistributedDataParallelConfig:
        """What `DistributedDataParallel` takes on that many data-parallel ranks (context parallelism included).

        Derived as in Megatron: bf16 reduces gradients in fp32, unless main_grads_dtype is bf16; the default bucket grows with the ranks; fp16 leaves non-finite
        gradients to the loss scaler.
        """
        bucket = self.ddp.bucket_size or max(40_000_000, 1_000_000 * data_parallel_size)
        return dataclasses.replace(
            self.ddp,
            grad_reduce_in_fp32=self.ddp.grad_reduce_in_fp32 or (self.parallel.bf16 and self.optimizer.main_grads_dtype == "fp32"),
            check_for_nan_in_grad=self.ddp.check_for_nan_in_grad and not self.parallel.fp16,
            bucket_size=bucket,
        )

    def data_parallel_size(self, world_size: int) -> int:
        """Ranks that read different samples. Raises ConfigError where the parallel sizes do not divide the ranks."""
        parallel = self.parallel
        tp, pp, cp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.context_parallel_size
        if world_size % (tp * pp * cp):
            raise ConfigError(
                f"{world_size} ranks cannot be divided by tensor_model_parallel_size={tp} x pipeline_model_parallel_size={pp} "
                f"x context_parallel_size={cp} (= {tp * pp * cp}); start a multiple of that or change the sizes"
            )
        return rank_grid(parallel, world_size).dp

    def global_batch_size(self, data_parallel_size: int) -> int:
        """Samples per step over all ranks, at the end of a ramp-up."""
        return self.training.global_batch_size or self.training.micro_batch_size * data_parallel_size

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence in tokens that the model can represent."""
        return self.model.max_position_embeddings or self.data.seq_length


def rank_grid(parallel: ModelParallelConfig, world_size: int) -> RankGrid:
    """The grid of `world_size` ranks that a configuration asks for. Raises ConfigError naming the options and the rule."""
    return RankGrid.for_world(
        world_size,
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        ep=parallel.expert_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        expert_tp=parallel.expert_tensor_parallel_size,
    )


def _linked_mismatches(config: RunConfig) -> Iterator[str]:
    """Values that two sections carry and that differ."""
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        for field in dataclasses.fields(part):
            linked = field_info(field).linked
            if linked is None:
                continue
            owner, name = linked.split(".")
            value, owned = getattr(part, field.name), getattr(getattr(config, owner), name)
            if value != owned:
                yield f"{section.name}.{field.name}={value!r} but {linked}={owned!r}: they are one value; set both alike"
