"""run_distributed: a function on N gloo ranks, in processes that are spawned once per world size and reused.

A failing rank's traceback becomes the test's failure; the pool is then thrown away, so that nothing leaks into the next test.
"""

import atexit
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

_POOLS: dict[int, "_Pool"] = {}


def run_distributed(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
    """Run `function(*args, **kwargs)` on `world_size` ranks with an initialised gloo group; returns each rank's result.

    function: defined at module level (it is pickled by name). Results must be picklable (tensors are).
    Raises AssertionError with every failed rank's traceback, or after `timeout` seconds without an answer.
    """
    pool = _POOLS.get(world_size)
    if pool is None:
        pool = _POOLS[world_size] = _Pool(world_size)
    try:
        return pool.run(function, args, kwargs, timeout)
    except BaseException:
        _POOLS.pop(world_size, None)
        pool.close()
        raise


class _Pool:
    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory(prefix="gloo-store-")
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            store = os.path.join(self.folder.name, "store")
            process = context.Process(target=_worker, args=(rank, world_size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any, timeout: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        deadline = time.monotonic() + timeout + (60.0 if not hasattr(self, "warm") else 0.0)
        results: list[Any] = [None] * len(self.pipes)
        failures = []
        for rank, pipe in enumerate(self.pipes):
            if failures:  # the others may wait for the failed rank for ever: give them a moment, then name them
                deadline = min(deadline, time.monotonic() + 5.0)
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                failures.append(f"rank {rank}: no answer in time")
                continue
            try:
                good, value = pipe.recv()
            except EOFError:
                failures.append(f"rank {rank}: process died, exit code {self.processes[rank].exitcode}")
                continue
            if good:
                results[rank] = value
            else:
                failures.append(f"rank {rank}:\n{value}")
        if failures:
            raise AssertionError("\n".join(failures))
        self.warm = True
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def _worker(rank: int, world_size: int, store: str, pipe: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["OMP_NUM_THREADS"] = "1"
    import datetime

    import torch
    import torch.distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            answer = (True, function(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        _reset()
        pipe.send(answer)


def _reset() -> None:
    """Forget what a test installed globally, so that the next one starts clean."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
    groups = sys.modules.get("megatron.core.process_groups_config")
    if groups is not None:
        groups.install(None)


@atexit.register
def _close_all() -> None:
    for pool in _POOLS.values():
        pool.close()
