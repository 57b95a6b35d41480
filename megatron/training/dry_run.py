"""Dry run: check a configuration for any number of ranks without starting one, and say what each rank would hold and send."""

import dataclasses
import tempfile

import torch

from megatron.core.datasets.gpt_dataset import SPLITS, build_gpt_datasets
from megatron.core.distributed.param_layout import BufferLayout, ParamSpec, plan_buffer
from megatron.core.errors import ConfigError
from megatron.core.optimizer.offload import offloaded
from megatron.core.optimizer.shard_map import pack_states
from megatron.core.optimizer.stored_values import bytes_of
from megatron.core.optimizer.update_rules import rule_name, state_names
from megatron.core.param_meta import param_meta
from megatron.core.pipeline_parallel.schedule_plan import build_plan, check_plan, part_of, time_plan
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers import Tokenizer
from megatron.training.config import check_run_config
from megatron.training.config.run_config import RunConfig, rank_grid
from megatron.training.data import dataset_config
from megatron.training.gpt_builder import build_gpt_model, build_model_chunks, count_parameters
from megatron.training.plan import TrainingPlan
from megatron.training.run_tokenizer import build_run_tokenizer, true_vocab_size

_SHOWN_RANKS = 16


def dry_run_report(config: RunConfig, world_size: int) -> str:
    """Everything a start would check, and the figures per rank, as text. Raises ConfigError or DataError as the start would.

    The data set indices are built in a temporary folder; nothing is left behind.
    """
    problems = check_run_config(config, world_size)
    if problems:
        raise ConfigError("\n".join(problems))
    dp = config.data_parallel_size(world_size)
    plan = TrainingPlan.of(config, dp)
    tokenizer = build_run_tokenizer(config)
    grid = rank_grid(config.parallel, world_size)
    parameters = count_parameters(config, true_vocab_size(config, tokenizer))
    lines = [f"configuration is valid for {world_size} rank(s)", f"model: {parameters:,} parameters"]
    lines += [*_data(config, tokenizer, plan), *_length(config, plan)]
    for stage in range(grid.pp):
        chunks = build_model_chunks(
            config,
            build_gpt_model,
            pg_collection=ProcessGroupCollection.planned(grid, grid.groups("pp")[0][stage]),
            vocab_size=true_vocab_size(config, tokenizer),
            device=torch.device("meta"),
        )
        if grid.pp > 1:
            lines.append(f"pipeline stage {stage}: {_contents(config, stage)}")
        lines += _memory(config, chunks, dp, grid.expert_dp)
    return "\n".join([*lines, *_pipeline(config, plan), *_rank_map(config, world_size)])


def _contents(config: RunConfig, stage: int) -> str:
    """Which layers a stage holds, chunk by chunk."""
    parallel, parts = config.parallel, config.transformer_config().pipeline_parts
    held = []
    for chunk in range(parallel.pipeline_chunks):
        part = parts[part_of(parallel.pipeline_schedule, parallel.pipeline_model_parallel_size, stage, chunk)]
        layers = f"layers {part.layers.start} to {part.layers.stop - 1}" if part.layers else "no layer"
        held.append(", ".join(["embedding"] * part.embedding + [layers] + ["head"] * part.head))
    return "; ".join(held)


def _pipeline(config: RunConfig, plan: TrainingPlan) -> list[str]:
    """The schedule of a full-sized step and its bubble."""
    parallel, microbatches = config.parallel, plan.calculator.all_num_microbatches()[-1]
    if parallel.pipeline_model_parallel_size == 1:
        return []
    sizes = (parallel.pipeline_model_parallel_size, parallel.pipeline_chunks, microbatches)
    schedule = build_plan(parallel.pipeline_schedule, *sizes)
    return [
        f"pipeline: {parallel.pipeline_schedule}, {sizes[0]} stages of {sizes[1]} model chunk(s), {microbatches} microbatches, bubble "
        f"{time_plan(schedule).bubble:.1%} if a forward, its inputs' and its weights' gradients take the same time; activations held "
        f"at most by each stage (of one microbatch in one chunk): {', '.join(map(str, check_plan(schedule)))}"
    ]


def _data(config: RunConfig, tokenizer: Tokenizer, plan: TrainingPlan) -> list[str]:
    evaluated = config.training.eval_iters * config.global_batch_size(plan.data_parallel_size)
    with tempfile.TemporaryDirectory() as cache:
        described = dataclasses.replace(dataset_config(config, tokenizer), cache_path=cache)
        datasets = build_gpt_datasets(described, (plan.train_samples, evaluated, evaluated))
    sizes = [f"{name} {0 if dataset is None else len(dataset):,}" for name, dataset in zip(SPLITS, datasets, strict=True)]
    return [f"data: samples of {config.data.seq_length} tokens: {', '.join(sizes)}"]


def _length(config: RunConfig, plan: TrainingPlan) -> list[str]:
    first, last = plan.global_batch_size(0), config.global_batch_size(plan.data_parallel_size)
    ramp = f"{first} rising to {last}" if first != last else str(last)
    tokens = plan.train_samples * config.data.seq_length
    return [
        f"length: {plan.train_iters:,} steps, global batch size {ramp}, {plan.train_samples:,} samples, {tokens:,} tokens; "
        f"warm-up {plan.lr_warmup_samples:,} and decay {plan.lr_decay_samples:,} samples"
    ]


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """A chunk's buffer of dense parameters or of experts. ranks: that hold copies; shards: that share its optimizer state."""

    layout: BufferLayout
    params: list[torch.nn.Parameter]
    ranks: int
    shards: int


def _memory(config: RunConfig, chunks: list[torch.nn.Module], dp: int, expert_dp: int) -> list[str]:
    """Model state in bytes of the data-parallel rank that holds most, and bytes that it sends per step over data parallelism (ring: (d-1)/d of a buffer each)."""
    params = [p for chunk in chunks for p in chunk.parameters()]
    sharded = config.ddp.use_distributed_optimizer
    planned = [_buffer(chunk, config, expert, dp, ranks) for chunk in chunks for expert, ranks in ((False, dp), (True, expert_dp))]
    buffers = [buffer for buffer in planned if buffer.params]
    layouts = [buffer.layout for buffer in buffers]
    param_size = config.parallel.params_dtype.itemsize
    grad_size = 4 if config.ddp_config(dp).grad_reduce_in_fp32 else param_size
    padded, unpadded = sum(layout.numel for layout in layouts), sum(layout.numel_unpadded for layout in layouts)
    owned = [bucket.range.size // buffer.shards for buffer in buffers for bucket in buffer.layout.buckets]  # elements whose state is kept
    if not sharded:
        owned = [spec.numel for layout in layouts for spec in layout.specs]
    on_host = 0
    if config.optimizer.optimizer_cpu_offload:  # buckets are updated in forward order, chunk by chunk
        sizes = [bucket.range.size // buffer.shards for buffer in buffers for bucket in reversed(buffer.layout.buckets)]
        chosen = offloaded(sizes, config.optimizer.optimizer_offload_fraction)
        owned, gone = ([size for size, out in zip(sizes, chosen, strict=True) if out == where] for where in (False, True))
        on_host = _host_bytes(config, gone, param_size, grad_size)
    frozen = sum(p.numel() for p in params if not p.requires_grad)
    kind = config.parallel.params_dtype
    if config.optimizer.use_precision_aware_optimizer or config.optimizer.optimizer_cpu_offload:
        names = state_names(config.optimizer, config.optimizer.optimizer)
        moments = sum(bytes_of(config.optimizer, name, kind, numel) for name in names for numel in owned)
    else:
        moments = max(4, param_size) * sum(_state_elements(buffer, config) for buffer in buffers)
    copies = config.optimizer.main_grads_dtype == "fp32" and grad_size == 2
    states = {
        "params": ((padded if sharded else unpadded) + frozen) * param_size,
        "grads": padded * grad_size,
        "main params": sum(bytes_of(config.optimizer, "main_param", kind, numel) for numel in owned),
        "main grads": (sum(owned) if sharded else padded) * 4 if copies else 0,  # the plain optimizer copies the whole buffer
        "moments": moments,
    }
    sent = sum((buffer.ranks - 1) / buffer.ranks * buffer.layout.numel for buffer in buffers)
    traffic = sent * (grad_size + param_size) if sharded else 2 * sent * grad_size
    total = sum(states.values())
    return [
        f"parameters per rank: {sum(p.numel() for p in params):,} ({sum(p.numel() for p in params if p.requires_grad):,} trained)",
        "model state per rank: " + ", ".join(f"{name} {size:,} bytes" for name, size in states.items()) + f"; together {total:,} bytes"
        + (f"; in host memory {on_host:,} bytes" if on_host else ""),
        f"of this padding: {(padded - unpadded):,} elements in {sum(len(layout.buckets) for layout in layouts)} bucket(s); activations are not counted",
        f"communication per rank and step: {int(traffic):,} bytes sent "
        + ("(reduce-scatter of gradients, all-gather of parameters)" if sharded else "(all-reduce of gradients)"),
    ]


def _host_bytes(config: RunConfig, owned: list[int], param_size: int, grad_size: int) -> int:
    """What optimizer_cpu_offload keeps in host memory for runs of elements: values, copies of parameters and gradients."""
    optimizer, kind = config.optimizer, config.parallel.params_dtype
    copies = param_size + grad_size + (4 if optimizer.main_grads_dtype == "fp32" and grad_size == 2 else 0)
    names = ("main_param", *state_names(optimizer, optimizer.optimizer))
    return sum(copies * numel + sum(bytes_of(optimizer, name, kind, numel) for name in names) for numel in owned)


def _state_elements(buffer: _Buffer, config: RunConfig) -> int:
    """Elements of optimizer state beside main params, on the data-parallel rank that holds most."""
    optimizer, shards = config.optimizer, buffer.shards
    names = [state_names(optimizer, rule_name(optimizer, param)) for param in buffer.params]
    if not optimizer.use_distributed_optimizer:
        return sum(param.numel() * len(own) for param, own in zip(buffer.params, names, strict=True))
    if optimizer.optimizer != "muon":  # one rule: the states lie like the shards
        return buffer.layout.numel // shards * len(state_names(optimizer, optimizer.optimizer))
    return max(_packed_elements(buffer.layout, names, rank, shards) for rank in range(shards))


def _packed_elements(layout: BufferLayout, names: list[tuple[str, ...]], rank: int, shards: int) -> int:
    total = 0
    for bucket in layout.buckets:
        held = {index: layout.params[index].intersection(bucket.shard(rank, shards)) for index in bucket.params}
        total += sum(pack_states(held, dict(enumerate(names)))[1].values())
    return total


def _buffer(chunk: torch.nn.Module, config: RunConfig, expert: bool, dp: int, ranks: int) -> _Buffer:
    trained = [(name, p) for name, p in chunk.named_parameters() if p.requires_grad and param_meta(p).is_expert == expert]
    sharded = config.ddp.use_distributed_optimizer
    shards = ranks // config.ddp.num_distributed_optimizer_instances if sharded else 1
    specs = [ParamSpec(name, p.numel(), sharded and param_meta(p).shared_embedding) for name, p in trained]
    return _Buffer(plan_buffer(specs, config.ddp_config(dp).bucket_size, shards), [p for _, p in trained], ranks, shards)


def _rank_map(config: RunConfig, world_size: int) -> list[str]:
    grid = rank_grid(config.parallel, world_size)
    lines = ["ranks:"]
    for rank in range(min(world_size, _SHOWN_RANKS)):
        place = grid.coordinates(rank)
        words = [f"{axis} {place[axis]}" for axis in ("tp", "cp", "dp", "pp") if axis in place]
        if config.model.num_experts is not None:
            experts = grid.expert_coordinates(rank)
            words += ["| experts:", *(f"{axis} {experts[axis]}" for axis in ("tp", "ep", "dp"))]
        lines.append(f"  rank {rank}: " + " ".join(words))
    if world_size > _SHOWN_RANKS:
        lines.append(f"  and {world_size - _SHOWN_RANKS} more")
    return lines
