"""Facade: Megatron's `get_forward_backward_func`, over `schedule_plan` and `PipelineExecutor`. It translates and decides nothing.

    forward_backward = get_forward_backward_func()
    losses = forward_backward(
        forward_step_func=forward_step, data_iterator=iterator, model=model_chunks, num_microbatches=8, seq_length=1024,
        micro_batch_size=1, forward_only=False,
    )

`forward_step(data_iterator, model)` returns (output, loss_func); `loss_func(output)` returns (loss, report) or (loss sum, number of
tokens, report). A part of a pipeline gets its hidden states by `set_input_tensor`, as in Megatron.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron.core import collectives
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.p2p_communication import PipelineCommunicator
from megatron.core.pipeline_parallel.schedule_plan import PipelinePlan, build_plan
from megatron.core.pipeline_parallel.schedule_plan import forward_only as forwards_of
from megatron.core.process_groups_config import ProcessGroupCollection

# (data iterator, model chunk) -> (output, loss function)
ForwardStep = Callable[[Any, torch.nn.Module], tuple[torch.Tensor, Callable[..., Any]]]


def get_forward_backward_func() -> Callable[..., list[Any]]:
    """The function that runs a step's microbatches; one for every schedule."""
    return forward_backward


def forward_backward(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any] | Sequence[Iterator[Any] | None] | None,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None,
    finalize_model_grads_func: Callable[..., None] | None = None,
    calculate_per_token_loss: bool = False,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[Any]:
    """Forward, and unless `forward_only` backward, of all microbatches; all ranks of a pipeline call it together.

    Args:
        model: this rank's chunk or chunks, each wrapped in DistributedDataParallel unless only forwards run. With a pipeline the
            config they were built with has `hidden_size`, and they have `set_input_tensor`.
        data_iterator: passed on to `forward_step_func`; with several chunks a list, one for each.
        seq_length: tokens of a row; decoder_seq_length, if given, is taken instead.
        collect_non_loss_data: keep what `loss_func(output, non_loss_data=True)` returns (forwards only).
        first_val_step: accepted, as in Megatron; there is nothing to warm up.
        grad_scale_func, finalize_model_grads_func, calculate_per_token_loss: what Megatron reads from its mutable config. The loss
            is averaged over microbatches (and, of a 3-tuple, over its tokens), unless calculate_per_token_loss: then it stays a
            sum and the number of tokens goes to finalize_model_grads_func(chunks, tokens).
        pg_collection: process groups; default: those that initialize_model_parallel installed.

    Returns the reports of this rank's microbatches, in their order: empty where it has not the last part of the model.
    """
    if collect_non_loss_data and not forward_only:
        raise ConfigError("collect_non_loss_data=True needs forward_only=True: there is no loss to differentiate")
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    groups = ProcessGroupCollection.resolve(pg_collection)
    step = _Step(
        groups, chunks, forward_step_func, data_iterator, num_microbatches, collect_non_loss_data, calculate_per_token_loss,
        grad_scale_func if not forward_only else None,
    )  # fmt: skip
    plan = step.plan if not forward_only else forwards_of(step.plan)
    with torch.set_grad_enabled(not forward_only):
        step.run(plan, (decoder_seq_length or seq_length, micro_batch_size))
    if finalize_model_grads_func is not None and not forward_only:
        finalize_model_grads_func(chunks, step.tokens if calculate_per_token_loss else None)
    return step.reports


class _Step:
    """One call: from Megatron's functions to the executor's."""

    def __init__(
        self,
        groups: ProcessGroupCollection,
        chunks: list[torch.nn.Module],
        forward_step: ForwardStep,
        data_iterator: Any,
        microbatches: int,
        collect: bool,
        per_token: bool,
        scale: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        self.groups, self.chunks, self.forward_step = groups, chunks, forward_step
        self.microbatches, self.collect, self.per_token, self.scale = microbatches, collect, per_token, scale
        self.config = _config_of(chunks[0])
        schedule = "1f1b" if self.config is None else self.config.pipeline_schedule
        self.plan: PipelinePlan = build_plan(schedule, groups.size("pp"), len(chunks), microbatches)
        self.iterators = list(data_iterator) if isinstance(data_iterator, (list, tuple)) else [data_iterator] * len(chunks)
        if len(self.iterators) != len(chunks):
            raise ConfigError(f"data_iterator has {len(self.iterators)} entries, model has {len(chunks)} chunk(s); give one for each")
        self.device = next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
        self.reports: list[Any] = []
        self.tokens = torch.zeros((), dtype=torch.int64, device=self.device)

    def run(self, plan: PipelinePlan, sizes: tuple[int, int]) -> None:
        """sizes: tokens of a row, rows."""
        PipelineExecutor(
            plan=plan,
            rank=self.groups.rank("pp"),
            communicator=_communicator(self.chunks[0], self.groups) if plan.stages > 1 else None,
            chunks=self.chunks,  # type: ignore[arg-type]
            forward=self._forward,
            message_shape=lambda microbatch: self._hidden_shape(*sizes),
            dtype=torch.float32 if self.config is None else self.config.params_dtype,
            device=self.device,
        ).run()
        if plan.stages > 1 and self.per_token:
            collectives.all_reduce(self.tokens, self.groups.pp)  # sum over the pipeline, int64: the last stage alone has counted

    def _forward(self, chunk: int, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        if hidden is not None:
            _unwrapped(self.chunks[chunk]).set_input_tensor(hidden)
        output, loss_func = self.forward_step(self.iterators[chunk], self.chunks[chunk])
        if self.plan.part_of(self.groups.rank("pp"), chunk) < self.plan.parts - 1:
            return output
        if self.collect:
            self.reports.append(loss_func(output, non_loss_data=True))
            return output
        loss, *tokens, report = loss_func(output)
        self.reports.append(report)
        if tokens and self.per_token:
            self.tokens += tokens[0].to(self.tokens)
        else:
            loss = loss / (tokens[0].clamp(min=1) * self.microbatches if tokens else self.microbatches)
        return loss if self.scale is None else self.scale(loss)

    def _hidden_shape(self, length: int, rows: int) -> tuple[int, ...]:
        assert self.config is not None, "a pipeline needs chunks that were built with a configuration"
        cut = self.config.context_parallel_size
        cut *= self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        return length // cut, rows, self.config.hidden_size  # type: ignore[attr-defined]


def _unwrapped(chunk: torch.nn.Module) -> Any:
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


def _config_of(chunk: torch.nn.Module) -> ModelParallelConfig | None:
    """What the chunk was built with: its wrapper's, else its own."""
    config = chunk.config if isinstance(chunk, DistributedDataParallel) else chunk.__dict__.get("config")
    return config if isinstance(config, ModelParallelConfig) else None


_communicators: "weakref.WeakKeyDictionary[torch.nn.Module, PipelineCommunicator]" = weakref.WeakKeyDictionary()


def _communicator(chunk: torch.nn.Module, groups: ProcessGroupCollection) -> PipelineCommunicator:
    """Made at a model's first step, since on NCCL it has communicators of its own; it ends with the model."""
    found = _communicators.get(chunk)
    if found is None:
        found = _communicators[chunk] = PipelineCommunicator(groups)
    return found
