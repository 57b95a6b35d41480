"""Checks across sections: what no single dataclass can know. All problems are found at once; the texts name the options."""

from collections.abc import Iterator

from megatron.core.datasets.index_helpers import parse_split
from megatron.core.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.num_microbatches_calculator import NumMicroBatches
from megatron.core.pipeline_parallel.schedule_plan import plan_problem
from megatron.core.tokenizers import FILE_OPTIONS
from megatron.training.config.run_config import RunConfig, rank_grid


def check_run_config(config: RunConfig, world_size: int | None = None) -> list[str]:
    """Everything that keeps `config` from running on `world_size` ranks (None: whatever does not depend on their number)."""
    checks = (_model, _parallel, _precision, _length, _schedule, _data, _tokenizer, _checkpoint, _logging)
    problems = [problem for check in checks for problem in check(config)]
    return problems + list(_ranks(config, world_size))


def _model(config: RunConfig) -> Iterator[str]:
    model, seq_length = config.model, config.data.seq_length
    try:
        config.transformer_config()
    except ConfigError as error:
        yield str(error)
    longest = model.max_position_embeddings
    if longest is not None and longest < seq_length:
        yield f"max_position_embeddings={longest} is below seq_length={seq_length}; raise it or leave it out"
    if model.rope_scaling_type != "none" and model.position_embedding_type != "rope":
        positions = model.position_embedding_type
        yield f"rope_scaling_type={model.rope_scaling_type} needs position_embedding_type=rope, got {positions}"
    if model.recompute_num_layers is not None and model.recompute_num_layers > model.num_layers:
        yield f"recompute_num_layers={model.recompute_num_layers} is above num_layers={model.num_layers}"
    if model.recompute_num_layers is not None and model.recompute_granularity != "full":
        yield "recompute_num_layers is only used with recompute_granularity=full; remove it or set that"


def _parallel(config: RunConfig) -> Iterator[str]:
    parallel, seq_length = config.parallel, config.data.seq_length
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if parallel.sequence_parallel and seq_length % tp:
        yield f"sequence_parallel needs seq_length={seq_length} to be a multiple of tensor_model_parallel_size={tp}"
    if cp > 1 and seq_length % (2 * cp):
        yield f"seq_length={seq_length} is not a multiple of 2 x context_parallel_size={cp} (= {2 * cp})"
    unsupported = {
        "context_parallel_size": cp,
    }
    for name, size in unsupported.items():
        if size != 1:
            yield f"{name}={size} is not supported in this version; use 1 (ranks are tensor, pipeline and data parallel)"
    if parallel.sequence_parallel and tp == 1:
        yield "sequence_parallel=True needs tensor_model_parallel_size > 1; leave it False"
    if tp > 1 and config.model.torch_compile:
        yield f"torch_compile=True needs tensor_model_parallel_size=1, got {tp}; leave one of them out"
    yield from _compile_scope(config)
    if config.ddp.align_param_gather and parallel.pipeline_chunks == 1:
        yield "align_param_gather=True needs several model chunks per pipeline stage (virtual_pipeline_model_parallel_size); leave it False"


def _compile_scope(config: RunConfig) -> Iterator[str]:
    """One graph for the whole model has no place between layers at which something else can happen."""
    if config.model.torch_compile_scope == "layer":
        return
    if not config.model.torch_compile:
        yield "torch_compile_scope=model is only used with torch_compile=True; set that or leave the scope out"
    overlapping = {
        "overlap_grad_reduce": config.ddp.overlap_grad_reduce,
        "overlap_param_gather": config.ddp.overlap_param_gather,
        "recompute_granularity": config.model.recompute_granularity,
        "check_overlap": config.ddp.check_overlap,
        "trace_overlap": config.logging.trace_overlap,
    }
    for name in (name for name, used in overlapping.items() if used):
        yield f"torch_compile_scope=model does not go with {name}; set torch_compile_scope=layer or leave {name} out"


def _precision(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.main_grads_dtype == "bf16" and config.ddp.grad_reduce_in_fp32:
        yield "main_grads_dtype=bf16 excludes grad_reduce_in_fp32 (--accumulate-allreduce-grads-in-fp32); keep one"
    if config.parallel.fp64:
        others = {
            "grad_reduce_in_fp32": config.ddp.grad_reduce_in_fp32,
            "use_precision_aware_optimizer": optimizer.use_precision_aware_optimizer,
            "optimizer_cpu_offload": optimizer.optimizer_cpu_offload,
        }
        yield from (f"fp64=True excludes {name}=True, which keeps numbers in fp32; remove one" for name, on in others.items() if on)
    if optimizer.loss_scale is not None and not optimizer.fp16:
        yield "loss_scale is only used with fp16=True; remove it or set that"
    if optimizer.initial_loss_scale < optimizer.min_loss_scale:
        yield f"initial_loss_scale={optimizer.initial_loss_scale:g} is below min_loss_scale={optimizer.min_loss_scale:g}"


def _length(config: RunConfig) -> Iterator[str]:
    training = config.training
    if training.train_iters is None and training.train_samples is None:
        yield "the length of the run is missing; set train_iters or train_samples"
    if training.train_iters is not None and training.train_samples is not None:
        yield "train_iters and train_samples exclude each other; keep one"
    if training.rampup_batch_size is not None and training.train_samples is None:
        yield "rampup_batch_size needs train_samples instead of train_iters (steps have different sizes)"
    if training.rampup_batch_size is not None and training.global_batch_size is None:
        yield "rampup_batch_size needs global_batch_size, the size it ends at"
    if training.manual_gc_interval and not training.manual_gc:
        yield "manual_gc_interval is only used with manual_gc=True; remove it or set that"


def _schedule(config: RunConfig) -> Iterator[str]:
    yield from _learning_rates(config)
    yield from _schedule_units(config)
    yield from _warmup_and_annealing(config)
    yield from _weight_decay(config)


def _learning_rates(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.lr is None and not config.training.skip_train:
        yield "lr is required: the peak learning rate, such as lr=3e-4"
    if optimizer.lr is not None and config.scheduler.lr_warmup_init > optimizer.lr:
        yield f"lr_warmup_init={config.scheduler.lr_warmup_init:g} is above lr={optimizer.lr:g}"
    if optimizer.decoupled_min_lr is not None and optimizer.decoupled_lr is None:
        yield "decoupled_min_lr is only used with decoupled_lr; remove it or set that"
    if optimizer.decoupled_lr is not None and (optimizer.decoupled_min_lr or 0.0) > optimizer.decoupled_lr:
        yield f"decoupled_min_lr={optimizer.decoupled_min_lr:g} is above decoupled_lr={optimizer.decoupled_lr:g}"


def _schedule_units(config: RunConfig) -> Iterator[str]:
    """Lengths are given in the unit of the run's own length, as in Megatron."""
    scheduler = config.scheduler
    in_iters = {name: getattr(scheduler, name) for name in ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")}
    in_samples = {name: getattr(scheduler, name) for name in ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")}
    for first, second in zip(in_iters, in_samples, strict=True):
        if in_iters[first] and in_samples[second]:
            yield f"{first} and {second} exclude each other; keep one"
    by_samples = config.training.train_samples is not None
    wrong = in_iters if by_samples else in_samples
    for name, value in wrong.items():
        if value:
            length = "train_samples" if by_samples else "train_iters"
            other = name.replace("iters", "samples") if by_samples else name.replace("samples", "iters")
            yield f"{name} does not go with {length}; use {other}"
    if scheduler.lr_warmup_fraction is not None and (scheduler.lr_warmup_iters or scheduler.lr_warmup_samples):
        yield "lr_warmup_fraction excludes lr_warmup_iters and lr_warmup_samples; keep one"


def _warmup_and_annealing(config: RunConfig) -> Iterator[str]:
    scheduler, training = config.scheduler, config.training
    for unit in ("iters", "samples"):
        decay = getattr(scheduler, f"lr_decay_{unit}")
        total = decay if decay is not None else getattr(training, f"train_{unit}")
        warmup, annealing = getattr(scheduler, f"lr_warmup_{unit}"), getattr(scheduler, f"lr_wsd_decay_{unit}")
        name = f"lr_decay_{unit}" if decay is not None else f"train_{unit}"
        if decay is not None and warmup >= decay:
            yield f"lr_warmup_{unit}={warmup} must be below {name}={decay}, which includes the warm-up"
        if total is not None and annealing is not None and annealing > total:
            yield f"lr_wsd_decay_{unit}={annealing} is above {name}={total}"
    annealing_given = scheduler.lr_wsd_decay_iters is not None or scheduler.lr_wsd_decay_samples is not None
    if scheduler.lr_decay_style == "WSD" and not annealing_given:
        yield "lr_decay_style=WSD needs lr_wsd_decay_iters or lr_wsd_decay_samples, the length of the annealing"
    if scheduler.lr_decay_style != "WSD" and annealing_given:
        yield f"lr_wsd_decay_* is only used with lr_decay_style=WSD, got {scheduler.lr_decay_style}"


def _weight_decay(config: RunConfig) -> Iterator[str]:
    scheduler, default = config.scheduler, config.optimizer.weight_decay
    start = default if scheduler.start_weight_decay is None else scheduler.start_weight_decay
    end = default if scheduler.end_weight_decay is None else scheduler.end_weight_decay
    if scheduler.weight_decay_incr_style == "constant" and start != end:
        yield f"weight_decay_incr_style=constant needs start_weight_decay={start:g} equal to end_weight_decay={end:g}"
    if start > end:
        yield f"start_weight_decay={start:g} is above end_weight_decay={end:g}"


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    per_split = any((data.train_data_path, data.valid_data_path, data.test_data_path))
    given = {"data_path": data.data_path, "train/valid/test_data_path": per_split, "mock_data": data.mock_data}
    sources = [name for name, value in given.items() if value]
    if not sources:
        yield "no data: set data_path, or train_data_path (with valid_data_path, test_data_path), or mock_data"
    if len(sources) > 1:
        yield f"{' and '.join(sources)} exclude each other; keep one"
    if per_split and not data.train_data_path and not config.training.skip_train:
        yield "valid_data_path and test_data_path need train_data_path"
    if per_split and data.split is not None:
        yield "split is only used with data_path; the per-split paths say what each split reads"
    if data.split is not None:
        try:
            parse_split(data.split)
        except ConfigError as error:
            yield str(error)
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        yield from _blend(name, getattr(data, name))


def _blend(name: str, words: tuple[str, ...]) -> Iterator[str]:
    """A blend alternates weights and prefixes, or has no weights at all."""
    weights = [_is_number(word) for word in words]
    if len(words) > 1 and any(weights) and weights != [index % 2 == 0 for index in range(len(words) // 2 * 2)]:
        yield f"{name}={' '.join(words)} is no blend; write WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes only"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _tokenizer(config: RunConfig) -> Iterator[str]:
    data, vocab_size = config.data, config.model.vocab_size
    kind = data.tokenizer_type or "NullTokenizer"
    if kind == "NullTokenizer" and vocab_size is None:
        wanted = "NullTokenizer needs" if data.tokenizer_type else "no tokenizer: set tokenizer_type, or for NullTokenizer"
        yield f"{wanted} vocab_size (ids 0..N-1, EOD = N)"
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        given, needed = getattr(data, name) is not None, name in FILE_OPTIONS[kind]
        if needed and not given:
            yield f"tokenizer_type={kind} needs {name}"
        if given and not needed:
            yield f"{name} is not read by {kind}; remove it or set another tokenizer_type"


def _checkpoint(config: RunConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    for name in ("save_interval", "save_keep_last"):
        if getattr(checkpoint, name) is not None and checkpoint.save is None:
            yield f"{name} is only used with save; set the folder or remove it"
    loads = checkpoint.load is not None or checkpoint.save is not None
    for name in ("ckpt_step", "finetune", "exit_on_missing_checkpoint"):
        value = getattr(checkpoint, name)
        if value is not None and value is not False and not loads:
            yield f"{name} is only used with load; set the folder or remove it"
    if checkpoint.finetune and checkpoint.load is None and checkpoint.save is not None:
        yield "finetune needs load, the folder that the weights come from"


def _logging(config: RunConfig) -> Iterator[str]:
    logging = config.logging
    if logging.tensorboard_log_interval is not None and logging.tensorboard_dir is None:
        yield "tensorboard_log_interval is only used with tensorboard_dir; set the folder or remove it"
    if logging.trace_overlap_step is not None and logging.trace_overlap is None:
        yield "trace_overlap_step is only used with trace_overlap; set the file or remove it"
    for name in ("wandb_exp_name", "wandb_save_dir"):
        if getattr(logging, name) is not None and logging.wandb_project is None:
            yield f"{name} is only used with wandb_project; set it or remove this"
    if logging.wandb_project is not None and logging.wandb_save_dir is None and config.checkpoint.save is None:
        yield "wandb_project needs wandb_save_dir or save, a folder to write to"


def _ranks(config: RunConfig, world_size: int | None) -> Iterator[str]:
    """Batch sizes against the number of data-parallel ranks."""
    dp = 1
    if world_size is not None:
        try:
            dp = config.data_parallel_size(world_size)
        except ConfigError as error:
            yield str(error)
            return
    instances, parallel = config.ddp.num_distributed_optimizer_instances, config.parallel
    if world_size is not None and dp * parallel.context_parallel_size % instances:
        yield f"num_distributed_optimizer_instances={instances} does not divide the data-parallel size {dp}"
    elif world_size is not None and config.model.num_experts is not None:
        try:
            rank_grid(parallel, world_size).expert_instance_groups(instances)
        except ConfigError as error:
            yield str(error)
    training = config.training
    try:
        calculator = NumMicroBatches(
            config.global_batch_size(dp), training.micro_batch_size, dp, training.rampup_batch_size
        )
    except ConfigError as error:
        yield str(error)
        return
    if world_size is not None:
        yield from _microbatches(config.parallel, calculator)


def _microbatches(parallel: ModelParallelConfig, calculator: NumMicroBatches) -> Iterator[str]:
    for number in calculator.all_num_microbatches():
        stages, chunks = parallel.pipeline_model_parallel_size, parallel.pipeline_chunks
        problem = plan_problem(parallel.pipeline_schedule, stages, chunks, number)
        if problem is not None:
            yield problem
            return
