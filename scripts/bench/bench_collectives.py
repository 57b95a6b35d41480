"""The product's collectives on CPU against gloo's own of the same name, in one interleaved run.

    torchrun --nproc-per-node 2 scripts/bench/bench_collectives.py [--size 64K 1M 64M] [--dtype fp32 bf16] [--json F]
    torchrun --nproc-per-node 4 scripts/bench/bench_collectives.py

A size is what a rank holds of the whole tensor, in bytes. The product's sums are formed in rank order, of bf16 in fp32; gloo's order
depends on its algorithm, and it rounds each bf16 partial sum. `all_reduce` is the ordered one of the gradient buffers. Every rank
checks the product's results first. A turn is some calls in a row; all ranks start it together, its time is the slowest rank's. With
both dtypes, a second run compares bf16 with fp32 reduce-scatter of equally many elements.
"""

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from megatron.core import collectives
from scripts.bench.common import Report, Seconds, add_common_arguments, interleave, speed_ratio

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = ("64K", "256K", "1M", "4M", "16M", "64M")
UNITS = {"K": 1 << 10, "M": 1 << 20}
OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce")
PRODUCT, GLOO = "product", "gloo"
# Targets: time ratio to gloo at 64 MiB fp32; below 16 MiB never slower.
LARGE = {"reduce_scatter": 0.40, "all_gather": 0.35}
BYTES_PER_TURN = 16 << 20

gloo_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
gloo_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


@dataclasses.dataclass(frozen=True)
class Tensors:
    """What the contestants of one line work on: whole [n], this rank's shard [n / ranks]."""

    whole: torch.Tensor
    shard: torch.Tensor
    staging: collectives.Staging

    @classmethod
    def of(cls, nbytes: int, dtype: torch.dtype) -> "Tensors":
        """Zeros: in-place sums stay finite over any number of calls."""
        size = dist.get_world_size()
        numel = max(1, nbytes // dtype.itemsize // size) * size
        return cls(torch.zeros(numel, dtype=dtype), torch.zeros(numel // size, dtype=dtype), collectives.Staging())


def world() -> dist.ProcessGroup:
    """All ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def product(operation: str, data: Tensors) -> Callable[[], object]:
    """One call of the product's."""
    calls = {
        "reduce_scatter": lambda: collectives.reduce_scatter(data.shard, data.whole, world(), staging=data.staging),
        "all_gather": lambda: collectives.all_gather(
            data.whole, data.whole.view(dist.get_world_size(), -1)[dist.get_rank()], world()
        ),
        "all_reduce": lambda: collectives.all_reduce(data.whole, world(), rank_order=True, staging=data.staging),
    }
    return calls[operation]


def gloo(operation: str, data: Tensors) -> Callable[[], object]:
    """One call of torch's, on the gloo backend."""
    calls = {
        "reduce_scatter": lambda: gloo_reduce_scatter(data.shard, data.whole),
        "all_gather": lambda: gloo_all_gather(data.whole, data.whole.view(dist.get_world_size(), -1)[dist.get_rank()]),
        "all_reduce": lambda: dist.all_reduce(data.whole),
    }
    return calls[operation]


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    """A turn: several calls, so that a small collective is not below the clock's noise."""

    def turn() -> None:
        for _ in range(times):
            call()

    return turn


def check_results(dtype: torch.dtype) -> None:
    """Small whole numbers, whose sums are exact in both dtypes."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for numel in (3, 1 << 19):
        data, shard = torch.full((size * numel,), rank + 1, dtype=dtype), torch.empty(numel, dtype=dtype)
        collectives.reduce_scatter(shard, data, world())
        total = size * (size + 1) // 2
        assert torch.equal(shard, torch.full_like(shard, total))
        gathered = torch.empty_like(data)
        collectives.all_gather(gathered, shard, world())
        collectives.all_reduce(data, world(), rank_order=True)
        assert torch.equal(gathered, torch.full_like(data, total))
        assert torch.equal(data, gathered)


def slowest_rank(seconds: Seconds) -> Seconds:
    """Per turn, the time of the slowest rank."""
    values = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(seconds, values.tolist(), strict=True))


def measure(contestants: dict[str, Callable[[], object]], nbytes: int, options: argparse.Namespace) -> tuple[Seconds, int]:
    """(seconds of each contestant's turns, calls in a turn)."""
    times = options.calls or max(1, min(20, BYTES_PER_TURN // nbytes))
    turns = {name: repeated(call, times) for name, call in contestants.items()}
    return slowest_rank(interleave(turns, options.pairs, warmup=2, align=dist.barrier)), times


def target_of(operation: str, nbytes: int, dtype: str) -> str:
    """The target on the time ratio, where there is one."""
    if nbytes == 64 << 20 and dtype == "fp32" and dist.get_world_size() == 2 and operation in LARGE:
        return f"<= {LARGE[operation]:.2f}"
    return "<= 1.00" if 64 << 10 <= nbytes <= 4 << 20 else ""


def compare_with_gloo(report: Report, options: argparse.Namespace) -> None:
    """A table per operation and dtype."""
    for operation in options.operation:
        for name in options.dtype:
            rows = []
            for size in options.size:
                nbytes = bytes_of(size)
                data = Tensors.of(nbytes, DTYPES[name])
                contestants = {PRODUCT: product(operation, data), GLOO: gloo(operation, data)}
                seconds, times = measure(contestants, nbytes, options)
                target = target_of(operation, nbytes, name)
                rows.append(row(size, seconds, times, target))
                report.results.append(
                    {"title": f"{operation} {name} {size}", "operation": operation, "dtype": name, "bytes": nbytes}
                    | time_ratio(seconds, PRODUCT, GLOO)
                    | {"target": target, "milliseconds": {n: milliseconds(s, times) for n, s in seconds.items()}}
                )
            header = ("size", "product, ms", "gloo, ms", "time ratio", "range", "target")
            report.table(f"{operation}, {name}, {dist.get_world_size()} ranks, {options.pairs} pairs", header, rows)


def compare_dtypes(report: Report, options: argparse.Namespace) -> None:
    """bf16 against fp32 reduce-scatter of equally many elements: its sums must not cost more than it saves in bytes."""
    rows = []
    for size in options.size:
        nbytes = bytes_of(size)
        data = {"bf16": Tensors.of(nbytes // 2, torch.bfloat16), "fp32": Tensors.of(nbytes, torch.float32)}

        def call(tensors: Tensors) -> Callable[[], object]:
            def scaled() -> None:  # as the gradient buffers do it: the factor is applied before 16-bit sums are rounded
                work = collectives.reduce_scatter(tensors.shard, tensors.whole, world(), async_op=True, staging=tensors.staging)
                assert work is not None
                work.wait(1 / 3)

            return scaled

        seconds, times = measure({name: call(tensors) for name, tensors in data.items()}, nbytes, options)
        rows.append(row(size, seconds, times, "<= 1.30"))
        report.results.append(
            {"title": f"reduce_scatter bf16/fp32 {size}", "target": "<= 1.30"} | time_ratio(seconds, "bf16", "fp32")
        )
    header = ("fp32 size", "bf16, ms", "fp32, ms", "time ratio", "range", "target")
    report.table(f"reduce_scatter and scaling of equally many elements, {options.pairs} pairs", header, rows)


def time_ratio(seconds: Seconds, name: str, reference: str) -> dict[str, object]:
    """Median and range of time(name) / time(reference)."""
    return speed_ratio(seconds, reference, name) | {"contestant": name, "reference": reference, "is": "time ratio"}


def milliseconds(seconds: Sequence[float], times: int) -> float:
    """Median of one call."""
    return statistics.median(seconds) / times * 1e3


def row(size: str, seconds: Seconds, times: int, target: str) -> tuple[str, ...]:
    """Size, both contestants' milliseconds, their ratio."""
    (name, own), (reference, theirs) = seconds.items()
    ratio = speed_ratio(seconds, reference, name)
    low, high = ratio["range"]
    times_ms = f"{milliseconds(own, times):.3f}", f"{milliseconds(theirs, times):.3f}"
    return size, *times_ms, f"{ratio['speed_ratio']:.2f}", f"{low:.2f}-{high:.2f}", target


def bytes_of(size: str) -> int:
    """`64K` or `4M`."""
    return int(size[:-1]) * UNITS[size[-1]]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--operation", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--size", nargs="+", default=list(SIZES), help="bytes of the whole tensor: a number with K or M")
    parser.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))
    parser.add_argument("--calls", type=int, help="calls per turn (default: 16 MiB worth of them, at least 1, at most 20)")
    parser.add_argument("--tiny", action="store_true", help="two small sizes, to try the script")
    add_common_arguments(parser, pairs=21)
    options = parser.parse_args(argv)
    if options.tiny:
        options.size = ["4K", "64K"]
    wrong = [size for size in options.size if size[-1:] not in UNITS or not size[:-1].isdigit() or int(size[:-1]) == 0]
    if wrong:
        parser.error(f"--size {wrong[0]}: expected a number above 0 with K or M, such as 256K")
    return options


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    options = parse(argv)
    if "RANK" not in os.environ:
        sys.exit("bench_collectives.py needs ranks; start it with torchrun --nproc-per-node 2")
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    dist.init_process_group("gloo")
    report = Report(options.json, speaks=dist.get_rank() == 0)
    for name in options.dtype:
        check_results(DTYPES[name])
    compare_with_gloo(report, options)
    if len(options.dtype) == 2:
        compare_dtypes(report, options)
    report.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
