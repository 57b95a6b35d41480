"""ForwardBackward: a step's microbatches through this rank's part of the model, forward and backward, by the configured schedule."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core.distributed import DistributedDataParallel
from megatron.core.errors import ConfigError
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.p2p_communication import PipelineCommunicator
from megatron.core.pipeline_parallel.schedule_plan import Kind, PipelinePlan, build_plan, forward_only
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.batch_inputs import AuxLossWeight
from megatron.training.config.run_config import RunConfig
from megatron.training.objectives import ModelBatch, Objective

Batch = dict[str, torch.Tensor]
# (model, microbatch on the device) -> (sum of weighted losses, number of counted tokens)
LossFunction = Callable[[torch.nn.Module, Batch], tuple[torch.Tensor, torch.Tensor]]
Timed = Callable[[str, int], contextlib.AbstractContextManager[None]]


class ForwardBackward:
    """Runs steps. Every rank of a pipeline calls it with the same microbatches.

    Args:
        chunks: this rank's model chunks.
        objective: makes the model's inputs of a microbatch and reduces the losses.
        loss_function: replaces the objective; only where the model is in one piece.
        timed: context manager that times a phase, by name and level.

    Raises ConfigError for a loss function with a pipeline. Constructing it is a collective of all ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ProcessGroupCollection,
        device: torch.device,
        chunks: Sequence[DistributedDataParallel],
        objective: Objective,
        loss_function: LossFunction | None,
        timed: Timed,
    ) -> None:
        self.config, self.device, self.chunks, self.timed = config, device, list(chunks), timed
        self.objective, self.loss_function = objective, loss_function
        self.stages, self.stage = groups.size("pp"), groups.rank("pp")
        if loss_function is not None and self.stages > 1:
            raise ConfigError("loss_function needs the whole model: set pipeline_model_parallel_size=1, or give an objective")
        self.link = PipelineCommunicator(groups) if self.stages > 1 else None
        self.parts = [self._plan(self.stages).part_of(self.stage, chunk) for chunk in range(len(self.chunks))]

    @property
    def has_loss(self) -> bool:
        """Whether this rank holds the last part, so that losses are summed here."""
        return self._is_last(len(self.chunks) - 1)

    def train(self, batches: list[Batch], scale_loss: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward of all microbatches.

        Returns (sum of losses float64, 0 where the rank hasn't the last part; number of tokens int64, on every rank).
        """
        return self._run(self._plan(len(batches)), batches, scale_loss)

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward only; returns what `train` does."""
        return self._run(forward_only(self._plan(len(batches))), batches, lambda loss: loss)

    def _plan(self, microbatches: int) -> PipelinePlan:
        parallel = self.config.parallel
        return _cached_plan(parallel.pipeline_schedule, self.stages, parallel.pipeline_chunks, microbatches)

    def _is_last(self, chunk: int) -> bool:
        return self.parts[chunk] == self.stages * len(self.chunks) - 1

    def _run(
        self, plan: PipelinePlan, batches: list[Batch], scale_loss: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        on_device: dict[int, Batch] = {}

        def forward(chunk: int, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor:
            nonlocal loss_sum, tokens
            if microbatch not in on_device:
                on_device[microbatch] = {
                    name: value.to(self.device, non_blocking=True) for name, value in batches[microbatch].items()
                }
            batch = on_device[microbatch]
            if chunk == plan.chunks - 1:
                del on_device[microbatch]
            output, count = self._forward(chunk, batch, hidden, scale_loss)
            if count is not None:
                tokens += count
            if not self._is_last(chunk):
                return output
            loss_sum += output.detach()
            return scale_loss(output)

        PipelineExecutor(
            plan=plan,
            rank=self.stage,
            communicator=self.link,
            chunks=self.chunks,
            forward=forward,
            message_shape=lambda microbatch: self._hidden_shape(batches[microbatch]),
            dtype=self.config.parallel.params_dtype,
            device=self.device,
            timed=self._timed_action,
        ).run()
        return loss_sum, tokens

    def _forward(
        self, chunk: int, batch: Batch, hidden: torch.Tensor | None, scale_loss: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(hidden states or sum of losses, number of tokens or None if another chunk of this rank counts them)."""
        model = self.chunks[chunk]
        if self.loss_function is not None:
            return self.loss_function(model, batch)
        inputs = self.objective.prepare(batch, seed=self.config.training.seed)
        given: dict[str, Any] = {} if hidden is None else {"hidden": hidden}
        if self.config.model.num_experts is not None and model.training:
            given["aux_loss"] = self._aux_loss_weight(inputs, scale_loss)
        output = model(inputs.tokens, inputs.position_ids, labels=inputs.labels, document_ids=inputs.document_ids, **given)
        if self._is_last(chunk):
            return self.objective.reduce(output, inputs)
        counts = chunk == 0 and not self.has_loss
        return output, inputs.loss_weights.count_nonzero() if counts else None

    def _aux_loss_weight(self, inputs: ModelBatch, scale_loss: Callable[[torch.Tensor], torch.Tensor]) -> AuxLossWeight:
        """Auxiliary losses count like the losses of the microbatch's tokens, which are summed and divided by the step's tokens."""
        tokens = inputs.loss_weights.count_nonzero().to(torch.float32)
        return AuxLossWeight(tokens, scale_loss(tokens))

    def _hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        rows, length = batch["tokens"].shape
        parallel = self.config.parallel
        return length // (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1), rows, self.config.model.hidden_size

    def _timed_action(self, kind: Kind) -> contextlib.AbstractContextManager[None]:
        return self.timed("forward-compute" if kind is Kind.F else "backward-compute", 2)


@functools.lru_cache(maxsize=64)
def _cached_plan(schedule: str, stages: int, chunks: int, microbatches: int) -> PipelinePlan:
    return build_plan(schedule, stages, chunks, microbatches)
