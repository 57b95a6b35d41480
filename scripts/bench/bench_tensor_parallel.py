"""Tensor parallelism's communication in a step: what is sent, how long the ranks wait for it, and what hides under products.

    torchrun --nproc-per-node 2 scripts/bench/bench_tensor_parallel.py [--pairs 7]

Runs of the product on one model and the same samples, in the same processes, one core each, in turns: tensor parallel, the same
with sequence parallelism, and data parallel for comparison. `exposed` is the time that the training thread waits inside tensor
parallelism's collectives; `in flight` is the time between their start and their end as the thread sees it. The difference is
hidden under matrix products. Bytes are those that a rank hands to the collectives.
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from megatron.core import collectives
from megatron.core.tensor_parallel import layers, mappings
from megatron.training.config import load_run_config
from megatron.training.initialize import create_groups, initialize_distributed, read_launch_environment, shut_down
from scripts.bench.common import Report, add_common_arguments, interleave, pin_rank, slowest_rank, speed_ratio
from scripts.bench.job_flags import ProductRun, run_flags
from scripts.bench.plain_gpt import TINY, Job

LAYOUTS: dict[str, list[str]] = {
    "tensor": ["--tensor-model-parallel-size", "{ranks}"],
    "tensor and sequence": ["--tensor-model-parallel-size", "{ranks}", "--sequence-parallel"],
    "data": ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
}
_STARTS = ("start_all_reduce", "start_gather_sequence", "start_reduce_scatter_sequence")
JOB = Job(hidden=512, layers=8, heads=8, ffn=1408, vocab=1024, sequence=256)


@dataclasses.dataclass
class Waits:
    """Of the steps since `clear`: seconds waited and in flight, bytes handed over, collectives."""

    exposed: float = 0.0
    in_flight: float = 0.0
    sent: int = 0
    count: int = 0

    def clear(self) -> None:
        """Begin anew."""
        self.exposed, self.in_flight, self.sent, self.count = 0.0, 0.0, 0, 0


@contextlib.contextmanager
def watched(waits: Waits) -> Iterator[None]:
    """Within, tensor parallelism's collectives are timed where they are started and waited for."""
    begun: dict[int, float] = {}
    kept = {module: {name: getattr(module, name) for name in (*_STARTS, "finished") if hasattr(module, name)} for module in (mappings, layers)}

    def starting(start: Any) -> Any:
        def timed(tensor: torch.Tensor, group: Any) -> Any:
            if collectives.group_size(group) == 1:
                return start(tensor, group)
            now = time.perf_counter()
            started = start(tensor, group)
            waits.exposed += time.perf_counter() - now  # a backend that computes in the call
            if started[1] is not None:
                begun[id(started[1])] = now
            waits.sent, waits.count = waits.sent + tensor.nbytes, waits.count + 1
            return started

        return timed

    def finishing(finish: Any) -> Any:
        def timed(started: Any) -> Any:
            now = time.perf_counter()
            result = finish(started)
            done = time.perf_counter()
            first = begun.pop(id(started[1]), None)
            if first is not None:
                waits.exposed, waits.in_flight = waits.exposed + done - now, waits.in_flight + done - first
            return result

        return timed

    for module, functions in kept.items():
        for name, function in functions.items():
            setattr(module, name, finishing(function) if name == "finished" else starting(function))
    try:
        yield
    finally:
        for module, functions in kept.items():
            for name, function in functions.items():
                setattr(module, name, function)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--global-batch", type=int, default=8, help="samples per step (default 8)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    add_common_arguments(parser, pairs=7)
    return parser.parse_args(argv)


def build(options: argparse.Namespace, layout: str, device: torch.device) -> ProductRun:
    """A run of one layout: the same samples per step in each."""
    ranks = dist.get_world_size()
    micro = max(1, options.global_batch // (2 * ranks))
    flags = run_flags(TINY if options.tiny else JOB, micro_batch=micro, global_batch=options.global_batch, iterations=options.pairs + 4)
    flags += [word.format(ranks=ranks) for word in LAYOUTS[layout]]
    config = load_run_config(flags).config
    return ProductRun(flags, device, create_groups(config.parallel, config.ddp, ranks))


def measure(options: argparse.Namespace, report: Report, device: torch.device) -> None:
    """All layouts, in turns."""
    runs = {name: build(options, name, device) for name in LAYOUTS}
    waits, seen, losses = Waits(), {name: [] for name in runs}, {name: [] for name in runs}  # type: Waits, dict[str, list[Waits]], dict[str, list[float]]

    def step(name: str) -> None:
        waits.clear()
        losses[name].append(runs[name].step())
        runs[name].finish()
        seen[name].append(dataclasses.replace(waits))

    with watched(waits):
        contestants = {name: (lambda name=name: step(name)) for name in runs}
        seconds = slowest_rank(interleave(contestants, options.pairs, warmup=1, align=dist.barrier))
    first = losses["tensor"]
    assert all(abs(a - b) <= 1e-4 * abs(a) for values in losses.values() for a, b in zip(first, values, strict=True)), losses
    rows = []
    for name, values in seconds.items():
        of, median = seen[name][1:], statistics.median(values)
        exposed, flight = (statistics.median(getattr(w, field) for w in of) for field in ("exposed", "in_flight"))
        rows.append([
            name, f"{median:.3f}", f"{min(values):.3f}-{max(values):.3f}", str(of[0].count), f"{of[0].sent / 1e6:.1f}",
            f"{1e3 * flight:.1f}", f"{1e3 * exposed:.1f}", f"{exposed / median:.1%}",
        ])  # fmt: skip
    title = f"{dist.get_world_size()} ranks, global batch {options.global_batch}"
    header = ("layout", "s/step", "range", "collectives", "MB handed over", "in flight, ms", "exposed, ms", "of the step")
    report.table(title, header, rows)
    for name in ("tensor", "tensor and sequence"):
        report.ratio(title, speed_ratio(seconds, name, "data"))


def main(argv: Sequence[str]) -> int:
    """Measure and print; needs torchrun."""
    options = parse(argv)
    launch = read_launch_environment(os.environ)
    if launch.world_size < 2:
        print("error: start with torchrun --nproc-per-node 2 scripts/bench/bench_tensor_parallel.py", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    pin_rank(launch.local_rank)
    device = initialize_distributed(load_run_config(run_flags(TINY, micro_batch=1, global_batch=1, iterations=1)).config.launch, launch)
    report = Report(options.json, speaks=launch.rank == 0)
    measure(options, report, device)
    report.close()
    shut_down()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
