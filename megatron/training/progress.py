"""ProgressBar: one live line with rate and ETA under the log, on a terminal only."""

import sys
from typing import IO

from megatron.training.metrics import EvalMetrics, StepMetrics


class ProgressBar:
    """A logger that draws a bar with `rich`; text printed meanwhile scrolls above it.

    train_iters, iteration: last step of the run and steps already done. stream: where it is drawn (default: stdout).
    """

    def __init__(self, train_iters: int, iteration: int, stream: IO[str] | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}"),
            console=Console(file=stream or sys.stdout, force_terminal=True, soft_wrap=True),
            redirect_stderr=stream is None,
            redirect_stdout=stream is None,
        )
        self._task = self._progress.add_task("train", total=train_iters, completed=iteration, loss="", rate="", eta="")
        self._progress.start()

    def advance(self, iteration: int) -> None:
        """A step is done; the bar moves, its figures stay."""
        self._progress.update(self._task, completed=iteration)

    def log_step(self, metrics: StepMetrics) -> None:
        """New figures."""
        self._progress.update(
            self._task,
            completed=metrics.iteration,
            loss=f"loss {metrics.lm_loss:.4f}",
            rate=f"{metrics.tokens_per_s:,.0f} tokens/s",
            eta=f"ETA {format_duration(metrics.eta_s)}",
        )

    def log_eval(self, metrics: EvalMetrics) -> None:
        """Nothing to draw: the log line above the bar has it."""

    def close(self) -> None:
        """Leave the finished bar on the screen and give stdout back."""
        self._progress.stop()


def format_duration(seconds: float) -> str:
    """`h:mm:ss`, with days in front when there are any: 83.4 -> 0:01:23."""
    total = round(seconds)
    days, rest = divmod(total, 86400)
    text = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}d {text}" if days else text
