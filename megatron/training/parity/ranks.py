"""Starts the ranks of a run on this machine, and records what they compute."""

import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.model_state import model_sharded_tensors
from megatron.core.errors import ConfigError, MegatronError
from megatron.training.config import RunConfig
from megatron.training.initialize import LaunchInfo, create_groups, initialize_distributed
from megatron.training.objectives import OBJECTIVES
from megatron.training.parity.recorder import Recorder
from megatron.training.parity.records import RankStep, write_step
from megatron.training.parity.reduce_config import Run
from megatron.training.trainer import Trainer

Start = dict[str, torch.Tensor]
_SAID = "error: "


@dataclasses.dataclass(frozen=True)
class Job:
    """What every rank of a run does: the run in each precision, records into `folder`/precision; `start`: file of weights to begin with."""

    run: Run
    precisions: tuple[str, ...]
    folder: str
    start: str | None = None
    activations: bool = True


def record(
    config: RunConfig,
    device: torch.device,
    sink: Callable[[RankStep], None],
    *,
    start: Start | None = None,
    activations: bool = True,
    prepare: Callable[[Trainer], None] | None = None,
) -> None:
    """Train on this rank of the initialised group (or alone), giving `sink` each step.

    start: logical weights to begin with. prepare: called with the trainer before it starts.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    recorder = Recorder(OBJECTIVES[config.objective.objective](), sink, activations)
    groups = create_groups(config.parallel, config.ddp, world)
    trainer = Trainer(config, device=device, groups=groups, callbacks=[recorder], objective=recorder.objective)
    if start is not None:
        load_start(trainer, start)
    if prepare is not None:
        prepare(trainer)
    trainer.fit()


@torch.no_grad()
def load_start(trainer: Trainer, start: Start) -> None:
    """Put whole logical weights into this rank's parts. Raises ConfigError where the model has others."""
    for chunk in trainer.model_chunks:
        for tensor in model_sharded_tensors(chunk.module, trainer.groups).values():
            name = tensor.name.removeprefix("model.")
            if name not in start or tuple(start[name].shape) != tensor.global_shape:
                theirs = list(start[name].shape) if name in start else "not there"
                raise ConfigError(f"the two configurations are different models: {name} is {list(tensor.global_shape)} in B, {theirs} in A")
            for piece in tensor.pieces:
                piece.shaped().copy_(start[name][piece.box.slices()])
    trainer.optimizer.reload_model_params()


def run_ranks(job: Job, timeout_s: float, store: pathlib.Path) -> None:
    """Run the job in processes of its own. Raises ConfigError as a rank does; MegatronError for any other end, with its last words."""
    context = multiprocessing.get_context("spawn")
    ranks, log = job.run.ranks, store.with_suffix(".log")
    processes = [context.Process(target=_rank, args=(job, rank, str(store), f"{log}{rank}"), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    try:
        running = list(range(ranks))
        while running:
            ready = wait([processes[rank].sentinel for rank in running], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise MegatronError(f"no end after {timeout_s:g} s; give --timeout, or look for a rank that waits for another")
            ended = [rank for rank in running if processes[rank].sentinel in ready]
            running = [rank for rank in running if rank not in ended]
            for rank in ended:
                processes[rank].join()
                if processes[rank].exitcode:
                    raise _failure(rank, processes[rank].exitcode, pathlib.Path(f"{log}{rank}"))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _failure(rank: int, code: int | None, log: pathlib.Path) -> MegatronError:
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    if code == ConfigError.exit_code and _SAID in text:
        return ConfigError(text.rpartition(_SAID)[2].strip())
    return MegatronError("\n".join([f"rank {rank} ended with exit code {code}:", *text.strip().splitlines()[-25:]]))


def _rank(job: Job, rank: int, store: str, log: str) -> None:
    """The life of a rank's process."""
    with open(log, "w", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            _record_all(job, rank, store)
        except MegatronError as error:
            print(f"{_SAID}{error}", file=file, flush=True)
            os._exit(error.exit_code)
        except BaseException:
            traceback.print_exc(file=file)
            file.flush()
            os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # without waiting for the threads of process groups that others have left


def _record_all(job: Job, rank: int, store: str) -> None:
    world = job.run.ranks
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    device = initialize_distributed(job.run.config.launch, LaunchInfo(rank=rank, world_size=world, local_rank=rank))
    start = None if job.start is None else torch.load(job.start, weights_only=True)
    for precision in job.precisions:
        folder = pathlib.Path(job.folder) / precision
        sink = _sink(folder, rank)
        record(job.run.in_precision(precision), device, sink, start=start, activations=job.activations)
    if world > 1:
        dist.barrier()


def _sink(folder: pathlib.Path, rank: int) -> Callable[[RankStep], None]:
    def write(step: RankStep) -> None:
        write_step(folder, rank, step)

    return write


def save_start(tensors: Start, path: pathlib.Path) -> None:
    """Write logical weights for `Job.start`."""
    torch.save(tensors, path)


