"""Draw a pipeline schedule, with its bubble and the activations that each rank holds.

    python tools/show_schedule.py --schedule zb_v --stages 4 --microbatches 8
    python tools/show_schedule.py --schedule 1f1b --stages 4 --chunks 2 --microbatches 8 --output interleaved.png
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.errors import ConfigError, MegatronError
from megatron.core.pipeline_parallel.schedule_plan import (
    SCHEDULES,
    Kind,
    PipelinePlan,
    build_plan,
    check_plan,
    draw_plan,
    time_plan,
)
from tools.figures import save_png

_COLOURS = {Kind.F: "#4c78a8", Kind.B: "#59a14f", Kind.W: "#f28e2b"}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The options of this command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--stages", type=int, required=True, help="pipeline_model_parallel_size")
    parser.add_argument("--microbatches", type=int, required=True, help="per step and pipeline")
    parser.add_argument("--chunks", type=int, help="model chunks per stage (default: 2 for zb_v, else 1)")
    parser.add_argument(
        "--costs", type=float, nargs=3, default=(1.0, 1.0, 1.0), metavar=("F", "B", "W"),
        help="time of a forward, of the inputs' and of the weights' gradients of one chunk (default: 1 1 1)",
    )  # fmt: skip
    parser.add_argument("--output", help="PNG file to write beside the text")
    return parser.parse_args(argv)


def describe(plan: PipelinePlan, costs: dict[Kind, float]) -> str:
    """The drawing and the figures as text."""
    held = check_plan(plan)
    timing = time_plan(plan, costs)
    drawn = draw_plan(plan, costs) if all(cost == round(cost) for cost in costs.values()) else "(drawn for whole costs only)"
    return (
        f"{drawn}\n{plan.schedule}, {plan.stages} stages, {plan.chunks} chunk(s) each, {plan.microbatches} microbatches: "
        f"time {timing.total:g}, bubble {timing.bubble:.1%}\n"
        f"most activations held (one microbatch in one chunk), by rank: {', '.join(map(str, held))}"
    )


def draw_png(plan: PipelinePlan, costs: dict[Kind, float], path: str) -> None:
    """Write the schedule as a picture. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--output needs matplotlib; pip install matplotlib (or megadlms[plot])") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    timing = time_plan(plan, costs)
    cost = dict(costs) if plan.split_backward else {**costs, Kind.B: costs[Kind.B] + costs[Kind.W]}
    figure, axes = pyplot.subplots(figsize=(min(24.0, 2 + timing.total * 0.35), 1.2 + 0.5 * plan.stages), layout="constrained")
    for rank, actions in enumerate(plan.actions):
        for action, start in zip(actions, timing.starts[rank], strict=True):
            _box(axes, rank, start, cost[action.kind], action.kind, action.chunk, str(action.microbatch))
    axes.set(
        xlim=(0, timing.total), ylim=(plan.stages - 0.4, -0.6), yticks=range(plan.stages), xlabel="time",
        yticklabels=[f"stage {rank}" for rank in range(plan.stages)],
        title=f"{plan.schedule}, {plan.chunks} chunk(s) per stage: bubble {timing.bubble:.1%}",
    )  # fmt: skip
    kinds = [kind for kind in Kind if plan.split_backward or kind is not Kind.W]
    figure.legend(
        [pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS[kind]) for kind in kinds],
        [{Kind.F: "forward", Kind.B: "backward", Kind.W: "weights' gradients"}[kind] for kind in kinds],
        loc="outside lower right", ncols=3, frameon=False,
    )  # fmt: skip
    figure.set_dpi(120)
    save_png(figure, path)
    pyplot.close(figure)


def _box(axes: Any, rank: int, start: float, length: float, kind: Kind, chunk: int, text: str) -> None:
    shade = 1.0 if chunk % 2 == 0 else 0.6
    axes.barh(rank, length, left=start, height=0.8, color=_COLOURS[kind], alpha=shade, edgecolor="white", linewidth=0.8)
    axes.text(start + length / 2, rank, text, ha="center", va="center", fontsize=8, color="white" if shade == 1.0 else "black")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 2 for a schedule that cannot be, 1 for a file that cannot be written."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        if min(options.stages, options.microbatches) < 1 or min(options.costs) < 0 or options.costs[0] == 0:
            raise ConfigError("--stages and --microbatches must be at least 1, --costs not negative")
        chunks = options.chunks or (2 if options.schedule == "zb_v" else 1)
        plan = build_plan(options.schedule, options.stages, chunks, options.microbatches)
        costs = dict(zip(Kind, options.costs, strict=True))
        print(describe(plan, costs))
        if options.output:
            draw_png(plan, costs, options.output)
            print(f"wrote {options.output}")
    except (MegatronError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, MegatronError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
