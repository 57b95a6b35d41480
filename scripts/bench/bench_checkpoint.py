"""Save and load speed of CheckpointStore against torch.distributed.checkpoint and torch.save: the same tensors, disk synced.

    python scripts/bench/bench_checkpoint.py [--megabytes 400] [--pairs 5] [--folder DIR]
    torchrun --nproc-per-node 2 scripts/bench/bench_checkpoint.py     # every rank its own tensors

Each round runs all candidates one after the other in a new order, so that they see the same machine. Prints median MB/s with its
range, and the ratios to DCP taken round by round.
"""

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed
import torch.distributed.checkpoint as dcp

from megatron.core.dist_checkpointing.mapping import whole
from megatron.core.dist_checkpointing.store import CheckpointStore


def make_state(megabytes: int, rank: int) -> dict[str, torch.Tensor]:
    """fp32 matrices of 4 MB and some vectors, names with the rank in them."""
    count = max(1, megabytes // 4)
    state = {f"rank{rank}.layer{i}.weight": torch.randn(1024, 1024) for i in range(count)}
    return state | {f"rank{rank}.layer{i}.bias": torch.randn(1024) for i in range(count)}


def candidates(state: dict[str, torch.Tensor], folder: Path, rank: int) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """name -> (save, load); load writes into the memory of `state`."""
    sharded = [whole(name, tensor) for name, tensor in state.items()]
    file = folder / f"plain{rank}.pt"

    def store_save() -> None:
        CheckpointStore(folder / "store").save(1, sharded, {})

    def store_load() -> None:
        CheckpointStore(folder / "store").load(1, sharded)

    def dcp_save() -> None:
        dcp.save(state, checkpoint_id=folder / "dcp")

    def dcp_load() -> None:
        dcp.load(state, checkpoint_id=folder / "dcp")

    def plain_save() -> None:
        with open(file, "wb") as handle:
            torch.save(state, handle)
            handle.flush()
            os.fsync(handle.fileno())

    def plain_load() -> None:
        for name, tensor in torch.load(file, weights_only=True).items():
            state[name].copy_(tensor)

    return {"store": (store_save, store_load), "dcp": (dcp_save, dcp_load), "torch.save": (plain_save, plain_load)}


def timed(work: Callable[[], None]) -> float:
    """Seconds of `work` on the slowest rank."""
    barrier()
    begun = time.perf_counter()
    work()
    barrier()
    return time.perf_counter() - begun


def barrier() -> None:
    """All ranks."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400, help="tensor data per rank")
    parser.add_argument("--pairs", type=int, default=5, help="rounds")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    rank, size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if "RANK" in os.environ else (0, 1)
    names = [tempfile.mkdtemp(prefix="bench-checkpoint-", dir=options.folder) if rank == 0 else ""]
    if size > 1:
        torch.distributed.broadcast_object_list(names)
    folder = Path(names[0])
    try:
        report(measure(options, folder, rank), options.megabytes * size, rank)
    finally:
        barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def measure(options: argparse.Namespace, folder: Path, rank: int) -> dict[tuple[str, str], list[float]]:
    """(candidate, save or load) -> seconds of each round; one round before is not counted."""
    runs = candidates(make_state(options.megabytes, rank), folder, rank)
    seconds: dict[tuple[str, str], list[float]] = {(name, phase): [] for name in runs for phase in ("save", "load")}
    order = random.Random(1)
    for round_number in range(options.pairs + 1):
        for name in order.sample(list(runs), len(runs)):
            for phase, work in zip(("save", "load"), runs[name], strict=True):
                elapsed = timed(work)
                if round_number:
                    seconds[name, phase].append(elapsed)
    return seconds


def report(seconds: dict[tuple[str, str], list[float]], megabytes: int, rank: int) -> None:
    """Speeds, and ratios to DCP."""
    if rank:
        return
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, {megabytes} MB, {len(seconds['dcp', 'save'])} rounds")
    for (name, phase), values in seconds.items():
        speeds = sorted(megabytes / value for value in values)
        text = f"{phase} {name:10s} {statistics.median(speeds):7.0f} MB/s ({speeds[0]:.0f} to {speeds[-1]:.0f})"
        if name == "store":
            ratios = sorted(d / s for d, s in zip(seconds["dcp", phase], values, strict=True))
            text += f"   {statistics.median(ratios):.2f}x DCP ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(text)


if __name__ == "__main__":
    main()
