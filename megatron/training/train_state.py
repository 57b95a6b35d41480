"""TrainState: where a run stands, as one immutable value; the trainer replaces it at the end of each step."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Counters of a run. All are global (the same on every rank) and travel in the checkpoint.

    iteration: completed steps. consumed_samples / consumed_tokens: read from the training set so far (tokens = samples x
    sequence length). skipped_iterations / nan_iterations: steps without an update (loss-scale overflow / non-finite).
    floating_point_operations: model FLOPs so far. logged_*: sums since the last log line, so that a log interval that
    spans a restart still shows a true token mean. evaluated_iteration: the last step whose evaluation was completed.
    planned_samples: length of the run that drew the sample order (Megatron's order depends on it).
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    consecutive_skips: int = 0
    floating_point_operations: float = 0.0
    logged_loss_sum: float = 0.0
    logged_loss_tokens: int = 0
    logged_skipped: int = 0
    logged_nan: int = 0
    evaluated_iteration: int = 0
    planned_samples: int = 0

    def as_dict(self) -> dict[str, int | float]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: dict[str, int | float]) -> "TrainState":
        """Inverse of `as_dict`; unknown keys (of a newer version) are an error by construction."""
        return TrainState(**values)  # type: ignore[arg-type]
