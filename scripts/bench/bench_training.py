"""Training throughput of the product's Trainer against plain torch and DistributedDataParallel of the same model.

    python scripts/bench/bench_training.py [--dtype fp32 bf16] [--batch gb8 gb2] [--compile]     # one process, 2 threads
    torchrun --nproc-per-node 2 scripts/bench/bench_training.py [...]                            # ranks of 1 thread, one core each

The product runs its whole loop: samples from its data set, forward, backward, gradient buffers, norm and clip, AdamW, schedule,
counters. The yardsticks get the same samples ready-made, the same clip, torch's fused AdamW. Reference job R (see plain_gpt.py):
gb8 = global batch 8, micro batch 4; gb2 = global batch 2, micro batch 1. All contestants of a line run in one interleaved run; a turn
is some steps and ends when nothing is in flight. bf16: the product keeps fp32 main params and sums gradients in fp32; of the three
yardsticks, `main params` does the same by hand (the same training), `autocast` has fp32 weights, `weights` is all in bf16 (gradients
summed in bf16, 8 bytes of state per parameter instead of 16: less work and another, less precise training).
"""

import argparse
import contextlib
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.config import load_run_config
from megatron.training.initialize import create_groups, initialize_distributed, read_launch_environment, shut_down
from scripts.bench.common import Report, add_common_arguments, interleave, nothing, pin_rank, slowest_rank, speed_ratio
from scripts.bench.job_flags import ProductRun, run_flags
from scripts.bench.plain_gpt import TINY, Job, PlainGPT, adamw, load_weights

BATCHES = {"gb8": (8, 4), "gb2": (2, 1)}
ITERATIONS = 100_000
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather", "--overlap-param-gather-with-optimizer-step"]
COMPILED = ["--torch-compile", "--torch-compile-scope", "model", "--attention-backend", "unfused"]
# Product variants by number of ranks: name -> flags.
VARIANTS = {
    1: {"product": []},
    2: {
        "product distributed optimizer": ["--use-distributed-optimizer"],
        "product distributed optimizer, overlap": ["--use-distributed-optimizer", *OVERLAP],
        "product DDP engine": ["--overlap-grad-reduce"],
    },
}


class PlainRun:
    """The yardstick's training loop on fixed microbatches."""

    def __init__(self, model: torch.nn.Module, batches: list[dict[str, torch.Tensor]], clip: float, kind: str) -> None:
        self.model, self.batches, self.clip, self.autocast = model, batches, clip, kind == "bf16 autocast"
        self.params = list(model.parameters())
        self.main_params = [p.detach().float().requires_grad_() for p in self.params] if kind == "bf16 main params" else None
        self.trained = self.params if self.main_params is None else self.main_params
        self.optimizer = adamw(self.trained)

    def step(self) -> float:
        """One training step; this rank's mean loss."""
        total = torch.zeros(())
        for index, batch in enumerate(self.batches):
            last = index == len(self.batches) - 1
            wait = isinstance(self.model, DistributedDataParallel) and not last
            with self.model.no_sync() if wait else contextlib.nullcontext():
                with torch.autocast(batch["tokens"].device.type, torch.bfloat16, enabled=self.autocast):
                    loss = self.model(batch["tokens"], batch["labels"]) / len(self.batches)
                loss.backward()
            total += loss.detach().float().cpu()
            if self.main_params is not None and not wait:
                self._add_to_main_grads()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.trained, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.main_params is not None:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.main_params)
        return float(total)

    @torch.no_grad()
    def _add_to_main_grads(self) -> None:
        """Move the model's bf16 gradients into fp32 sums."""
        assert self.main_params is not None
        for param, main in zip(self.params, self.main_params, strict=True):
            assert param.grad is not None
            main.grad = param.grad.float() if main.grad is None else main.grad.add_(param.grad)
            param.grad = None

    def finish(self) -> None:
        """Nothing is in flight after a step."""


Run = ProductRun | PlainRun


def job_of(options: argparse.Namespace) -> Job:
    """R, or what was asked for instead."""
    return TINY if options.tiny else Job(layers=options.layers)


def build(options: argparse.Namespace, dtype: str, batch: str, groups: ProcessGroupCollection) -> dict[str, Run]:
    """All contestants of one line, with the same initial weights and samples."""
    job = job_of(options)
    global_batch, micro_batch = BATCHES[batch]
    flags = run_flags(
        job, micro_batch=micro_batch, global_batch=global_batch, iterations=ITERATIONS, clip_grad=options.clip_grad
    )
    flags += ["--ddp-bucket-size", str(options.bucket_size)]
    flags += ["--bf16"] * (dtype == "bf16") + COMPILED * options.compile
    runs: dict[str, Run] = {}
    for name, more in VARIANTS[min(2, groups.size("dp"))].items():
        runs[name] = ProductRun([*flags, *more], torch.device("cpu"), groups)
    first = next(run for run in runs.values() if isinstance(run, ProductRun))
    weights, samples = first.weights(), first.trainer.data.train_step(0)
    for kind in ["fp32"] if dtype == "fp32" else ["bf16 main params", "bf16 autocast", "bf16 weights"]:
        plain = PlainGPT(job, manual_attention=options.compile)
        load_weights(plain, weights)
        model: torch.nn.Module = plain.bfloat16() if kind in ("bf16 main params", "bf16 weights") else plain
        if groups.size("dp") > 1:
            model = DistributedDataParallel(model)
        model = torch.compile(model) if options.compile else model
        yardstick = ("DDP " if groups.size("dp") > 1 else "torch ") + kind
        runs[yardstick] = PlainRun(model, samples, options.clip_grad, kind)
    return runs


def check_same_model(runs: dict[str, Run], dtype: str) -> None:
    """The first two steps give every contestant the same losses, to rounding (the second step's samples differ)."""
    losses = {}
    for name, run in runs.items():
        loss = torch.tensor(run.step())
        if isinstance(run, PlainRun) and dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses[name] = float(loss)
        run.finish()
    allowed = 1e-4 if dtype == "fp32" else 2e-2
    low, high = min(losses.values()), max(losses.values())
    assert (high - low) / low < allowed, f"first losses differ, the models are not the same: {losses}"


def turn_of(run: Run, steps: int) -> Callable[[], None]:
    """What one turn does."""

    def turn() -> None:
        for _ in range(steps):
            run.step()
        run.finish()

    return turn


@contextlib.contextmanager
def timed_calls(owner: Any, name: str, into: list[float]) -> Iterator[None]:
    """Append the seconds of each call of `owner.name`."""
    original = getattr(owner, name)
    own = name in vars(owner)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            into.append(time.perf_counter() - begun)

    setattr(owner, name, timed)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def sections(run: ProductRun, steps: int) -> dict[str, list[float]]:
    """Seconds per step in forward, backward (with gradient hooks), optimizer, and the rest of the step."""
    parts: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": [], "rest": []}
    for _ in range(steps):
        calls: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
        with (
            timed_calls(run.trainer.model, "forward", calls["forward"]),
            timed_calls(torch.autograd, "backward", calls["backward"]),
            timed_calls(run.trainer.optimizer, "step", calls["optimizer"]),
        ):
            begun = time.perf_counter()
            run.step()
            total = time.perf_counter() - begun
        for name, values in calls.items():
            parts[name].append(sum(values))
        parts["rest"].append(total - sum(sum(values) for values in calls.values()))
    return parts


def report_line(
    report: Report, options: argparse.Namespace, dtype: str, batch: str, groups: ProcessGroupCollection
) -> None:
    """Measure all contestants in one dtype and batch size, and print ratios, tokens/s and the step's sections."""
    runs = build(options, dtype, batch, groups)
    check_same_model(runs, dtype)
    steps = options.steps or (1 if batch == "gb8" else 3)
    seconds = slowest_rank(
        interleave(
            {name: turn_of(run, steps) for name, run in runs.items()},
            options.pairs,
            align=dist.barrier if dist.is_initialized() else nothing,
        )
    )
    title = f"{dtype}{' compiled' if options.compile else ''} {batch}"
    job = job_of(options)
    tokens = steps * BATCHES[batch][0] * job.sequence
    rows = [[n, f"{tokens / statistics.median(s):.0f}", f"{statistics.median(s) / steps:.3f}"] for n, s in seconds.items()]
    report.table(f"{title}, {job.layers} layers, {groups.size('dp')} rank(s), {steps} step(s) per turn", ("contestant", "tokens/s", "s/step"), rows)
    target = ">= 0.98 (target 6)" if groups.size("dp") == 1 else ">= 0.98 (target 2: step <= 1.02x DDP)"
    for name, run in runs.items():
        if isinstance(run, ProductRun):
            for yardstick in (n for n, r in runs.items() if isinstance(r, PlainRun)):
                report.ratio(title, speed_ratio(seconds, name, yardstick), target)
            report_sections(report, f"{title} {name}", sections(run, max(3, options.pairs // 2)))


def report_sections(report: Report, title: str, parts: dict[str, list[float]]) -> None:
    """Shares of a step."""
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    shares = {n: statistics.median(v / t for v, t in zip(values, totals, strict=True)) for n, values in parts.items()}
    report.results.append({"title": f"{title}: sections", "shares": shares, "steps": len(totals)})
    text = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    report.say(f"{title}: shares of a step: {text} (median of {len(totals)} steps; target 6: rest < 2 % in one process)")


def start(options: argparse.Namespace) -> ProcessGroupCollection:
    """Threads and cores, then the process groups."""
    launch = read_launch_environment(os.environ)
    threads = options.threads or (1 if launch.world_size > 1 else min(2, os.cpu_count() or 1))
    torch.set_num_threads(threads)
    if launch.world_size > 1:
        pin_rank(launch.local_rank)
    flags = run_flags(TINY, micro_batch=1, global_batch=launch.world_size, iterations=1)
    config = load_run_config([*flags, "--distributed-backend", "gloo"]).config
    initialize_distributed(config.launch, launch)
    return create_groups(config.parallel, config.ddp, launch.world_size, config.launch)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--batch", nargs="+", choices=tuple(BATCHES), default=["gb8"])
    parser.add_argument("--steps", type=int, help="steps per turn (default 1 for gb8, 3 for gb2)")
    parser.add_argument("--threads", type=int, help="per process (default 2 for one process, 1 for several)")
    parser.add_argument("--clip-grad", type=float, default=1.0, help="of all contestants; 0 = none clips")
    parser.add_argument("--bucket-size", type=int, default=6_553_600, help="elements; the default is DDP's 25 MiB of fp32")
    parser.add_argument("--compile", action="store_true", help="torch.compile on all contestants, all with manual attention")
    parser.add_argument("--layers", type=int, default=Job.layers, help="fewer than R's for a slow machine")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    add_common_arguments(parser, pairs=6)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    options = parse(argv)
    groups = start(options)
    report = Report(options.json, speaks=groups.rank("dp") == 0)
    for dtype in options.dtype:
        for batch in options.batch:
            report_line(report, options, dtype, batch, groups)
    report.close()
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1:])
