"""The distributed optimizer on a slow network against the ideal and the other data-parallel engines (root; Linux).

    python scripts/bench/bench_slow_link.py [--rate 1gbit] [--batch gb8] [--dtype fp32]
    python scripts/bench/bench_slow_link.py --clean         # remove what a killed run left behind

Two ranks in two network namespaces (see slow_link.py), one core and one thread each; engines, model, data and turns as in
bench_dist_optimizer.py. The product runs with its overlap flags added one by one, so each flag's gain is seen.

    ideal of a turn = max(compute, communication)
    compute         = step of `compute alone` in this turn: forward, backward, norm, fused Adam on a shard, nothing sent
    communication   = (d - 1) / d x (gradient bytes + parameter bytes) per rank / rate: what any engine must send that
                      reduces gradients and gathers parameters (an all-reduce sends as much)

The kernel's counters say what really crossed the link. Exit code 2: no slow link can be made here.
"""

import argparse
import itertools
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.bench_dist_optimizer import ALLOWED, OWN, batches_of, step_rows
from scripts.bench.common import Report, add_common_arguments, time_ratio
from scripts.bench.engine_teams import KINDS, MIB, Contest, Job, Placement, Setup, contest, heats, job_of, parameters
from scripts.bench.peer_environment import add_environment_argument
from scripts.bench.slow_link import DEVICE, LinkError, SlowLink, left_behind, remove_namespaces, signals_end_the_run

RANKS = 2
FLAGS = ["product", "product-reduce", "product-gather", OWN]  # each has one flag more than the one before
ENGINES = [
    "local",
    *FLAGS,
    "ddp",
    "zero-redundancy",
    "fsdp2-no-reshard",
    "fsdp2",
    "deepspeed-1",
    "deepspeed-2",
    "megatron-core",
]
ALWAYS = ("local", OWN, "ddp")
# Target 1: peer -> largest time ratio of the product.
TARGETS = {
    "ideal": 1.10,
    "ddp": 0.95,
    "deepspeed-1": 0.60,
    "deepspeed-2": 0.60,
    "fsdp2": 0.60,
    "fsdp2-no-reshard": 0.60,
    "megatron-core": 0.85,
}
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bytes_per_second(rate: str) -> float:
    """Of a rate as `tc` reads it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{rate!r}: a number and kbit, mbit or gbit, for example 1gbit")
    return float(match[1]) * UNITS[match[2]] / 8


def rate_argument(text: str) -> str:
    """Checked."""
    bytes_per_second(text)
    return text


def volume(setup: Setup) -> int:
    """Bytes that each rank must send in a step."""
    grad, param = (4, 4) if setup.dtype == "fp32" else (4, 2)
    return (RANKS - 1) * parameters(setup.job) * (grad + param) // RANKS


def report_line(report: Report, running: Contest, setup: Setup, rate: str, title: str) -> None:
    """Tables, each flag's gain, ratios to the ideal and to the peers."""
    seconds, needed = running.seconds(), volume(setup)
    if "local" in seconds:
        seconds["ideal"] = [max(compute, needed / bytes_per_second(rate)) for compute in seconds["local"]]
    rows = [[*row, *crossed(running, key, needed)] for key, row in zip(running.teams, step_rows(running), strict=True)]
    header = ("engine", "s/step", "range", "forward, ms", "backward, ms", "reduce, ms", "optimizer, ms", "gather, ms")
    report.table(title, (*header, "over compute, ms", "MiB sent per step and rank", "of predicted"), rows)
    if "ideal" in seconds:
        compute, ideal = (statistics.median(seconds[key]) for key in ("local", "ideal"))
        report.fact(
            f"{title}: ideal",
            f"{ideal:.3f} s = max(compute {compute:.3f} s, communication {needed / bytes_per_second(rate):.3f} s for {needed / MIB:.1f} MiB)",
        )
    for before, after in itertools.pairwise(FLAGS):
        if before in seconds and after in seconds:
            report.time_ratio(f"{title}: one flag more", time_ratio(seconds, after, before))
    for key in seconds:
        if OWN in seconds and key not in (OWN, "local"):
            report.time_ratio(
                title, time_ratio(seconds, OWN, key), f"<= {TARGETS[key]:.2f} (target 1)" if key in TARGETS else ""
            )
    for key in seconds:
        if "ideal" in seconds and key not in ("ideal", "local", OWN):
            report.time_ratio(f"{title}: others", time_ratio(seconds, key, "ideal"))


def crossed(running: Contest, key: str, needed: int) -> list[str]:
    """MiB per step that the rank which sent most sent, and its ratio to what is needed."""
    sent = statistics.median(turn.sent for turn in running.turns[key])
    return [f"{sent / MIB:.1f}", "" if key == "local" else f"{sent / needed:.3f}"]


def measure(report: Report, options: argparse.Namespace, link: SlowLink, dtype: str, batch: str) -> None:
    """One dtype and batch size."""
    global_batch, micro_batch = batches_of(batch, RANKS)
    setup = Setup(job_of(options.tiny, options.layers), dtype, global_batch, micro_batch, options.bucket_size)
    placement = Placement(link.prefixes(), link.addresses[0], {"GLOO_SOCKET_IFNAME": DEVICE})
    groups = heats(options.engines, ALWAYS, setup, RANKS, options.heat)
    for index, group in enumerate(groups):
        title = f"{options.rate} {dtype} {batch}" + (f", heat {index + 1} of {len(groups)}" if len(groups) > 1 else "")
        with contest(group, setup, placement, options.environment) as running:
            report.results.append({"title": f"{title}: losses", "losses": running.check_losses(2, ALLOWED[dtype])})
            running.run(options.pairs, options.steps or (1 if batch == "gb8" else 2), link.sent)
            report_line(report, running, setup, options.rate, title)
            for key, reason in running.failures.items():
                report.fact(f"{title}: {KINDS[key].title}", f"not measured, or broke off: {reason}", engine=key)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rate", type=rate_argument, default="1gbit", help="of each direction (default 1gbit)")
    parser.add_argument("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument("--batch", nargs="+", choices=("gb8", "gb2"), default=["gb8"])
    parser.add_argument("--engines", nargs="+", choices=tuple(KINDS), default=ENGINES, help=f"default: {' '.join(ENGINES)}")
    parser.add_argument("--steps", type=int, help="counted steps per turn (default 1 for gb8, 2 for gb2)")
    parser.add_argument("--heat", type=int, help="engines alive together (default: as many as the memory holds)")
    parser.add_argument("--bucket-size", type=int, default=1_048_576, help="elements, of all engines (default 4 MiB of fp32)")
    parser.add_argument("--layers", type=int, default=Job.layers, help="fewer than R's for a slow machine")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--clean", action="store_true", help="remove namespaces that a killed run left behind, and stop")
    add_environment_argument(parser)
    add_common_arguments(parser, pairs=5)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure and print; 2 where no slow link can be made."""
    options = parse(argv)
    stale = left_behind()
    remove_namespaces(stale)
    if options.clean:
        print(f"removed: {', '.join(stale) or 'nothing'}")
        return 0
    try:
        with signals_end_the_run(), SlowLink(options.rate) as link:
            report = Report(options.json)
            for dtype in options.dtype:
                for batch in options.batch:
                    measure(report, options, link, dtype, batch)
            report.close()
    except LinkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
