"""Metrics: what one step yields, and what a log interval of steps amounts to. Plain numbers; no printing, no files.

    StepResult (each step) -> MetricsAccumulator (sums over the interval) -> StepMetrics (each log line)

The loss of an interval is sum(token losses) / sum(tokens) over all its tokens, never a mean of means.
"""

import dataclasses
import math
from collections.abc import Mapping

from megatron.training.train_state import TrainState

# What a line of metrics.jsonl holds, in this order.
LOGGED_FIELDS = (
    "iteration",
    "consumed_samples",
    "consumed_tokens",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "skipped",
    "global_batch_size",
    "step_time_s",
    "data_time_s",
    "exposed_comm_time_s",
    "tokens_per_s",
    "tflops_per_rank",
    "mfu",
    "peak_memory_bytes",
)
# Of these, what depends on the machine and its load; all others are the same in two runs of one configuration.
MACHINE_FIELDS = frozenset(LOGGED_FIELDS[LOGGED_FIELDS.index("step_time_s") :])


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The global result of one step, the same on every rank.

    loss_sum, tokens: sum of the loss over all unmasked tokens of the global batch, and their number; both 0 for a skipped step.
    grad_norm: L2 norm before clipping; None where the step ended before it was known. skipped: no update was made.
    nan: loss or gradient was not finite (a loss-scale overflow is skipped, but not nan).
    num_zeros: zero elements of the gradient, if counted. params_norm: L2 norm of the parameters, if asked for.
    group_norms: by parameter group, norms of the gradients (`grad`, before clipping) and of the parameters (`param`), if asked for.
    """

    loss_sum: float
    tokens: int
    grad_norm: float | None
    skipped: bool
    nan: bool
    num_zeros: int | None = None
    params_norm: float | None = None
    group_norms: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """One log line: the interval that ends with step `iteration` of `train_iters`.

    lm_loss: token mean over the interval; nan if every step was skipped. grad_norm, learning_rate, loss_scale,
    global_batch_size, num_zeros, params_norm, group_norms: of the last step. skipped, nan: steps of the interval without an update, and with a
    non-finite loss or gradient. *_time_s: seconds per step, mean; step_time_s is wall time and includes data_time_s.
    tokens_per_s: of all ranks together. tflops_per_rank: model FLOPs (not those of recomputation), in 1e12/s.
    mfu: tflops_per_rank over the device's dense peak, 0..1; None where the peak is not known.
    peak_memory_bytes: of rank 0, so far. eta_s: seconds to the last step at this pace.
    expert_balance: of the last step, by tag (`megatron.core.transformer.moe.balance`); empty for a model without experts.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    lm_loss: float
    grad_norm: float | None
    learning_rate: float
    loss_scale: float
    skipped: int
    nan: int
    global_batch_size: int
    step_time_s: float
    data_time_s: float
    exposed_comm_time_s: float
    tokens_per_s: float
    tflops_per_rank: float
    mfu: float | None
    peak_memory_bytes: int
    eta_s: float
    num_zeros: int | None = None
    params_norm: float | None = None
    group_norms: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    expert_balance: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class EvalMetrics:
    """Loss over all unmasked tokens of an evaluation. split: validation or test."""

    iteration: int
    split: str
    lm_loss: float
    perplexity: float
    tokens: int
    consumed_samples: int | None = None


class MetricsAccumulator:
    """Sums over a log interval.

    Args:
        train_iters: last step of the run. world_size: ranks that share the FLOPs.
        flops_per_token: forward and backward, see `megatron.training.flops`.
        peak_tflops: dense peak of one rank's device in 1e12 FLOP/s; None = not known.
        loss_sum, tokens, skipped, nan: what the interval held before a restart (`TrainState.logged_*`).
    """

    def __init__(
        self,
        *,
        train_iters: int,
        world_size: int,
        flops_per_token: float,
        peak_tflops: float | None = None,
        loss_sum: float = 0.0,
        tokens: int = 0,
        skipped: int = 0,
        nan: int = 0,
    ) -> None:
        self.train_iters, self.world_size = train_iters, world_size
        self.flops_per_token, self.peak_tflops = flops_per_token, peak_tflops
        self._clear()
        self._loss_sum, self._loss_tokens, self._skipped, self._nan = loss_sum, tokens, skipped, nan

    def _clear(self) -> None:
        self._loss_sum, self._loss_tokens, self._skipped, self._nan = 0.0, 0, 0, 0
        self._steps, self._tokens = 0, 0
        self._step_time, self._data_time, self._comm_time = 0.0, 0.0, 0.0
        self._global_batch_size = 0
        self._last: StepResult | None = None

    def add(
        self,
        result: StepResult,
        *,
        step_time_s: float,
        data_time_s: float,
        exposed_comm_time_s: float,
        global_batch_size: int,
        tokens: int,
    ) -> None:
        """Count one step. tokens: all that the step read (global batch size x sequence length), masked ones included."""
        self._loss_sum += result.loss_sum
        self._loss_tokens += result.tokens
        self._skipped += result.skipped
        self._nan += result.nan
        self._steps += 1
        self._tokens += tokens
        self._step_time += step_time_s
        self._data_time += data_time_s
        self._comm_time += exposed_comm_time_s
        self._global_batch_size = global_batch_size
        self._last = result

    def flush(
        self,
        state: TrainState,
        *,
        learning_rate: float,
        loss_scale: float,
        peak_memory_bytes: int,
        expert_balance: Mapping[str, float] | None = None,
    ) -> StepMetrics:
        """The interval's metrics; the next interval starts empty. At least one step was added.

        state: the run's counters after the interval's last step. expert_balance: of the last step.
        """
        assert self._last is not None, "flush without a step"
        rate = self._tokens / self._step_time if self._step_time > 0 else 0.0
        tflops = rate * self.flops_per_token / self.world_size / 1e12
        step_time = self._step_time / self._steps
        metrics = StepMetrics(
            iteration=state.iteration,
            train_iters=self.train_iters,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            lm_loss=self._loss_sum / self._loss_tokens if self._loss_tokens else math.nan,
            grad_norm=self._last.grad_norm,
            learning_rate=learning_rate,
            loss_scale=loss_scale,
            skipped=self._skipped,
            nan=self._nan,
            global_batch_size=self._global_batch_size,
            step_time_s=step_time,
            data_time_s=self._data_time / self._steps,
            exposed_comm_time_s=self._comm_time / self._steps,
            tokens_per_s=rate,
            tflops_per_rank=tflops,
            mfu=tflops / self.peak_tflops if self.peak_tflops else None,
            peak_memory_bytes=peak_memory_bytes,
            eta_s=step_time * max(0, self.train_iters - state.iteration),
            num_zeros=self._last.num_zeros,
            params_norm=self._last.params_norm,
            group_norms=self._last.group_norms,
            expert_balance=expert_balance or {},
        )
        self._clear()
        return metrics
