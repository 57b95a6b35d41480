"""Pipeline schedules against each other on one compute-bound job, and each one's bubble against the schedule's own figure.

    torchrun --nproc-per-node 2 scripts/bench/bench_pipeline.py [--microbatches 8] [--pairs 7]

Every schedule is a run of the product (the trainer's whole step) with the same model, samples and optimizer; all are built in the
same processes, one core each, and take turns. Ratios are of whole steps. A rank's bubble is the share of forward and backward in
which it computes nothing: 1 - (sum of its F, B and W) / (from the first action of any rank to the last). The schedule's own figure
is `time_plan` with each kind's measured mean time and no latency, so what is above it is communication and unevenness.
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

from megatron.core.pipeline_parallel.schedule_plan import Kind, build_plan, time_plan
from megatron.training.config import load_run_config
from megatron.training.initialize import create_groups, initialize_distributed, read_launch_environment, shut_down
from scripts.bench.common import Report, add_common_arguments, interleave, pin_rank, slowest_rank, speed_ratio
from scripts.bench.job_flags import ProductRun, run_flags
from scripts.bench.plain_gpt import TINY, Job

SCHEDULES: dict[str, list[str]] = {
    "1f1b": [],
    "interleaved": ["--virtual-pipeline-model-parallel-size", "2"],
    "zb_h1": ["--pipeline-schedule", "zb_h1"],
    "zb_v": ["--pipeline-schedule", "zb_v"],
}
COMPUTE_BOUND = Job(hidden=384, layers=8, heads=6, ffn=1024, vocab=512, sequence=256)


@dataclasses.dataclass
class Clock:
    """Times each action of a run's executor, and when forward and backward begin and end. Seconds."""

    actions: list[tuple[Kind, float]] = dataclasses.field(default_factory=list)
    begun: float = 0.0
    ended: float = 0.0

    def attach(self, trainer: Any) -> None:
        """Listen to a trainer's steps."""
        work = trainer.forward_backward
        whole = work.train

        def train(*arguments: Any) -> Any:
            self.actions, self.begun = [], time.time()
            result = whole(*arguments)
            self.ended = time.time()
            return result

        work.train, work._timed_action = train, self.action

    @contextlib.contextmanager
    def action(self, kind: Kind) -> Iterator[None]:
        """Around the computation of an action."""
        begun = time.perf_counter()
        yield
        self.actions.append((kind, time.perf_counter() - begun))


@dataclasses.dataclass(frozen=True)
class Bubble:
    """Of one step over all ranks: idle share measured, and what the schedule has with the same costs."""

    measured: float
    own: float
    costs: dict[str, float]


def bubble_of(clock: Clock, schedule: str, chunks: int, microbatches: int) -> Bubble:
    """Of the last step; a collective of all ranks, which share a clock because they share a machine."""
    kinds = list(Kind)
    sums = torch.tensor(
        [[sum(t for k, t in clock.actions if k is kind), sum(k is kind for k, _ in clock.actions)] for kind in kinds], dtype=torch.float64
    )
    span = torch.tensor([-clock.begun, clock.ended], dtype=torch.float64)
    dist.all_reduce(sums)
    dist.all_reduce(span, op=dist.ReduceOp.MAX)
    total = float(span.sum())
    ranks = dist.get_world_size()
    costs = {kind: float(row[0] / row[1].clamp(min=1)) for kind, row in zip(kinds, sums, strict=True)}
    plan = build_plan(schedule if schedule.startswith("zb") else "1f1b", ranks, chunks, microbatches)
    timing = time_plan(plan, costs)
    return Bubble(1.0 - float(sums[:, 0].sum()) / (ranks * total), timing.bubble, {k.value: c for k, c in costs.items()})


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--microbatches", type=int, default=8, help="per step (default 8)")
    parser.add_argument("--micro-batch", type=int, default=2, help="samples of a microbatch (default 2)")
    parser.add_argument("--schedules", nargs="+", choices=tuple(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    add_common_arguments(parser, pairs=7)
    return parser.parse_args(argv)


def build(options: argparse.Namespace, schedule: str, device: torch.device) -> tuple[ProductRun, Clock]:
    """A run of one schedule, and its clock."""
    stages = dist.get_world_size()
    job = dataclasses.replace(TINY, layers=2 * stages) if options.tiny else COMPUTE_BOUND
    steps = options.pairs + 4
    flags = run_flags(
        job, micro_batch=options.micro_batch, global_batch=options.micro_batch * options.microbatches, iterations=steps
    )
    flags += ["--pipeline-model-parallel-size", str(stages), *SCHEDULES[schedule]]
    config = load_run_config(flags).config
    run = ProductRun(flags, device, create_groups(config.parallel, config.ddp, stages))
    for chunk in run.trainer.model_chunks:
        chunk.train()
    clock = Clock()
    clock.attach(run.trainer)
    return run, clock


def measure(options: argparse.Namespace, report: Report, device: torch.device) -> None:
    """All schedules, in turns."""
    runs = {name: build(options, name, device) for name in options.schedules}
    bubbles: dict[str, list[Bubble]] = {name: [] for name in runs}
    losses: dict[str, list[float]] = {name: [] for name in runs}

    def step(name: str) -> None:
        losses[name].append(runs[name][0].step())

    contestants = {name: (lambda name=name: step(name)) for name in runs}
    turns: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.pairs + 1):  # one turn at a time, so that the bubbles are read outside the timed steps
        for name, seconds in interleave(contestants, 1, warmup=0, align=dist.barrier).items():
            turns[name] += seconds
        for name, (run, clock) in runs.items():
            bubbles[name].append(bubble_of(clock, name, len(run.trainer.model_chunks), options.microbatches))
    seconds = slowest_rank({name: values[1:] for name, values in turns.items()})
    first = next(iter(losses.values()))
    assert all(abs(a - b) <= 1e-4 * abs(a) for values in losses.values() for a, b in zip(first, values, strict=True)), losses
    rows = []
    for name, values in seconds.items():
        of = bubbles[name][1:]
        own, measured = statistics.median(b.own for b in of), statistics.median(b.measured for b in of)
        costs = ", ".join(f"{kind} {1e3 * statistics.median(b.costs[kind] for b in of):.1f}" for kind in ("F", "B", "W") if of[0].costs[kind])
        rows.append([name, f"{statistics.median(values):.3f}", f"{min(values):.3f}-{max(values):.3f}", f"{measured:.1%}", f"{own:.1%}", costs])
    title = f"{dist.get_world_size()} stages, {options.microbatches} microbatches of {options.micro_batch}"
    report.table(title, ("schedule", "s/step", "range", "bubble measured", "schedule's own", "ms per action"), rows)
    for name in seconds:
        if name != "1f1b" and "1f1b" in seconds:
            report.ratio(title, speed_ratio(seconds, name, "1f1b"), "> 1")


def main(argv: Sequence[str]) -> int:
    """Measure and print; needs torchrun."""
    options = parse(argv)
    launch = read_launch_environment(os.environ)
    if launch.world_size < 2:
        print("error: a pipeline needs ranks: torchrun --nproc-per-node 2 scripts/bench/bench_pipeline.py", file=sys.stderr)
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
