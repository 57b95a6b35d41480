"""The distributed optimizer against the other data-parallel engines, all on the same plain model, in one interleaved run.

    python scripts/bench/peer_environment.py                                # once: DeepSpeed and megatron-core, apart
    python scripts/bench/bench_dist_optimizer.py [--dtype fp32 bf16] [--batch gb8 gb2] [--ranks 2]

Every engine has rank processes of its own (see engine_teams.py), pinned to a core each, one thread. They have the same model
code (plain_gpt.py), initial weights and samples, which the losses of the first steps prove; fused AdamW, clip 1, buckets of one
size. A turn is one step that is not counted and `--steps` counted ones without a barrier between them; a counted step lasts from
the end of one optimizer's step to the end of the next one's, so a gather that hides under the next forward is counted where it
does not hide. Ratios are medians over turns of the product's time / the peer's.

Where memory does not hold all engines they run in several heats, each with the product and DDP.
`compute alone` sends nothing: what is above it is communication that an engine could not hide, and its own work.
bf16: product, DeepSpeed and megatron-core have bf16 weights and fp32 main params and sums, FSDP2 and DDP fp32 weights that are
cast in forward (autocast).
"""

import argparse
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from scripts.bench.common import Report, add_common_arguments, time_ratio
from scripts.bench.engine_teams import KINDS, MIB, PHASES, Contest, Job, Placement, Setup, contest, heats, job_of, parameters
from scripts.bench.peer_environment import PEERS, add_environment_argument

LOSS_STEPS = 3
ALLOWED = {"fp32": 1e-5, "bf16": 1e-3}  # of the first loss
OWN = "product-overlap"
ALWAYS = ("local", "product-overlap", "ddp")  # in each heat
# Target 2: shared memory, per batch: peer -> largest time ratio of the product.
TARGETS = {
    "gb8": {
        "ddp": 1.02,
        "fsdp2": 0.92,
        "fsdp2-no-reshard": 0.92,
        "deepspeed-1": 0.92,
        "deepspeed-2": 0.92,
        "megatron-core": 0.90,
    },
    "gb2": {
        "ddp": 1.02,
        "fsdp2": 0.80,
        "fsdp2-no-reshard": 0.80,
        "deepspeed-1": 0.80,
        "deepspeed-2": 0.80,
        "megatron-core": 0.90,
    },
}


def batches_of(batch: str, ranks: int) -> tuple[int, int]:
    """(global, micro) batch: gb8 is 8 in micro batches of 4; gb2 has one sample per rank."""
    return (8, max(1, min(4, 8 // ranks))) if batch == "gb8" else (max(2, ranks), 1)


def state_formula(dtype: str, ranks: int, sharded: bool) -> float:
    """Bytes of model state per parameter: params, grads, main params, two moments."""
    whole, shared = (8, 8) if dtype == "fp32" else (6, 12)
    return whole + shared / (ranks if sharded else 1)


def step_rows(contest: Contest) -> list[list[str]]:
    """Engine, median and range of the step, its phases, what is above the compute alone."""
    seconds = contest.seconds()
    alone = statistics.median(seconds["local"]) if "local" in seconds else None
    rows = []
    for key, values in seconds.items():
        median = statistics.median(values)
        phases = {phase: statistics.median(turn.phases[phase] for turn in contest.turns[key]) for phase in PHASES}
        over = "" if alone is None else f"{1e3 * (median - alone):.0f}"
        span = f"{min(values):.3f}-{max(values):.3f}"
        rows.append([KINDS[key].title, f"{median:.3f}", span, *(f"{1e3 * phases[phase]:.0f}" for phase in PHASES), over])
    return rows


def report_steps(report: Report, contest: Contest, title: str, targets: Mapping[str, float]) -> None:
    """Tables and ratios of the product with overlap against every other engine."""
    rows = step_rows(contest)
    report.table(title, ("engine", "s/step", "range", *(f"{phase}, ms" for phase in PHASES), "over compute, ms"), rows)
    seconds = contest.seconds()
    for key in seconds:
        if OWN in seconds and key != OWN:
            target = f"<= {targets[key]:.2f} (target 2)" if key in targets else ""
            report.time_ratio(title, time_ratio(seconds, OWN, key), target)
    loads = [load for team in contest.teams.values() for load in team.idle_loads]
    report.fact(f"{title}: share of a core that a waiting rank used, median", f"{statistics.median(loads):.2%}")


def report_memory(report: Report, contest: Contest, setup: Setup, title: str) -> None:
    """Peak resident memory and model state of each engine's ranks; the product's against the formula."""
    numel, rows, found = parameters(setup.job), [], contest.reports()
    for key, answers in found.items():
        fullest = max(answers, key=lambda answer: answer["peak_rss"])
        state = max(answer["state"]["total"] for answer in answers)
        row = [
            KINDS[key].title,
            f"{fullest['peak_rss'] / MIB:.0f}",
            f"{(fullest['peak_rss'] - fullest['import_rss']) / MIB:.0f}",
        ]
        row += [str(state), f"{state / numel:.3f}"]
        report.results.append({"title": f"{title}: memory", "engine": key, "ranks": answers})
        rows.append(row + (formula_cells(setup, key, answers) if key.startswith("product") else ["", ""]))
    header = ("engine", "peak RSS, MiB", "above imports", "state, bytes", "per parameter", "formula", "padding, bytes")
    report.table(f"{title}: memory of the fullest rank", header, rows)
    peaks = {key: max(answer["peak_rss"] for answer in answers) for key, answers in found.items()}
    if OWN in peaks and "zero-redundancy" in peaks:
        ratio = peaks[OWN] / peaks["zero-redundancy"]
        report.fact(f"{title}: peak RSS, product / ZeroRedundancyOptimizer", f"{ratio:.3f}; target <= 1 (target 5)")


def formula_cells(setup: Setup, key: str, answers: Sequence[dict[str, Any]]) -> list[str]:
    """Formula (and whether the ranks hold it to the byte, padding aside), padding of the fullest rank."""
    formula = state_formula(setup.dtype, len(answers), KINDS[key].sharded)
    held = sum(answer["state"]["total"] - answer["state"]["padding"] for answer in answers)
    exact = "equal" if held == round(formula * len(answers) * parameters(setup.job)) else f"NOT EQUAL: {held} of all ranks"
    return [f"{formula:.3f}, {exact}", str(max(answer["state"]["padding"] for answer in answers))]


def measure(report: Report, options: argparse.Namespace, dtype: str, batch: str) -> None:
    """One dtype and batch size."""
    global_batch, micro_batch = batches_of(batch, options.ranks)
    setup = Setup(
        job_of(options.tiny, options.layers), dtype, global_batch, micro_batch, options.bucket_size, 1.0, options.nan_check
    )
    keys = [key for key in options.engines if KINDS[key].only_dtype in (None, dtype)]
    title = f"{dtype} {batch}, {options.ranks} ranks"
    groups = heats(keys, ALWAYS, setup, options.ranks, options.heat)
    for index, group in enumerate(groups):
        heat = title if len(groups) == 1 else f"{title}, heat {index + 1} of {len(groups)}"
        with contest(group, setup, Placement.here(options.ranks), options.environment) as running:
            losses = running.check_losses(LOSS_STEPS, ALLOWED[dtype])
            report.results.append({"title": f"{heat}: losses", "losses": losses})
            running.run(options.pairs, options.steps or (1 if batch == "gb8" else 3))
            report_steps(report, running, heat, TARGETS[batch])
            report_memory(report, running, setup, heat)
            for key, reason in running.failures.items():
                report.fact(f"{heat}: {KINDS[key].title}", f"not measured, or broke off: {reason}", engine=key)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument("--batch", nargs="+", choices=("gb8", "gb2"), default=["gb8", "gb2"])
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="processes per engine (default 2)")
    default = [key for key in KINDS if key not in ("product-reduce", "product-gather")]
    parser.add_argument("--engines", nargs="+", choices=tuple(KINDS), default=default, help=f"default: {' '.join(default)}")
    parser.add_argument("--steps", type=int, help="counted steps per turn (default 1 for gb8, 3 for gb2)")
    parser.add_argument("--heat", type=int, help="engines alive together (default: as many as the memory holds)")
    parser.add_argument(
        "--bucket-size", type=int, default=6_553_600, help="elements, of all engines; the default is DDP's 25 MiB"
    )
    parser.add_argument(
        "--no-nan-check", dest="nan_check", action="store_false", help="the product doesn't look for NaN, as peers don't"
    )
    parser.add_argument("--layers", type=int, default=Job.layers, help="fewer than R's for a slow machine")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    add_environment_argument(parser)
    add_common_arguments(parser, pairs=5)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    options = parse(argv)
    report = Report(options.json)
    report.fact("peers", ", ".join(f"{name} {version}" for name, version in PEERS.items()) + f" in {options.environment}")
    for dtype in options.dtype:
        for batch in options.batch:
            measure(report, options, dtype, batch)
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
