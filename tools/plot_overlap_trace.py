"""Draw the trace of one step (`--trace-overlap`) as a PNG: compute, collectives in flight and waits, a panel per rank.

    python tools/plot_overlap_trace.py runs/a/trace.json --output trace.png --ranks 0 1

The picture begins with the step's first phase; what lies before it (an evaluation, a save) is in the file only.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.errors import ConfigError, DataError, MegatronError
from tools.figures import save_png

COLOURS = {
    "phase": "#e4e4e4",
    "forward": "#4c78a8",
    "recompute": "#9ecae9",
    "backward": "#54a24b",
    "optimizer": "#f2a541",
    "collective": "#b8a2d1",
    "wait": "#d1495b",
}
BETWEEN_STEPS = ("evaluation", "save-checkpoint")
MOST_RANKS = 4  # that are drawn without --ranks
LABEL_SHARE = 0.0062  # of the picture's width, per character of a label


@dataclasses.dataclass(frozen=True)
class Bar:
    """A slice to draw. begin, end: milliseconds."""

    kind: str
    name: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Panel:
    """One rank: its rows from top to bottom, each with its bars. exposed: milliseconds that it waited in the whole step."""

    label: str
    rows: dict[str, list[Bar]]
    exposed: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """What is drawn. length: milliseconds of the picture."""

    iteration: int
    length: float
    panels: dict[int, Panel]


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The options of this command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("trace", help="file that --trace-overlap wrote")
    parser.add_argument("--output", required=True, help="PNG file to write")
    parser.add_argument("--ranks", nargs="+", type=int, help=f"ranks to draw (default: the first {MOST_RANKS})")
    parser.add_argument("--title", help="title of the figure")
    return parser.parse_args(argv)


def read_trace(path: Path) -> Trace:
    """Raises DataError if the file is not one that --trace-overlap wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        about = content["otherData"]
        events = content["traceEvents"]
        slices = [event for event in events if event["ph"] == "X"]
        start = _start(slices, about["step_begin_us"])
        panels = {rank: _panel(rank, events, start) for rank in sorted({event["pid"] for event in slices})}
        length = max(about["step_end_us"], *(event["ts"] + event["dur"] for event in slices)) - start
        return Trace(about["iteration"], length / 1e3, panels)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a trace that --trace-overlap wrote ({type(error).__name__}: {error})") from None


def _start(slices: Sequence[dict[str, Any]], begin: float) -> float:
    """Where the picture begins: the end of what ran between the steps."""
    between = [event["ts"] + event["dur"] for event in slices if event["name"] in BETWEEN_STEPS]
    return max([min(begin, *(event["ts"] for event in slices)), *between])


def _panel(rank: int, events: Sequence[dict[str, Any]], start: float) -> Panel:
    names = {(event["name"], event["tid"]): event["args"] for event in events if event["pid"] == rank and event["ph"] == "M"}
    slices = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
    rows: dict[str, list[Bar]] = {}
    for (kind, tid), args in sorted(names.items(), key=lambda item: item[0][1]):
        bars = [
            Bar(event["cat"], event["name"], max(event["ts"] - start, 0.0) / 1e3, (event["ts"] + event["dur"] - start) / 1e3)
            for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"]))
            if event["tid"] == tid and event["cat"] in COLOURS and event["ts"] + event["dur"] > start
        ]
        if bars and kind == "thread_name":
            rows[args["name"]] = bars
    exposed = sum(event["dur"] for event in slices if event["cat"] == "wait") / 1e3
    return Panel(names["process_name", 0]["name"], rows, exposed)


def draw(trace: Trace, ranks: Sequence[int], title: str | None = None) -> Any:
    """A matplotlib Figure. Raises ConfigError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError("plotting needs matplotlib; pip install 'megadlms[plot]'") from error
    heights = [_height(trace.panels[rank]) for rank in ranks]
    figure = Figure(figsize=(12, 1.3 + 0.27 * sum(heights)), layout="constrained", dpi=120)
    axes = figure.subplots(len(ranks), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, rank in zip(axes, ranks, strict=True):
        _draw_panel(axis, trace.panels[rank], trace.length)
    axes[-1].set_xlabel("milliseconds")
    axes[-1].set_xlim(0, trace.length)
    used = {bar.kind for rank in ranks for bars in trace.panels[rank].rows.values() for bar in bars}
    names = {"phase": "rest of a phase", "collective": "in flight", "wait": "waiting (exposed)"}
    handles = [Patch(color=colour, label=names.get(kind, kind)) for kind, colour in COLOURS.items() if kind in used]
    figure.legend(handles=handles, ncols=len(handles), frameon=False, loc="outside lower center", fontsize=9)
    figure.suptitle(title or f"step {trace.iteration}", fontsize=11)
    return figure


def _height(panel: Panel) -> float:
    """In rows; the training thread's is twice as high."""
    return len(panel.rows) + 2.4


def _draw_panel(axis: Any, panel: Panel, length: float) -> None:
    ticks = []
    bottom = 0.0
    for name, bars in reversed(panel.rows.items()):
        collective = bars[0].kind == "collective"
        height = 0.8 if collective else 1.8
        for bar in bars:
            _draw_bar(axis, bar, bottom, height, length)
        if name[-1:].isdigit():  # further lanes of a row need no name
            name = ""
        ticks.append((bottom + height / 2, name))
        bottom += height + 0.2
    axis.set_yticks([at for at, _ in ticks], [name for _, name in ticks], fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(-0.2, bottom)
    axis.set_title(f"{panel.label}: {panel.exposed:.2f} ms exposed", loc="left", fontsize=9)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.grid(axis="x", alpha=0.25, linewidth=0.7)
    axis.set_axisbelow(True)


def _draw_bar(axis: Any, bar: Bar, bottom: float, height: float, length: float) -> None:
    width = bar.end - bar.begin
    inset = 0.35 if bar.kind == "recompute" else 0.0  # it lies inside a backward
    axis.barh(
        bottom + inset, width, height - 2 * inset, left=bar.begin, align="edge", color=COLOURS[bar.kind], edgecolor="white", linewidth=0.4
    )
    label = _short(bar)
    if bar.kind not in ("wait", "phase") and len(label) * LABEL_SHARE < width / length:
        axis.text(bar.begin + width / 2, bottom + height / 2, label, ha="center", va="center", fontsize=7, clip_on=True)


def _short(bar: Bar) -> str:
    """`layers.3` for `forward decoder.layers.3`: the colour says the rest."""
    name = bar.name.removeprefix(f"{bar.kind} ")
    return name if bar.kind in ("collective", "optimizer") else name.removeprefix("decoder.").replace("_layernorm", "_norm")


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse_arguments(argv)
    try:
        trace = read_trace(Path(options.trace))
        ranks = options.ranks or list(trace.panels)[:MOST_RANKS]
        unknown = [rank for rank in ranks if rank not in trace.panels]
        if unknown:
            raise ConfigError(f"--ranks {unknown[0]}: the trace has ranks {', '.join(map(str, trace.panels))}")
        figure = draw(trace, ranks, options.title)
        output = save_png(figure, options.output)
    except (MegatronError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, MegatronError) else 1
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
