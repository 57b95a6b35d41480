"""Loggers: where metrics go. Console line, metrics.jsonl, TensorBoard, Weights & Biases, progress bar; all on rank 0.

After a restart the files hold every logged step once: what a killed run wrote past the checkpoint is removed first.
"""

import contextlib
import datetime
import json
import math
import os
import pathlib
import sys
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from megatron.core.dist_checkpointing import durable
from megatron.core.errors import ConfigError
from megatron.training.config.run_config import LoggingConfig, RunConfig
from megatron.training.event_files import SAMPLES_SUFFIX, EventWriter, cut_after, has_scalar
from megatron.training.metrics import LOGGED_FIELDS, EvalMetrics, StepMetrics
from megatron.training.progress import ProgressBar, format_duration


class RunLogger(Protocol):
    """A destination of metrics."""

    def advance(self, iteration: int) -> None:
        """Step `iteration` is done (called every step, also between log lines)."""
        ...

    def log_step(self, metrics: StepMetrics) -> None:
        """A log interval is over."""
        ...

    def log_eval(self, metrics: EvalMetrics) -> None:
        """An evaluation is over."""
        ...

    def close(self) -> None:
        """Nothing more will come; closing twice is allowed."""
        ...


class CompositeLogger:
    """Passes everything on to several loggers, in order; with none it is the logger of ranks that log nothing."""

    def __init__(self, loggers: Sequence[RunLogger] = ()) -> None:
        self.loggers = list(loggers)

    def advance(self, iteration: int) -> None:
        """See `RunLogger`."""
        for logger in self.loggers:
            logger.advance(iteration)

    def log_step(self, metrics: StepMetrics) -> None:
        """See `RunLogger`."""
        for logger in self.loggers:
            logger.log_step(metrics)

    def log_eval(self, metrics: EvalMetrics) -> None:
        """See `RunLogger`."""
        for logger in self.loggers:
            logger.log_eval(metrics)

    def close(self) -> None:
        """Close all, also if one of them fails to."""
        with contextlib.ExitStack() as stack:
            for logger in self.loggers:
                stack.callback(logger.close)


class ConsoleLogger:
    """Megatron's log line (same keys, order and units), with tokens/s, MFU and ETA behind it, on stdout."""

    def advance(self, iteration: int) -> None:
        """Only log lines are printed."""

    def log_step(self, metrics: StepMetrics) -> None:
        """Print the line."""
        now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
        print(f" [{now}] {console_line(metrics)}", flush=True)

    def log_eval(self, metrics: EvalMetrics) -> None:
        """Print the line between two rules."""
        line = evaluation_line(metrics)
        rule = "-" * (len(line) + 1)
        print(f"{rule}\n{line}\n{rule}", flush=True)

    def close(self) -> None:
        """Nothing to close."""


def console_line(metrics: StepMetrics) -> str:
    """The log line without its time stamp."""
    m = metrics
    parts = [
        f"iteration {m.iteration:8d}/{m.train_iters:8d}",
        f"consumed samples: {m.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {m.step_time_s * 1000:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {_short(m.tflops_per_rank)}",
        f"learning rate: {m.learning_rate:.6E}",
        f"global batch size: {m.global_batch_size:5d}",
        f"lm loss: {m.lm_loss:.6E}",
        f"loss scale: {m.loss_scale:.1f}",
    ]
    if m.grad_norm is not None:
        parts.append(f"grad norm: {m.grad_norm:.3f}")
    if m.num_zeros is not None:
        parts.append(f"num zeros: {m.num_zeros}")
    if m.params_norm is not None:
        parts.append(f"params norm: {m.params_norm:.3f}")
    parts += [f"{name.replace('_', ' ')}: {value:.6E}" for name, value in m.expert_balance.items() if "/" not in name]
    parts += [f"number of skipped iterations: {m.skipped:3d}", f"number of nan iterations: {m.nan:3d}"]
    parts.append(f"tokens/s: {m.tokens_per_s:.0f}")
    if m.mfu is not None:
        parts.append(f"MFU: {m.mfu:.1%}")
    parts.append(f"ETA: {format_duration(m.eta_s)}")
    return " | ".join(parts) + " |"


def evaluation_line(metrics: EvalMetrics) -> str:
    """Megatron's line for an evaluation."""
    where = "" if metrics.split == "validation" else f" on {metrics.split} set"
    return (
        f" validation loss at iteration {metrics.iteration}{where} | "
        f"lm loss value: {metrics.lm_loss:.6E} | lm loss PPL: {metrics.perplexity:.6E} | "
    )


def _short(value: float) -> str:
    """One decimal as in Megatron; more where that would only show 0."""
    return f"{value:.1f}" if value >= 10 else f"{value:.4f}"


class JsonlLogger:
    """metrics.jsonl: one JSON object per log line or evaluation, each on disk (fsync) before the run goes on.

    Opening cuts the file back to `resume_iteration` and removes a torn last line, so that the file then has no gap and no repeat.
    At a fresh start (0) an old file is renamed to `<name>.bak`. Floats are written at full precision; not finite ones as null.

    Raises ConfigError if the file is there and is not a metrics file.
    """

    def __init__(self, path: str | os.PathLike[str], resume_iteration: int = 0) -> None:
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = _metrics_lines(self.path)
        kept = [(line, record) for line, record in lines if record["iteration"] <= resume_iteration]
        if lines and not resume_iteration:
            os.replace(self.path, self.path.with_name(f"{self.path.name}.bak"))
        else:
            _rewrite(self.path, [line for line, _ in kept])
        self._evaluated = {
            (record["iteration"], record["split"]) for _, record in kept if record["iteration"] == resume_iteration and "split" in record
        }
        self._file = self.path.open("a", encoding="utf-8")

    def advance(self, iteration: int) -> None:
        """Only log lines are written."""

    def log_step(self, metrics: StepMetrics) -> None:
        """Append the line; `num_zeros`, `params_norm`, `param_group_norms` and the experts' balance are there when they are measured."""
        record = {name: getattr(metrics, name) for name in LOGGED_FIELDS}
        for name in ("num_zeros", "params_norm"):
            if getattr(metrics, name) is not None:
                record[name] = getattr(metrics, name)
        record |= metrics.expert_balance
        if metrics.group_norms:
            record["param_group_norms"] = {
                group: {name: _finite(norm) for name, norm in norms.items()} for group, norms in metrics.group_norms.items()
            }
        self._append(record)

    def log_eval(self, metrics: EvalMetrics) -> None:
        """Append the line. An evaluation that is repeated after a restart takes the place of the earlier one."""
        key = (metrics.iteration, metrics.split)
        if key in self._evaluated:
            self._forget(key)
        self._append(
            {
                "iteration": metrics.iteration,
                "split": metrics.split,
                "lm_loss": metrics.lm_loss,
                "perplexity": metrics.perplexity,
            }
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps({name: _finite(value) for name, value in record.items()}, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _forget(self, key: tuple[int, str]) -> None:
        self._evaluated.discard(key)
        self._file.close()
        others = [line for line, record in _metrics_lines(self.path) if (record["iteration"], record.get("split")) != key]
        _rewrite(self.path, others)
        self._file = self.path.open("a", encoding="utf-8")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _metrics_lines(path: pathlib.Path) -> list[tuple[str, dict[str, Any]]]:
    """(line, parsed) of a metrics file; [] if there is none. A torn last line is left out."""
    if not path.exists():
        return []
    found = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            int(record["iteration"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # a complete file ends with a newline, so its last piece is empty
                break
            raise ConfigError(
                f"{path}:{number}: not a line of a metrics file, which has an object with `iteration` on each line; "
                "choose another metrics_file or remove this one"
            ) from error
        found.append((line, record))
    return found


def _rewrite(path: pathlib.Path, lines: Sequence[str]) -> None:
    """Replace a file's content in one step; nothing is done where it is the same."""
    text = "".join(f"{line}\n" for line in lines)
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") == text:
        return
    durable.replace_file(path, text.encode(), uuid.uuid4().hex)


class TensorBoardLogger:
    """Scalars under Megatron's tags, over iterations and (tag + " vs samples") over consumed samples.

    Args:
        folder: the event files' folder. resume_iteration: events of later steps are removed.
        interval: steps between points; the last step of the run is always written.
        world_size: written as `world-size`.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, resume_iteration: int = 0, interval: int = 1, world_size: int = 1
    ) -> None:
        self.folder, self.interval, self.world_size = folder, interval, world_size
        self._resumed_at = resume_iteration
        cut_after(folder, resume_iteration)
        self._writer = EventWriter(folder)

    def advance(self, iteration: int) -> None:
        """Only log lines are written."""

    def log_step(self, metrics: StepMetrics) -> None:
        """Write the points of this step if it is due."""
        if metrics.iteration % self.interval and metrics.iteration != metrics.train_iters:
            return
        for tag, value in tensorboard_scalars(metrics, self.world_size).items():
            self._both(tag, value, metrics.iteration, metrics.consumed_samples)
        self._writer.scalar("throughput", metrics.tflops_per_rank, metrics.iteration)
        self._writer.flush()

    def log_eval(self, metrics: EvalMetrics) -> None:
        """Write loss and perplexity, unless a run that ended here wrote them already."""
        tag = f"lm loss {metrics.split}"
        if metrics.iteration == self._resumed_at and has_scalar(self.folder, tag, metrics.iteration):
            return
        self._both(tag, metrics.lm_loss, metrics.iteration, metrics.consumed_samples)
        self._both(f"{tag} ppl", metrics.perplexity, metrics.iteration, metrics.consumed_samples)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _both(self, tag: str, value: float, iteration: int, samples: int | None) -> None:
        self._writer.scalar(tag, value, iteration)
        if samples is not None:
            self._writer.scalar(tag + SAMPLES_SUFFIX, value, samples)


def tensorboard_scalars(metrics: StepMetrics, world_size: int) -> dict[str, float]:
    """Megatron's tags and their values; those that were not measured are left out."""
    scalars: dict[str, float | None] = {
        "learning-rate": metrics.learning_rate,
        "batch-size": metrics.global_batch_size,
        "lm loss": metrics.lm_loss,
        "loss-scale": metrics.loss_scale,
        "world-size": world_size,
        "grad-norm": metrics.grad_norm,
        "num-zeros": metrics.num_zeros,
        "params-norm": metrics.params_norm,
        "iteration-time": metrics.step_time_s,
    }
    scalars |= metrics.expert_balance
    for group, norms in metrics.group_norms.items():
        scalars |= {f"{tag}/{group}": norms.get(name) for name, tag in (("grad", "grad-norm"), ("param", "params-norm"))}
    return {tag: float(value) for tag, value in scalars.items() if value is not None}


class WandbLogger:
    """Weights & Biases under the tags of TensorBoard. A run keeps its id in its folder, so that a restart continues it.

    Raises ConfigError if the package is not installed.
    """

    def __init__(self, logging: LoggingConfig, folder: str | os.PathLike[str], *, world_size: int = 1) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "wandb_project is set but the package wandb is not installed; pip install 'megadlms[wandb]' or remove wandb_project"
            ) from error
        self.world_size = world_size
        place = pathlib.Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        remembered = place / "run_id.txt"
        run_id = remembered.read_text().strip() if remembered.exists() else None
        self._run: Any = wandb.init(
            project=logging.wandb_project,
            name=logging.wandb_exp_name,
            dir=str(place),
            mode=logging.wandb_mode,
            id=run_id,
            resume="allow",
        )
        remembered.write_text(f"{self._run.id}\n")

    def advance(self, iteration: int) -> None:
        """Only log lines are sent."""

    def log_step(self, metrics: StepMetrics) -> None:
        """Send the step's values."""
        values = tensorboard_scalars(metrics, self.world_size) | {"throughput": metrics.tflops_per_rank}
        values |= {"consumed-samples": metrics.consumed_samples, "consumed-tokens": metrics.consumed_tokens}
        self._run.log(values, step=metrics.iteration)

    def log_eval(self, metrics: EvalMetrics) -> None:
        """Send the evaluation's values."""
        tag = f"lm loss {metrics.split}"
        self._run.log({tag: metrics.lm_loss, f"{tag} ppl": metrics.perplexity}, step=metrics.iteration)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def build_loggers(config: RunConfig, rank: int, train_iters: int, resume_iteration: int, world_size: int = 1) -> RunLogger:
    """The loggers that the `logging` section asks for; ranks other than 0 get one that does nothing.

    Raises ConfigError for a missing package or a file that is not a metrics file.
    """
    if rank != 0:
        return CompositeLogger()
    logging, save = config.logging, config.checkpoint.save
    interval = logging.tensorboard_log_interval or logging.log_interval
    if logging.tensorboard_dir and interval % logging.log_interval:
        raise ConfigError(
            f"tensorboard_log_interval={interval} is not a multiple of log_interval={logging.log_interval}, "
            "whose means it shows; choose a multiple"
        )
    loggers: list[RunLogger] = [ConsoleLogger()]
    metrics_file = logging.metrics_file or (str(pathlib.Path(save) / "metrics.jsonl") if save else None)
    if metrics_file:
        loggers.append(JsonlLogger(metrics_file, resume_iteration))
    if logging.tensorboard_dir:
        loggers.append(
            TensorBoardLogger(
                logging.tensorboard_dir, resume_iteration=resume_iteration, interval=interval, world_size=world_size
            )
        )
    if logging.wandb_project:
        folder = logging.wandb_save_dir or str(pathlib.Path(save or ".") / "wandb")
        loggers.append(WandbLogger(logging, folder, world_size=world_size))
    if logging.progress_bar == "on" or (logging.progress_bar == "auto" and sys.stdout.isatty()):
        loggers.append(ProgressBar(train_iters, resume_iteration))
    return CompositeLogger(loggers)
