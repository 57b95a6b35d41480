"""Training jobs inside the ranks of `run_distributed` (or this process): the command line's own path, without a new process.

`train_job(flags)` parses flags as the command line does, trains, and returns what tests compare.
"""

import dataclasses
import json
import pathlib
from typing import Any

import torch

from megatron.core.dist_checkpointing.model_state import model_sharded_tensors
from megatron.training.config import parse_command_line
from megatron.training.initialize import create_groups
from megatron.training.metrics import StepResult
from megatron.training.trainer import Trainer
from tests.harness.distributed import run_distributed
from tests.harness.logical import logical_tensors


@dataclasses.dataclass
class Job:
    """What a job leaves: losses and gradient norms per step, sample ids per step, logical weights before and after.

    Weights of a model in one piece include the vocabulary's padding; those of several pieces do not.
    """

    losses: list[float]
    grad_norms: list[float | None]
    sample_ids: list[list[int]]
    initial: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]
    iteration: int
    consumed_samples: int
    evaluations: list[float]

    def gradient(self) -> dict[str, torch.Tensor]:
        """The GRAD probe: with SGD, lr 1, no momentum, decay or clipping, and one step, the update is the gradient."""
        return {name: before - self.final[name] for name, before in self.initial.items()}


class Recorder:
    """A trainer callback that keeps each step's result."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []
        self.evaluations: list[float] = []

    def on_train_start(self, trainer: Trainer) -> None:
        """Nothing to do."""

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Keep the result."""
        self.results.append(result)

    def on_eval_end(self, trainer: Trainer, metrics: Any) -> None:
        """Keep the evaluation's loss."""
        self.evaluations.append(metrics.lm_loss)

    def on_save(self, trainer: Trainer, iteration: int) -> None:
        """Nothing to do."""

    def on_train_end(self, trainer: Trainer) -> None:
        """Nothing to do."""


def make_trainer(flags: list[str], **kwargs: Any) -> Trainer:
    """A Trainer from command-line flags, on CPU, over the ranks of the initialised group (or one process)."""
    config = parse_command_line(flags).resolved.config
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return Trainer(config, device=torch.device("cpu"), groups=create_groups(config.parallel, config.ddp, world), **kwargs)


def train_job(flags: list[str], **kwargs: Any) -> Job:
    """Train to the end; runs on every rank. Weights are whole on each rank (data parallelism)."""
    recorder = Recorder()
    trainer = make_trainer(flags, callbacks=[recorder, *kwargs.pop("callbacks", [])], **kwargs)
    initial = weights(trainer)
    ids: list[list[int]] = []
    fetch = trainer.data.train_step

    def recorded(consumed: int) -> Any:
        batches = fetch(consumed)
        ids.append([int(i) for batch in batches for i in batch["sample_ids"]])
        return batches

    trainer.data.train_step = recorded  # type: ignore[method-assign]
    state = trainer.fit()
    trainer.optimizer.finish_param_sync()
    return Job(
        losses=[r.loss_sum / max(r.tokens, 1) for r in recorder.results],
        grad_norms=[r.grad_norm for r in recorder.results],
        sample_ids=ids,
        initial=initial,
        final=weights(trainer),
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        evaluations=recorder.evaluations,
    )


def run_job(world_size: int, flags: list[str]) -> list[Job]:
    """`train_job` on `world_size` ranks; one rank runs in this process, without torch.distributed."""
    return [train_job(flags)] if world_size == 1 else run_distributed(train_job, world_size, flags, timeout=120)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of all whole parameters by logical name; ranks that hold the same part of one must hold the same bits."""
    groups = trainer.groups
    if groups.size("mp") == groups.size("tp_ep") == 1:
        return {name: p.detach().clone() for name, p in trainer.model.module.named_parameters()}
    local = [model_sharded_tensors(chunk.module, groups) for chunk in trainer.model_chunks]
    whole = logical_tensors({name: tensor for tensors in local for name, tensor in tensors.items()}, groups)
    return {name.removeprefix("model."): tensor for name, tensor in whole.items()}


def read_metrics(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
