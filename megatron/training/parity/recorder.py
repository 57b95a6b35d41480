"""Recorder: the callback that writes down what a run computes on this rank, step by step, as parts of logical tensors.

It waits for nothing and finishes no collective early: activations come from forward hooks, gradients when the optimizer is about
to read them, updated weights from the optimizer's own main params, so overlap and its faults stay as they are.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from megatron.core.dist_checkpointing.model_state import model_sharded_tensors
from megatron.core.distributed.param_and_grad_buffer import BucketEvent
from megatron.training.metrics import EvalMetrics, StepResult
from megatron.training.objectives import ModelBatch, Objective
from megatron.training.parity.records import Part, RankStep, boxes, scalar

# Modules whose output is a hidden state [s, b, h]: embedding, each layer, what it adds to the residual stream, the last norm.
_RECORDED = re.compile(r"embedding|.*layers\.\d+(\.(self_attention|mlp))?|decoder\.final_layernorm")
_PART = 1_000_000  # orders of one part of the pipeline
TOKEN_LOSSES = "loss of each token"


class Recorder:
    """A trainer's callback and, in `objective`, its objective: both must be given to the Trainer.

    Args:
        objective: what the run would use.
        sink: takes each finished step.
        activations: whether outputs of layers are recorded.
    """

    def __init__(self, objective: Objective, sink: Callable[[RankStep], None], activations: bool = True) -> None:
        self.objective = _Watched(objective, self)
        self._sink, self._activations = sink, activations
        self._parts: list[Part] = []
        self._samples: list[int] = []  # of the forward that runs, by position in the global batch
        self._length = 0  # tokens of each row on this rank
        self._inside = self._read = False
        self._fired = 0
        self._trainer: Any = None

    # The run

    def on_train_start(self, trainer: Any) -> None:
        """Listen, and record the start."""
        self._trainer = trainer
        for chunk, part in zip(trainer.model_chunks, trainer.forward_backward.parts, strict=True):
            for group in chunk.bucket_groups:
                group.observers += (self._on_event,)
            chunk.module.register_forward_hook(self._on_model_end)
            for name, module in chunk.module.named_modules():
                if self._activations and _RECORDED.fullmatch(name):
                    module.register_forward_hook(functools.partial(self._on_output, name, part))
        self._sink(RankStep(0, tuple(self._model("initial"))))

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        """Losses, norm, updated weights."""
        parts = [scalar("loss", "lm loss", result.loss_sum / max(result.tokens, 1))]
        parts.append(scalar("norm", "grad norm", float("nan") if result.grad_norm is None else result.grad_norm))
        orders = self._orders()
        for tensor in trainer.optimizer.sharded_state_dict().values():
            name = tensor.name.removeprefix("optimizer.main_param.")
            if name != tensor.name:
                parts += boxes("weight", name, orders[name], tensor.global_shape, tensor.pieces)
        last = trainer.state.iteration == trainer.plan.train_iters
        if last:
            trainer.optimizer.finish_param_sync()
            parts += self._model("final")
        self._sink(RankStep(trainer.state.iteration, (*self._parts, *parts)))
        self._parts, self._read = [], False

    def on_eval_end(self, trainer: Any, metrics: EvalMetrics) -> None:
        """Nothing."""

    def on_save(self, trainer: Any, iteration: int) -> None:
        """Nothing."""

    def on_train_end(self, trainer: Any) -> None:
        """Nothing."""

    # Forwards

    def begin_forward(self, batch: dict[str, torch.Tensor], length: int) -> None:
        """A microbatch is about to run through a chunk, with `length` tokens of each row on this rank."""
        first = self._trainer.state.consumed_samples
        self._samples = [int(sample) - first for sample in batch["sample_ids"]]
        self._length, self._inside, self._fired = length, self._activations and torch.is_grad_enabled(), 0

    def end_forward(self, token_losses: torch.Tensor) -> None:
        """Losses of the microbatch, [b, s]."""
        if self._activations and torch.is_grad_enabled():
            self._record(TOKEN_LOSSES, 2**62, token_losses[..., None].transpose(0, 1))

    def _on_model_end(self, *unused: Any) -> None:
        self._inside = False  # what comes until the next forward is recomputation

    def _on_output(self, name: str, part: int, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not self._inside:
            return
        self._record(name, part * _PART + self._fired, output[0] if isinstance(output, tuple) else output)
        self._fired += 1

    def _record(self, name: str, order: int, hidden: torch.Tensor) -> None:
        """hidden: [s or s/tp, b, width] of this rank's tokens."""
        config, groups = self._trainer.config, self._trainer.groups
        samples = self._trainer.plan.global_batch_size(self._trainer.state.consumed_samples)
        first = 0
        if hidden.size(0) < self._length:
            first = groups.rank("tp") * hidden.size(0)
        shape = (samples, config.data.seq_length, hidden.size(2))
        for column, sample in enumerate(self._samples):
            row = hidden.detach()[:, column].cpu()
            self._parts.append(Part("activation", name, order, shape, (sample, first, 0), row[None].clone()))

    # Parameters

    def _on_event(self, event: BucketEvent, group: Any, param: torch.nn.Parameter | None) -> None:
        if event is not BucketEvent.GRADS_READING or self._read:
            return
        self._read, orders, optimizer = True, self._orders(), self._trainer.optimizer
        for chunk in self._trainer.model_chunks:
            for valid in chunk.valid_grads():
                tensor = optimizer.sharded(valid.name, valid.param, valid.start, valid.grad / optimizer.grad_scaler.value)
                self._parts += boxes("gradient", valid.name, orders[valid.name], tensor.global_shape, tensor.pieces)

    def _model(self, kind: str) -> list[Part]:
        orders, parts = self._orders(), []
        for chunk in self._trainer.model_chunks:
            for tensor in model_sharded_tensors(chunk.module, self._trainer.groups).values():
                name = tensor.name.removeprefix("model.")
                parts += boxes(kind, name, orders.get(name, 0), tensor.global_shape, tensor.pieces)
        return parts

    def _orders(self) -> dict[str, int]:
        """Position of each parameter of this rank in the whole model."""
        orders: dict[str, int] = {}
        for chunk, part in zip(self._trainer.model_chunks, self._trainer.forward_backward.parts, strict=True):
            for index, (name, _) in enumerate(chunk.module.named_parameters()):
                orders.setdefault(name, part * _PART + index)
        return orders


class _Watched:
    """The run's objective, with the recorder told of every microbatch."""

    def __init__(self, objective: Objective, recorder: Recorder) -> None:
        self.name, self._inner, self._recorder = objective.name, objective, recorder

    def prepare(self, batch: dict[str, torch.Tensor], *, seed: int) -> ModelBatch:
        """See `Objective.prepare`."""
        prepared = self._inner.prepare(batch, seed=seed)
        self._recorder.begin_forward(batch, prepared.tokens.size(1))
        return prepared

    def reduce(self, token_losses: torch.Tensor, batch: ModelBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Objective.reduce`."""
        self._recorder.end_forward(token_losses)
        return self._inner.reduce(token_losses, batch)
