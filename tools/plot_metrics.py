"""Draw the curves of one or more runs as a PNG: loss, learning rate and gradient norm over tokens, steps or samples.

    python tools/plot_metrics.py runs/a/metrics.jsonl runs/b/metrics.jsonl --output loss.png --reference "unigram entropy" 6.18
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.errors import ConfigError, DataError, MegatronError
from tools.figures import save_png

X_FIELDS = {"tokens": "consumed_tokens", "samples": "consumed_samples", "steps": "iteration"}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The options of this command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("metrics", nargs="+", help="metrics.jsonl files, or the folders they lie in")
    parser.add_argument("--output", required=True, help="PNG file to write")
    parser.add_argument("--x", choices=tuple(X_FIELDS), default="tokens", help="horizontal axis (default: tokens)")
    parser.add_argument("--label", action="append", default=[], help="name of a run, once per file (default: its folder's name)")
    parser.add_argument(
        "--reference", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="horizontal line in the loss plot"
    )
    parser.add_argument("--title", help="title of the figure")
    parser.add_argument("--log-x", action="store_true", help="logarithmic horizontal axis")
    return parser.parse_args(argv)


@dataclasses.dataclass(frozen=True)
class Run:
    """The curves of one metrics file: per curve the places on the horizontal axis and the values, None left out."""

    label: str
    train: tuple[list[float], list[float]]
    validation: tuple[list[float], list[float]]
    learning_rate: tuple[list[float], list[float]]
    grad_norm: tuple[list[float], list[float]]


def read_run(path: Path, x: str, label: str | None = None) -> Run:
    """The curves of a metrics file. Raises DataError naming file and line where it is not one."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    lines = _read_lines(file)
    steps = [line for line in lines if "split" not in line]
    if not steps:
        raise DataError(f"{file}: no training step is logged in it")
    place = {line["iteration"]: float(line[X_FIELDS[x]]) for line in steps}

    def curve(records: list[dict[str, Any]], field: str) -> tuple[list[float], list[float]]:
        known = [(_place(place, line["iteration"]), line[field]) for line in records if line[field] is not None]
        return [at for at, _ in known], [value for _, value in known]

    return Run(
        label=label or file.resolve().parent.name,
        train=curve(steps, "lm_loss"),
        validation=curve([line for line in lines if line.get("split") == "validation"], "lm_loss"),
        learning_rate=curve(steps, "learning_rate"),
        grad_norm=curve(steps, "grad_norm"),
    )


def _read_lines(file: Path) -> list[dict[str, Any]]:
    lines = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            needed = ("lm_loss",) if "split" in line else (*X_FIELDS.values(), "lm_loss", "learning_rate", "grad_norm")
            missing = [name for name in needed if name not in line]
        except (ValueError, TypeError) as error:
            raise DataError(f"{file}:{number}: not a line of a metrics file: {error}") from None
        if missing:
            raise DataError(f"{file}:{number}: not a line of a metrics file: it has no {', '.join(missing)}")
        lines.append(line)
    return lines


def _place(place: dict[int, float], iteration: int) -> float:
    """Where a step lies on the axis; between two logged steps, by the straight line between them."""
    if iteration in place:
        return place[iteration]
    before = max((i for i in place if i < iteration), default=None)
    after = min((i for i in place if i > iteration), default=None)
    if before is None or after is None:
        (near,) = [i for i in (before, after) if i is not None]
        return place[near] * iteration / near if near else place[near]
    share = (iteration - before) / (after - before)
    return place[before] + share * (place[after] - place[before])


def draw(runs: Sequence[Run], references: Sequence[tuple[str, float]], *, x: str, title: str | None, log_x: bool) -> Any:
    """A matplotlib Figure with three plots over one axis. Raises ConfigError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError as error:
        raise ConfigError("plotting needs matplotlib; pip install 'megadlms[plot]'") from error
    figure = Figure(figsize=(9, 7), layout="constrained", dpi=120)
    loss, rate, norm = figure.subplots(3, 1, sharex=True, height_ratios=(3.2, 1, 1))
    for index, run in enumerate(runs):
        _draw_run(run, (loss, rate, norm), index, alone=len(runs) == 1)
    for index, (name, value) in enumerate(references):
        loss.axhline(value, color="0.35", linestyle=("--", ":", "-.")[index % 3], linewidth=1.2, label=f"{name} ({value:.3f})")
    loss.set_ylabel("loss (nats per token)")
    rate.set_ylabel("learning rate")
    norm.set_ylabel("gradient norm")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    _limit_norm(norm, runs)
    norm.set_xlabel({"tokens": "training tokens", "samples": "training samples", "steps": "step"}[x])
    if log_x:
        norm.set_xscale("log")
    else:
        norm.set_xlim(left=0)
    norm.xaxis.set_major_formatter(EngFormatter(sep=""))
    for plot in (loss, rate, norm):
        plot.grid(alpha=0.25, linewidth=0.7)
        plot.spines[["top", "right"]].set_visible(False)
    loss.legend(frameon=False, loc="upper right")
    if title:
        figure.suptitle(title)
    figure.align_ylabels()
    return figure


def _draw_run(run: Run, plots: tuple[Any, Any, Any], index: int, *, alone: bool) -> None:
    """Training as a thin line, validation as marks on a line; one colour per run, or per curve if there is only one run."""
    loss, rate, norm = plots
    colour = f"C{index}"
    loss.plot(*run.train, color=colour, linewidth=1.2, alpha=0.85, label="training" if alone else f"{run.label}, training")
    if run.validation[0]:
        loss.plot(
            *run.validation,
            color="C1" if alone else colour,
            linewidth=1.6,
            linestyle="-" if alone else "--",
            marker="o",
            markersize=4,
            label="validation" if alone else f"{run.label}, validation",
        )
    rate.plot(*run.learning_rate, color=colour, linewidth=1.2)
    norm.plot(*run.grad_norm, color=colour, linewidth=0.9)


def _limit_norm(plot: Any, runs: Sequence[Run]) -> None:
    """From 0 up; a spike far above what 99 % of the steps reach is cut off instead of flattening the curve."""
    values = sorted(value for run in runs for value in run.grad_norm[1])
    usual = values[int(0.99 * (len(values) - 1))] if values else 0.0
    if values and values[-1] > 5 * usual > 0:
        plot.set_ylim(0, 1.6 * usual)
    else:
        plot.set_ylim(bottom=0)


def parse_references(pairs: Sequence[Sequence[str]]) -> list[tuple[str, float]]:
    """(name, value) of each --reference. Raises ConfigError for a value that is no finite number."""
    found = []
    for name, text in pairs:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(f"--reference {name!r}: expected a number, got {text!r}")
        found.append((name, value))
    return found


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse_arguments(argv)
    try:
        if options.label and len(options.label) != len(options.metrics):
            raise ConfigError(f"--label is given {len(options.label)} times for {len(options.metrics)} metrics files")
        references = parse_references(options.reference)
        labels = options.label or [None] * len(options.metrics)
        runs = [read_run(Path(path), options.x, label) for path, label in zip(options.metrics, labels, strict=True)]
        figure = draw(runs, references, x=options.x, title=options.title, log_x=options.log_x)
        output = save_png(figure, options.output)
    except (MegatronError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, MegatronError) else 1
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
