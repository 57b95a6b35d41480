"""How the product's step grows: with the number of layers, from one rank to two, and with more ranks than cores.

    python scripts/bench/bench_growth.py [--dtype fp32]

The distributed optimizer with all overlap (engine, turns and model of bench_dist_optimizer.py; ranks of one thread, pinned):

    layers          4, 8, 16 on two ranks: the step of 8 against the line through those of 4 and 16
    ranks           1 -> 2, a micro batch of 4 per rank: what the second rank's communication costs; `compute alone` on one and
                    two ranks shows what the cores take from each other without any
    shared-cores    2 -> 4 ranks that share the cores of two, same global batch: tokens/s kept, and what DDP keeps

Each comparison is an interleaved run of its own.
"""

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import Report, Seconds, add_common_arguments, speed_ratio, time_ratio
from scripts.bench.engine_teams import Contest, Entry, Placement, Setup, check_memory, job_of, teams_of, waiting_bytes
from scripts.bench.peer_environment import DEFAULT

OWN = "product-overlap"
LAYERS = (4, 8, 16)
MICRO_BATCH = 4
PARTS = ("layers", "ranks", "shared-cores")


def entries(options: argparse.Namespace, dtype: str, part: str) -> dict[str, Entry]:
    """The contestants of a comparison."""

    def entry(key: str, layers: int, ranks: int, global_batch: int) -> Entry:
        job = dataclasses.replace(job_of(options.tiny, layers), layers=layers)
        setup = Setup(job, dtype, global_batch, global_batch // ranks, options.bucket_size)
        return Entry(key, setup, Placement.here(ranks))

    few, middle, many = LAYERS
    whole = 2 * MICRO_BATCH
    more = {
        "layers": {f"{few} layers": entry(OWN, few, 2, whole), f"{many} layers": entry(OWN, many, 2, whole)},
        "ranks": {
            "1 rank": entry(OWN, middle, 1, MICRO_BATCH),
            "compute alone, 1 rank": entry("local", middle, 1, MICRO_BATCH),
            "compute alone, 2 ranks": entry("local", middle, 2, whole),
        },
        "shared-cores": {
            "4 ranks": entry(OWN, middle, 4, whole),
            "DDP, 2 ranks": entry("ddp", middle, 2, whole),
            "DDP, 4 ranks": entry("ddp", middle, 4, whole),
        },
    }
    return {"2 ranks": entry(OWN, middle, 2, whole), **more[part]}


def on_the_line(seconds: Seconds) -> list[float]:
    """Where the step of the middle number of layers lies if growth is linear."""
    few, middle, many = LAYERS
    share = (middle - few) / (many - few)
    pairs = zip(seconds[f"{few} layers"], seconds[f"{many} layers"], strict=True)
    return [low + share * (high - low) for low, high in pairs]


def measure(report: Report, options: argparse.Namespace, dtype: str, part: str) -> None:
    """One comparison."""
    chosen = entries(options, dtype, part)
    check_memory(sum(waiting_bytes(entry.setup, len(entry.placement.prefixes)) for entry in chosen.values()))
    with teams_of(chosen, DEFAULT) as (teams, failures):
        running = Contest(next(iter(chosen.values())).setup, teams, failures)
        running.warm_up()
        running.run(options.pairs, options.steps)
        seconds = running.seconds()
    if failures:
        raise SystemExit(f"not measured: {failures}")
    rows = []
    for name, values in seconds.items():
        job, median = chosen[name].setup, statistics.median(values)
        tokens = job.global_batch * job.job.sequence
        span = f"{min(values):.3f}-{max(values):.3f}"
        rows.append(
            [
                name,
                str(len(chosen[name].placement.prefixes)),
                str(job.job.layers),
                f"{median:.3f}",
                span,
                f"{tokens / median:.0f}",
            ]
        )
    report.table(f"{dtype} {part}", ("contestant", "ranks", "layers", "s/step", "range", "tokens/s"), rows)
    report_growth(report, dtype, seconds, part)


def report_growth(report: Report, dtype: str, seconds: Seconds, part: str) -> None:
    """The targets of a comparison."""
    if part == "layers":
        growth = {"8 layers": seconds["2 ranks"], "line through 4 and 16": on_the_line(seconds)}
        report.time_ratio(f"{dtype} layers", time_ratio(growth, "8 layers", "line through 4 and 16"), "0.95-1.05 (target 8)")
    elif part == "ranks":
        report.time_ratio(f"{dtype} ranks", time_ratio(seconds, "2 ranks", "1 rank"), "<= 1.08 (target 8)")
        report.time_ratio(f"{dtype} ranks", time_ratio(seconds, "compute alone, 2 ranks", "compute alone, 1 rank"))
    else:
        title = f"{dtype} tokens/s on {os.cpu_count()} cores"
        report.ratio(title, speed_ratio(seconds, "4 ranks", "2 ranks"), ">= 0.97 (target 8)")
        report.ratio(title, speed_ratio(seconds, "DDP, 4 ranks", "DDP, 2 ranks"))


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="of the three comparisons (default: all)"
    )
    parser.add_argument("--steps", type=int, default=1, help="counted steps per turn")
    parser.add_argument("--bucket-size", type=int, default=6_553_600, help="elements; the default is DDP's 25 MiB of fp32")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    add_common_arguments(parser, pairs=6)
    options = parser.parse_args(argv)
    report = Report(options.json)
    for dtype in options.dtype:
        for part in options.parts:
            measure(report, options, dtype, part)
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
