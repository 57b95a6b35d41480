"""Compare two layouts of a model tensor by tensor: where do they part first, and is it rounding or a fault?

    python tools/parity.py A.yaml B.yaml
    python tools/parity.py run.yaml run.yaml --set-b parallel.tensor_model_parallel_size=2 --steps 3

Both runs are made on this machine, one after the other, on as few CPU processes as their parallel sizes need: a small model with
the same heads per group, layers per stage, schedule, engine and recomputation, the same weights by logical name and the same
samples, without dropout. Compared are the outputs of layers, losses, gradient norm, every gradient and every updated weight.

Each run is made in fp32 and in fp64. Rounding shrinks by 29 bits from one to the other; what stays is a fault. In fp64 a relative
difference of 1e-10 is allowed, in fp32 2^-24 x D x sqrt(n) for D matrix products one after the other and sums of n terms.

Exit code: 0 equal within the bounds, 1 a fault (or a run that fails), 2 wrong usage or two different models.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import rich.console
import rich.table

from megatron.core.errors import ConfigError, MegatronError
from megatron.training.config import RunConfig, load_run_config
from megatron.training.parity.ranks import Job, run_ranks, save_start
from megatron.training.parity.records import Step, read_step
from megatron.training.parity.reduce_config import Run, comparable, longest_sum
from megatron.training.parity.verdict import Line, compare, rounding_bound

_SHOWN = 24


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("config_a", metavar="CONFIG_A", help="YAML of the run that is right, or is taken to be")
    parser.add_argument("config_b", metavar="CONFIG_B", help="YAML of the other; may be the same file")
    parser.add_argument("--set-a", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="change a field of A; repeatable")
    parser.add_argument("--set-b", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="change a field of B; repeatable")
    parser.add_argument("--ranks-a", type=int, help="processes of A (default: as few as its parallel sizes allow)")
    parser.add_argument("--ranks-b", type=int, help="processes of B")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps (default 2)")
    parser.add_argument("--full-size", action="store_true", help="keep model and sequence length as they are")
    parser.add_argument("--use-data", action="store_true", help="A's data and tokenizer instead of synthetic tokens")
    parser.add_argument("--precision", nargs="+", choices=("bf16", "fp32", "fp64"), default=["fp32", "fp64"], help="one, or a narrow and a wide one (default: fp32 fp64)")
    parser.add_argument("--no-activations", action="store_true", help="leave out the outputs of layers (less memory)")
    parser.add_argument("--all", action="store_true", help="show every tensor")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a run may take (default 600)")
    return parser.parse_args(argv)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """lines: of all steps, in the order in which a fault spreads. bounds: by precision."""

    runs: tuple[Run, Run]
    bounds: dict[str, float]
    lines: list[Line]

    @property
    def first_fault(self) -> Line | None:
        """Where the runs part."""
        return next((line for line in self.lines if line.verdict == "fault"), None)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns the exit code."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        outcome = run(options)
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(as_json(outcome) if options.json else "", end="")
    if not options.json:
        show(outcome, everything=options.all)
    return 1 if outcome.first_fault else 0


def run(options: argparse.Namespace) -> Outcome:
    """Both runs and their comparison. Raises ConfigError for wrong usage, MegatronError for a run that fails."""
    if options.steps < 1 or min(options.ranks_a or 1, options.ranks_b or 1) < 1 or options.timeout <= 0:
        raise ConfigError("--steps, --ranks-a, --ranks-b and --timeout must be at least 1")
    precisions = tuple(sorted(dict.fromkeys(options.precision), key=("bf16", "fp32", "fp64").index))
    a, b = (load(file, changes) for file, changes in ((options.config_a, options.set_a), (options.config_b, options.set_b)))
    runs = comparable(
        a, b, ranks=(options.ranks_a, options.ranks_b), steps=options.steps, full_size=options.full_size, use_data=options.use_data
    )
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        return compare_runs(runs, precisions, options.steps, pathlib.Path(folder), not options.no_activations, options.timeout)


def load(file: str, changes: Sequence[str]) -> RunConfig:
    """A configuration file with changes."""
    return load_run_config(["--config", file, *(word for change in changes for word in ("--set", change))]).config


def compare_runs(
    runs: tuple[Run, Run], precisions: tuple[str, ...], steps: int, folder: pathlib.Path, activations: bool, timeout_s: float
) -> Outcome:
    """Run A, then B from A's start, and compare step by step."""
    start = folder / "start.pt"
    for name, one in zip("AB", runs, strict=True):
        print(f"{name}: {one.ranks} process(es), {describe(one.config)} ...", file=sys.stderr, flush=True)
        job = Job(one, precisions, str(folder / name), None if name == "A" else str(start), activations)
        run_ranks(job, timeout_s, folder / f"store{name}")
        if name == "A":
            save_start(read_step(folder / name / precisions[-1], 0, one.ranks).of_kind("initial"), start)
    config = runs[0].config
    bounds = {p: rounding_bound(p, config.model.num_layers, longest_sum(config)) for p in precisions}
    lines = []
    for step in range(steps + 1):
        both = [{p: read_step(folder / name / p, step, one.ranks) for p in precisions} for name, one in zip("AB", runs, strict=True)]
        check_same_model(*(next(iter(steps_of.values())) for steps_of in both))
        lines += compare(both[0], both[1], bounds)
    return Outcome(runs, bounds, lines)


def check_same_model(a: Step, b: Step) -> None:
    """Raise ConfigError where one has a parameter, or a shape, that the other has not."""
    first, second = ({name: tuple(t.shape) for name, t in step.of_kind("initial").items()} for step in (a, b))
    differ = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    if differ:
        name = differ[0]
        raise ConfigError(
            f"the two configurations are different models: {name} is {first.get(name, 'not there')} in A and "
            f"{second.get(name, 'not there')} in B ({len(differ)} differ); give two layouts of one model"
        )


def describe(config: RunConfig) -> str:
    """Sizes and layout in a line."""
    model, parallel = config.model, config.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size, "cp": parallel.context_parallel_size, "pp": parallel.pipeline_model_parallel_size,
        "chunks": parallel.pipeline_chunks, "ep": parallel.expert_model_parallel_size,
    }  # fmt: skip
    layout = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    layout += ["sequence parallel"] * parallel.sequence_parallel + [parallel.pipeline_schedule] * (parallel.pipeline_model_parallel_size > 1)
    return (
        f"{', '.join(layout) or 'no model parallelism'}; {model.num_layers} layers, hidden {model.hidden_size}, "
        f"{model.num_attention_heads} heads in {model.num_kv_heads} groups, sequence {config.data.seq_length}, "
        f"global batch {config.training.global_batch_size}"
    )


def as_json(outcome: Outcome) -> str:
    """Everything, for programs."""
    fault = outcome.first_fault
    lines = [{**dataclasses.asdict(line), "ratio": line.ratio if math.isfinite(line.ratio) else None} for line in outcome.lines]
    content: dict[str, Any] = {
        "equal": fault is None,
        "first_fault": None if fault is None else {"step": fault.step, "kind": fault.kind, "name": fault.name, "why": fault.why},
        "bounds": outcome.bounds,
        "runs": {name: {"ranks": one.ranks, "what": describe(one.config)} for name, one in zip("AB", outcome.runs, strict=True)},
        "tensors": lines,
    }
    return json.dumps(content, default=str) + "\n"


def show(outcome: Outcome, *, everything: bool) -> None:
    """The verdict, and a table of what matters."""
    console = rich.console.Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    fault, precisions = outcome.first_fault, list(outcome.bounds)
    table = rich.table.Table("step", "what", "name", *(f"difference {p}" for p in precisions), "norm B / A", "verdict")
    for line in outcome.lines if everything else _telling(outcome):
        found = [_shown(line.differences.get(p)) for p in precisions]
        ratio = f"{line.ratio:.6g}" if math.isfinite(line.ratio) else ""
        style = "bold red" if line is fault else "red" if line.verdict == "fault" else None
        table.add_row(str(line.step), line.kind, line.name, *found, ratio, line.verdict, style=style)
    console.print(table)
    counts = {verdict: sum(line.verdict == verdict for line in outcome.lines) for verdict in ("equal", "rounding", "fault")}
    bounds = ", ".join(f"{p} {bound:.1e}" for p, bound in outcome.bounds.items())
    print(f"{len(outcome.lines)} tensors: {counts['equal']} bit-equal, {counts['rounding']} rounding, {counts['fault']} fault; bounds: {bounds}")
    if fault is None:
        print("the two layouts agree: what differs is rounding" if counts["rounding"] else "the two layouts agree bit by bit")
    else:
        print(f"FAULT, first at {fault.place}: {fault.why}")
        print(f"before it: {_before(outcome.lines, fault)}")


def _telling(outcome: Outcome) -> list[Line]:
    """From the first fault on, the first ones; without a fault the largest difference of each step and kind."""
    fault = outcome.first_fault
    if fault is not None:
        start = outcome.lines.index(fault)
        return [line for line in outcome.lines[max(0, start - 2) :] if line.verdict == "fault" or outcome.lines.index(line) < start][:_SHOWN]
    worst: dict[tuple[int, str], Line] = {}
    for line in outcome.lines:
        key = line.step, line.kind
        if key not in worst or max(line.differences.values()) > max(worst[key].differences.values()):
            worst[key] = line
    return list(worst.values())


def _before(lines: list[Line], fault: Line) -> str:
    earlier = [line for line in lines[: lines.index(fault)] if line.kind == fault.kind and line.step == fault.step]
    if earlier:
        return f"{len(earlier)} {fault.kind} tensor(s) of this step agree, the last is {earlier[-1].name}"
    done = lines[: lines.index(fault)]
    return f"everything agrees, the last is {done[-1].place}" if done else "nothing"


def _shown(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


if __name__ == "__main__":
    sys.exit(main())
