"""What the benchmarks share: contestants take turns in rotated order, ratios are taken turn by turn, one form of report.

    turn 0: A B C   turn 1: B C A   turn 2: C A B ...      ratio of A to B = median over turns of time(B) / time(A)

Noise of the machine that lasts longer than a turn hits all contestants of the turn alike and leaves the ratios alone.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
Seconds = dict[str, list[float]]


def nothing() -> None:
    """No synchronisation is needed."""


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    turns: int,
    *,
    warmup: int = 1,
    align: Callable[[], object] = nothing,
    synchronize: Callable[[], object] = nothing,
) -> Seconds:
    """Seconds of each contestant in each of `turns` turns; `warmup` turns before are not counted.

    align: before each contestant starts, outside its time (a barrier of all ranks). synchronize: before the clock is read (a GPU).
    """
    names = list(contestants)
    seconds: Seconds = {name: [] for name in names}
    for turn in range(-warmup, turns):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            align()
            synchronize()
            begun = time.perf_counter()
            contestants[name]()
            synchronize()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def slowest_rank(seconds: Seconds) -> Seconds:
    """Per turn, the time of the slowest rank."""
    if not dist.is_initialized():
        return seconds
    values = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(seconds, values.tolist(), strict=True))


def speed_ratio(seconds: Seconds, name: str, reference: str) -> dict[str, Any]:
    """How many times as fast as the reference: median, range, number of pairs."""
    return _ratio("speed_ratio", name, reference, seconds[reference], seconds[name])


def time_ratio(seconds: Seconds, name: str, reference: str) -> dict[str, Any]:
    """How many times the reference's time the contestant takes: median, range, number of pairs."""
    return _ratio("time_ratio", name, reference, seconds[name], seconds[reference])


def _ratio(kind: str, name: str, reference: str, above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    return {
        "contestant": name,
        "reference": reference,
        kind: statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "pairs": len(ratios),
    }


def pin_rank(local_rank: int) -> None:
    """Give this process one core of its own, where the machine has enough of them."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[local_rank % len(cores)]})


def versions() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def command_line() -> str:
    """The command that runs this script again."""
    ranks = os.environ.get("WORLD_SIZE")
    launcher = "python" if ranks is None else f"torchrun --nproc-per-node {ranks}"
    return f"{launcher} {shlex.join([os.path.relpath(sys.argv[0], REPOSITORY), *sys.argv[1:]])}"


class Report:
    """Prints results as they come, and keeps them for a JSON file. Silent on every rank but the first."""

    def __init__(self, json_file: pathlib.Path | None = None, *, speaks: bool = True) -> None:
        self.json_file, self.speaks = json_file, speaks
        self.results: list[dict[str, Any]] = []
        self.versions = versions()
        self.command = command_line()
        self.say("versions: " + ", ".join(f"{name} {value}" for name, value in self.versions.items()))
        self.say(f"command: {self.command}")

    def say(self, text: str) -> None:
        """One line."""
        if self.speaks:
            print(text, flush=True)

    def ratio(self, title: str, values: Mapping[str, Any], target: str = "", **more: Any) -> None:
        """One line with ratio, range and pairs; `values` as `speed_ratio` gives them."""
        self.results.append({"title": title, **values, **more, "target": target})
        low, high = values["range"]
        self.say(
            f"{title}: {values['contestant']} / {values['reference']} speed ratio {values['speed_ratio']:.3f} "
            f"(range {low:.3f}-{high:.3f}, {values['pairs']} pairs){'; target ' + target if target else ''}"
        )

    def time_ratio(self, title: str, values: Mapping[str, Any], target: str = "", **more: Any) -> None:
        """The same for `values` as `time_ratio` gives them."""
        self.results.append({"title": title, **values, **more, "target": target})
        low, high = values["range"]
        self.say(
            f"{title}: {values['contestant']} / {values['reference']} time ratio {values['time_ratio']:.3f} "
            f"(range {low:.3f}-{high:.3f}, {values['pairs']} pairs){'; target ' + target if target else ''}"
        )

    def fact(self, title: str, value: str, **more: Any) -> None:
        """One line that is no ratio."""
        self.results.append({"title": title, "value": value, **more})
        self.say(f"{title}: {value}")

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A Markdown table."""
        self.results.append({"title": title, "header": list(header), "rows": [list(row) for row in rows]})
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        self.say(title)
        for row in [header, ["-" * width for width in widths], *rows]:
            self.say("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")

    def close(self) -> None:
        """Write the JSON file, if one was asked for."""
        if self.json_file is not None and self.speaks:
            content = {"command": self.command, "versions": self.versions, "results": self.results}
            self.json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def add_common_arguments(parser: argparse.ArgumentParser, pairs: int) -> None:
    """--pairs, --json."""
    parser.add_argument("--pairs", type=int, default=pairs, help=f"timed turns; fewer than 5 mean little (default {pairs})")
    parser.add_argument("--json", type=pathlib.Path, default=None, help="also write versions and results to this file")
