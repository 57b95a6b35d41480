"""Two configurations as a pair of short runs that can be compared: the same model, start and samples, small sizes, exact settings.

What a layout is made of stays: parallel sizes, schedule, engine, recomputation, attention heads per group, biases, norms. What has
no bearing on it goes: dropout (its random numbers depend on the layout), learning-rate schedule, checkpoints, logs, evaluation.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.transformer.transformer_config import ModelArchitectureConfig
from megatron.training.config import RunConfig, check_run_config
from megatron.training.config.run_config import CheckpointConfig, DataConfig, LoggingConfig, SchedulerConfig

_VOCABULARY = 100  # NullTokenizer adds EOD
_MOST_MICROBATCHES = 64
_ADAM_EPS = 1e-3


@dataclasses.dataclass(frozen=True)
class Run:
    """One of the two: its configuration without a precision, and its ranks."""

    config: RunConfig
    ranks: int

    def in_precision(self, name: str) -> RunConfig:
        """The configuration in fp32, fp64 or bf16."""
        parallel = dataclasses.replace(self.config.parallel, bf16=name == "bf16", fp64=name == "fp64")
        optimizer = dataclasses.replace(self.config.optimizer, bf16=name == "bf16")
        return dataclasses.replace(self.config, parallel=parallel, optimizer=optimizer)


def comparable(
    a: RunConfig,
    b: RunConfig,
    *,
    ranks: tuple[int | None, int | None] = (None, None),
    steps: int = 2,
    full_size: bool = False,
    use_data: bool = False,
) -> tuple[Run, Run]:
    """The two runs to make. Raises ConfigError where there is no size at which both are legal.

    ranks: of each; None = as few as its parallel sizes allow. full_size: keep the model and the sequence length (A's batch is
    reduced all the same). use_data: A's data and tokenizer instead of synthetic tokens.
    """
    worlds = [given or least_ranks(config) for given, config in zip(ranks, (a, b), strict=True)]
    pair = [_plain(config, a, steps, use_data) for config in (a, b)]
    problems: list[str] = []
    for model, sequence in _sizes(a, b, full_size):
        sized = [_sized(config, model, sequence) for config in pair]
        problems = [text for config in sized for text in _architecture_problems(config)]
        if problems:
            continue
        for count in range(1, _MOST_MICROBATCHES + 1):
            runs = _with_batch(sized, worlds, count)
            problems = [text for run in runs for text in check_run_config(run.config, run.ranks)]
            if not problems:
                return runs
    raise ConfigError("no small model is legal in both layouts; the last one tried: " + "; ".join(dict.fromkeys(problems)))


def _architecture_problems(config: RunConfig) -> list[str]:
    try:
        config.transformer_config()
    except ConfigError as error:
        return [str(error)]
    return []


def least_ranks(config: RunConfig) -> int:
    """The fewest ranks that the parallel sizes allow."""
    parallel = config.parallel
    sizes = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.context_parallel_size)
    return math.prod(sizes) * parallel.expert_model_parallel_size


def longest_sum(config: RunConfig) -> int:
    """Terms of the longest sum of a step: tokens of the global batch, or a dimension of the model."""
    tokens = (config.training.global_batch_size or 1) * config.data.seq_length
    return max(tokens, config.model.hidden_size, config.model.ffn_size, config.model.vocab_size or 0)


def _plain(config: RunConfig, first: RunConfig, steps: int, use_data: bool) -> RunConfig:
    """Everything but sizes and batch."""
    training = dataclasses.replace(
        config.training, rampup_batch_size=None, train_iters=steps, train_samples=None, eval_iters=0, skip_train=False,
        exit_interval=None, exit_duration_in_mins=None, exit_signal_handler=False, nan_policy="stop", seed=first.training.seed,
        micro_batch_size=min(config.training.micro_batch_size, 2), manual_gc=False, manual_gc_interval=0,
    )  # fmt: skip
    optimizer = dataclasses.replace(
        config.optimizer, fp16=False, bf16=False, use_precision_aware_optimizer=False, main_grads_dtype="fp32",
        main_params_dtype="fp32", exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32", store_param_remainders=None,
        stochastic_rounding=False, optimizer_cpu_offload=False, optimizer_offload_fraction=1.0, loss_scale=None,
        lr=config.optimizer.lr or 1e-3, seed=first.training.seed, log_num_zeros_in_grad=False,
        # Adam's first step is the sign of the gradient: of one that is zero but for rounding it would make two different weights.
        adam_eps=max(config.optimizer.adam_eps, _ADAM_EPS),
    )  # fmt: skip
    data = dataclasses.replace(first.data, num_workers=0, data_cache_path=None)
    if not use_data:
        kept = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        given: dict[str, Any] = {name: getattr(data, name) for name in (*kept, "seq_length")}
        data = DataConfig(**given, mock_data=True, tokenizer_type="NullTokenizer", num_workers=0)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, hidden_dropout=0.0, attention_dropout=0.0, torch_compile=False, torch_compile_scope="layer", **_backend(config)
        ),
        parallel=dataclasses.replace(config.parallel, fp16=False, bf16=False, fp64=False),
        ddp=dataclasses.replace(config.ddp, grad_reduce_in_fp32=False),
        optimizer=optimizer,
        scheduler=SchedulerConfig(lr_decay_style="constant"),
        training=training,
        data=data,
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(log_interval=max(1, steps), progress_bar="off", peak_tflops=1.0),
    )


def _backend(config: RunConfig) -> dict[str, Any]:
    """Attention kernels that compute in 16 bit only have no fp64."""
    return {"attention_backend": "auto"} if config.model.attention_backend in ("flash", "te", "flex") else {}


def _sized(config: RunConfig, model: dict[str, Any], sequence: int) -> RunConfig:
    own = dict(model)
    if config.data.mock_data and (model or config.model.vocab_size is None):
        own |= {"vocab_size": _VOCABULARY}
    window, recomputed = config.model.window_size, config.model.recompute_num_layers
    if model:
        own |= {"window_size": window and min(window, max(2, sequence // 3)), "max_position_embeddings": sequence}
        own |= {"recompute_num_layers": recomputed and min(recomputed, own["num_layers"])}
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, **own), data=dataclasses.replace(config.data, seq_length=sequence)
    )


def _with_batch(pair: list[RunConfig], worlds: list[int], count: int) -> tuple[Run, Run]:
    """Both with the same global batch: `count` times what gives each pipeline as many microbatches as it has stages, and at least 2."""
    units = [
        config.training.micro_batch_size * config.data_parallel_size(world) * max(2, config.parallel.pipeline_model_parallel_size)
        for config, world in zip(pair, worlds, strict=True)
    ]
    batch = count * math.lcm(*units)
    first, second = (
        Run(dataclasses.replace(config, training=dataclasses.replace(config.training, global_batch_size=batch)), world)
        for config, world in zip(pair, worlds, strict=True)
    )
    return first, second


def _sizes(a: RunConfig, b: RunConfig, full_size: bool) -> Iterator[tuple[dict[str, Any], int]]:
    """(fields of the model, sequence length), smallest first."""
    if full_size:
        yield {}, a.data.seq_length
        return
    parallels = [config.parallel for config in (a, b)]
    tp = math.lcm(*(parallel.tensor_model_parallel_size for parallel in parallels))
    cuts = math.lcm(*(parallel.tensor_model_parallel_size * parallel.context_parallel_size for parallel in parallels))
    sequence = 2 * cuts * math.ceil(16 / (2 * cuts))
    parts = max(parallel.pipeline_model_parallel_size * parallel.pipeline_chunks for parallel in parallels)
    for layers in _layers(a.model, parallels, parts):
        for heads, groups in itertools.islice(_heads(a.model, tp, cuts), 4):
            head = next(size for size in (8, 16, 32, 64, 128, a.model.head_dim) if round(size * a.model.rotary_percent) % 2 == 0)
            yield {
                "num_layers": layers, "hidden_size": heads * head, "num_attention_heads": heads,
                "num_query_groups": None if a.model.num_query_groups is None else groups,
                "kv_channels": None if a.model.kv_channels is None else head,
                "ffn_hidden_size": 2 * heads * head, "make_vocab_size_divisible_by": min(8, a.model.make_vocab_size_divisible_by),
            }, sequence  # fmt: skip


def _layers(model: ModelArchitectureConfig, parallels: list[Any], parts: int) -> list[int]:
    """Numbers of layers to try; only the model's own where a layout names every layer."""
    named = ("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    if any(getattr(parallel, name) is not None for parallel in parallels for name in named):
        return [model.num_layers]
    return [*range(min(max(2, parts - 2), model.num_layers), min(3 * parts, model.num_layers) + 1), model.num_layers]


def _heads(model: ModelArchitectureConfig, tp: int, cuts: int) -> Iterator[tuple[int, int]]:
    """(query heads, key/value heads), few first: several of each where the model has several, divisible as the layouts need."""
    groups, ratio = model.num_kv_heads, model.num_attention_heads // model.num_kv_heads
    for per_group in range(min(2, ratio), ratio + 1):
        for own in range(min(2, groups), groups + 1):
            if (own * per_group) % cuts == 0 and (own % tp == 0 or own == groups):
                yield own * per_group, own
    yield model.num_attention_heads, groups
