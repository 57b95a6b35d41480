"""Callback: an observer of a run. The trainer calls it on every rank, at points that all ranks reach together."""

from typing import Any, Protocol

from megatron.training.metrics import EvalMetrics, StepResult


class Callback(Protocol):
    """What the trainer tells its observers. A callback may read the trainer and must leave its state alone.

    trainer: the `megatron.training.trainer.Trainer`; `trainer.state` is the state after the event.
    """

    def on_train_start(self, trainer: Any) -> None:
        """Before the first step; everything is built and loaded."""
        ...

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        """After each step, before it is logged, evaluated or saved."""
        ...

    def on_eval_end(self, trainer: Any, metrics: EvalMetrics) -> None:
        """After each completed evaluation."""
        ...

    def on_save(self, trainer: Any, iteration: int) -> None:
        """After the checkpoint of `iteration` was written."""
        ...

    def on_train_end(self, trainer: Any) -> None:
        """After the last step, evaluation and save."""
        ...
