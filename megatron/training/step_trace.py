"""StepTrace: the callback behind `trace_overlap`. It records one step on every rank; rank 0 writes the merged file."""

import contextlib
import json
import pathlib
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.core import collectives
from megatron.core.dist_checkpointing import durable
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.overlap_trace import OverlapTrace, chrome_trace, clock_reference, compute_units
from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.agreement import own_rank, print_rank_0
from megatron.training.metrics import EvalMetrics, StepResult

_DEFAULT_STEP = 3  # counted from the start of the process: the first steps allocate memory and warm up


class StepTrace:
    """Traces one step of a run. Must be the first of the callbacks, so that its step is the one whose waits are logged.

    Args:
        file: what rank 0 writes.
        step: iteration; None = the third after the start, or the last if there are fewer.

    Raises ConfigError on rank 0 if the file cannot be written.
    """

    def __init__(self, file: str, step: int | None) -> None:
        self.path, self._given = pathlib.Path(file), step
        self.step = step or 0
        self._first = 0
        self._trace: OverlapTrace | None = None
        self._written = False
        if own_rank() == 0:
            _check_writable(self.path)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What the training loop does within."""
        with contextlib.nullcontext() if self._trace is None else self._trace.phase(name):
            yield

    def on_train_start(self, trainer: Any) -> None:
        """Choose the step."""
        self._first = trainer.state.iteration + 1
        self.step = self._given or min(trainer.state.iteration + _DEFAULT_STEP, trainer.plan.train_iters)
        self._prepare(trainer)

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        """Begin before the step, end after it."""
        if self._trace is not None and trainer.state.iteration == self.step:
            self._finish(trainer, self._trace)
            self._trace = None
        else:
            self._prepare(trainer)

    def on_eval_end(self, trainer: Any, metrics: EvalMetrics) -> None:
        """Nothing."""

    def on_save(self, trainer: Any, iteration: int) -> None:
        """Nothing."""

    def on_train_end(self, trainer: Any) -> None:
        """Say so if the step was not reached."""
        if self._written:
            return
        ran = f"iterations {self._first} to {trainer.state.iteration}"
        if trainer.state.iteration < self._first:
            ran = "no iteration"
        print_rank_0(f"warning: trace_overlap: step {self.step} was not traced, this run had {ran}; {self.path} was not written")

    def _prepare(self, trainer: Any) -> None:
        done = trainer.state.iteration
        if done not in (self.step - 2, self.step - 1):
            return
        if self._trace is None:
            self._trace = _listener(trainer.model_chunks)
        if done == self.step - 1:
            self._trace.begin()
        else:
            self._trace.watch()

    def _finish(self, trainer: Any, trace: OverlapTrace) -> None:
        trace.end()
        groups: ProcessGroupCollection = trainer.groups
        reference, uncertainty = clock_reference(groups.world, trainer.device)
        records = collectives.gather_objects(trace.record(own_rank(), _label(groups), reference), groups.world)
        self._written = True
        if own_rank() != 0:
            return
        merged = chrome_trace(records, iteration=self.step, clock_uncertainty=uncertainty, device=trainer.device.type)
        try:
            durable.replace_file(self.path, json.dumps(merged).encode(), uuid.uuid4().hex)
        except OSError as error:  # a diagnosis must not end the run
            print_rank_0(f"warning: trace_overlap: {self.path} could not be written: {durable.explain(error)}")
        else:
            print_rank_0(f"wrote the trace of iteration {self.step} to {self.path}")


def _listener(chunks: Sequence[DistributedDataParallel]) -> OverlapTrace:
    units: dict[str, torch.nn.Module] = {}
    for index, chunk in enumerate(chunks):
        prefix = f"chunk {index} " if len(chunks) > 1 else ""
        units |= {prefix + name: unit for name, unit in compute_units(chunk.module).items()}
    return OverlapTrace([group for chunk in chunks for group in chunk.bucket_groups], units)


def _label(groups: ProcessGroupCollection) -> str:
    """`rank 3 (dp 1, tp 1)`: axes of more than one rank."""
    axes = [f"{axis} {groups.rank(axis)}" for axis in ("dp", "cp", "tp", "pp") if groups.size(axis) > 1]
    return f"rank {own_rank()}" + (f" ({', '.join(axes)})" if axes else "")


def _check_writable(path: pathlib.Path) -> None:
    """Make the folder and a file in it, which is removed again."""
    probe = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory", str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write_file(probe, b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"trace_overlap={path} cannot be written: {durable.explain(error)}; give a file in a folder that rank 0 can write to"
        ) from error
