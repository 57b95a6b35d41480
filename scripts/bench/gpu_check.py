"""One check of everything that needs a GPU, in under 10 minutes: numerics, compile, a training run, throughput and memory.

    bash scripts/gpu_check.sh                              # one GPU, nothing to install beside torch, numpy and pyyaml
    bash scripts/gpu_check.sh --skip throughput
    bash scripts/gpu_check.sh --device cpu --tiny          # tries the script itself where there is no GPU

Prints one line per check as it goes, and a table at the end. Exit code 0: nothing failed; 1: something did; 2: no GPU.
Optional packages that are absent are named; none is needed. Whatever does not fit into the time budget is skipped and says so.
"""

import argparse
import dataclasses
import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import torch

from megatron.core.backends.apex import apex_fused_adam
from megatron.core.backends.optional import probe
from scripts.bench import gpu_throughput
from scripts.bench.common import REPOSITORY, Report, add_common_arguments
from scripts.bench.gpu_parity import Case, ParityCheck, attention_cases

OPTIONAL_PACKAGES = ("transformer_engine.pytorch", "apex.optimizers", "flash_attn", "triton")
GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One line of the table. status: PASS, FAIL, SKIP or INFO."""

    section: str
    check: str
    status: str
    detail: str


class NotMeasuredError(Exception):
    """A check cannot be made here; its text says why."""


class Session:
    """Outcomes so far, and the time that is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.tiny, self.skipped, self.pairs = options.tiny, tuple(options.skip), options.pairs
        self.report = Report(options.json)
        self.outcomes: list[Outcome] = []
        self._end = time.monotonic() + 60 * options.budget_minutes

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def note(self, section: str, check: str, status: str, detail: str) -> None:
        """Keep and print an outcome."""
        outcome = Outcome(section, check, status, detail)
        self.outcomes.append(outcome)
        self.report.results.append({"title": "check", **dataclasses.asdict(outcome)})
        self.report.say(f"[{status}] {section}: {check}: {detail}")

    def check(self, section: str, name: str, needed_s: float, work: Callable[[], tuple[bool, str]]) -> None:
        """Run `work` -> (passed, detail), if `needed_s` seconds are left. Whatever it raises is a failure of this check alone."""
        if self.left() < needed_s:
            self.note(section, name, "SKIP", f"needs about {needed_s:.0f} s, {max(0.0, self.left()):.0f} s of the budget are left")
            return
        begun = time.monotonic()
        try:
            passed, detail = work()
        except NotMeasuredError as reason:
            self.note(section, name, "SKIP", str(reason))
            return
        except Exception as error:
            traceback.print_exc()
            passed, detail = False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        self.note(section, name, "PASS" if passed else "FAIL", f"{detail} ({time.monotonic() - begun:.1f} s)")


# ------------------------------------------------------------------------------------------------------------- machine


def machine(session: Session) -> None:
    """Device, versions, optional packages."""
    if session.device.type == "cuda":
        properties = torch.cuda.get_device_properties(session.device)
        text = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, compute capability {properties.major}.{properties.minor}"
        session.note("machine", "device", "INFO", f"{text}, {torch.cuda.device_count()} visible")
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        session.note("machine", "bf16", "INFO", "in hardware" if bf16 else "emulated: figures below say little")
    else:
        session.note("machine", "device", "INFO", "cpu: this tries the script, it says nothing about GPUs")
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    session.note("machine", "torch", "INFO", f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {cudnn}")
    for name in OPTIONAL_PACKAGES:
        found = probe(name)
        version = getattr(found.module, "__version__", "present")
        session.note("machine", f"optional package {name}", "INFO", str(version) if found.usable else f"absent ({found.reason})")


# ------------------------------------------------------------------------------------------------------------ numerics


def numerics(session: Session) -> None:
    """One step of a small model, plain and by every attention backend, against fp64 on the CPU."""
    parity = ParityCheck()
    for bf16 in (False, True):
        name = f"one step in {'bf16' if bf16 else 'fp32'} against the CPU"
        session.check("numerics", name, 10, lambda bf16=bf16: parity(Case(session.device, bf16)))  # type: ignore[misc]
    for title, case, reason in attention_cases(session.device):
        if case is None:
            session.note("numerics", title, "INFO", f"cannot be used here: {reason}")
        elif case.attention != "torch" or case.packed:  # torch, not packed: checked above
            session.check("numerics", title, 20, lambda case=case: parity(case))  # type: ignore[misc]


def compile_(session: Session) -> None:
    """The layers compiled by torch.compile."""
    parity = ParityCheck()
    for bf16 in (False, True):
        name = f"compiled layers in {'bf16' if bf16 else 'fp32'} against the CPU"
        case = Case(session.device, bf16, compiled=True)
        session.check("compile", name, 60, lambda case=case: parity(case))  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------------------ training


def pretrain(session: Session, folder: pathlib.Path, name: str, flags: Sequence[str]) -> list[dict[str, float]]:
    """Lines of metrics.jsonl of a run of `pretrain_gpt.py` on configs/debug_cpu.yaml: distributed optimizer, overlap, mock data.

    Raises RuntimeError with the end of its output if it fails.
    """
    metrics = folder / f"{name}.jsonl"
    arguments = ["--config", str(REPOSITORY / "configs" / "debug_cpu.yaml"), "--metrics-file", str(metrics), *flags]
    arguments += ["--eval-iters", "0", "--lr-decay-style", "constant", "--overlap-param-gather-with-optimizer-step"]
    run = subprocess.run(
        [sys.executable, str(REPOSITORY / "pretrain_gpt.py"), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=max(10.0, session.left()),
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"exit code {run.returncode}: {' / '.join((run.stderr or run.stdout).strip().splitlines()[-3:])}")
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def compared(own: list[dict[str, float]], theirs: list[dict[str, float]], allowed: float) -> tuple[bool, str]:
    """Loss and gradient norm of two runs, step by step."""
    if len(own) != len(theirs):
        return False, f"{len(own)} steps, expected {len(theirs)}"
    names = ("lm_loss", "grad_norm")
    worst = {n: max(abs(a[n] - b[n]) / abs(b[n]) for a, b in zip(own, theirs, strict=True)) for n in names}
    text = ", ".join(f"{name} {value:.1e}" for name, value in worst.items())
    return max(worst.values()) <= allowed, f"{len(own)} steps, loss {own[-1]['lm_loss']:.4f}; deviate at most {text}; allowed {allowed:.0e}"


def training(session: Session) -> None:
    """Whole runs of the command line: GPU against CPU, bf16 against fp32, a resumed run against one without a stop.

    Allowed: 1e-3 in fp32, where Adam turns gradients that are noise into steps of full size; 5e-2 in bf16, whose gradients are
    known to 2e-2 (gpu_parity) and whose weights are rounded to 2^-9; 1e-4 after a resume, since GPU kernels may add in any order.
    """
    own = ["--distributed-backend", "gloo"] if session.device.type == "cpu" else []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = pathlib.Path(name)
        runs: dict[str, list[dict[str, float]]] = {}

        def first() -> tuple[bool, str]:
            runs["cpu"] = pretrain(session, folder, "cpu", ["--train-iters", "6", "--distributed-backend", "gloo"])
            runs["own"] = pretrain(session, folder, "own", ["--train-iters", "6", *own])
            return compared(runs["own"], runs["cpu"], 1e-3)

        def bf16() -> tuple[bool, str]:
            return compared(pretrain(session, folder, "bf16", ["--train-iters", "6", "--bf16", *own]), runs["cpu"], 5e-2)

        def resumed() -> tuple[bool, str]:
            saved = ["--save", str(folder / "run"), *own]
            first_half = pretrain(session, folder, "resumed", ["--train-iters", "6", "--exit-interval", "3", *saved])
            both = pretrain(session, folder, "resumed", ["--train-iters", "6", *saved])
            passed, text = compared(both, runs["own"], 1e-4)
            return passed and len(first_half) == 3, text

        session.check("training", "pretrain_gpt.py in fp32 against the CPU", 40, first)
        session.check("training", "pretrain_gpt.py in bf16 against fp32 on the CPU", 20, bf16)
        session.check("training", "saved and resumed", 40, resumed)
        for backend in fused_adams(session):
            flags = ["--train-iters", "6", "--optimizer-backend", backend, *own]
            run = lambda name=backend, flags=flags: compared(  # noqa: E731
                pretrain(session, folder, name, flags), runs["cpu"], 1e-3
            )
            session.check("training", f"optimizer_backend={backend} against torch's", 30, run)


def fused_adams(session: Session) -> list[str]:
    """Optional packages whose fused Adam can be used here."""
    if session.device.type != "cuda":
        return []
    engine = probe("transformer_engine.pytorch").usable
    return [name for name, usable in (("te", engine), ("apex", apex_fused_adam()[0] is not None)) if usable]


# ---------------------------------------------------------------------------------------------------------- throughput


def throughput(session: Session) -> None:
    """Tables, and ratios to plain torch; below target 6 is reported, not failed: it is a figure, not an error."""
    compiled = "compile" not in session.skipped
    for size in gpu_throughput.TINY_SIZES if session.tiny else gpu_throughput.SIZES:
        needed = 5 if session.tiny else 150 if size.job.layers > 12 else 100
        session.check("throughput", size.name, needed, lambda size=size: measured(session, size, compiled))  # type: ignore[misc]
        gc.collect()
        if session.device.type == "cuda":
            torch.cuda.empty_cache()


def measured(session: Session, size: gpu_throughput.Size, compiled: bool) -> tuple[bool, str]:
    """One table. Raises NotMeasuredError where memory or time is short."""
    rows, ratios, reason = gpu_throughput.measure(
        size, session.device, compiled=compiled, pairs=session.pairs, seconds_left=session.left
    )
    if reason:
        raise NotMeasuredError(reason)
    header = ("contestant", "tokens/s", "ms/step", "MFU", "peak GiB")
    session.report.table(f"{size.name}, bf16, micro batch {size.micro_batch}", header, rows)
    for values in ratios:
        session.report.ratio(size.name, values, ">= 0.98")
    best = "; ".join(f"{v['contestant']} / {v['reference']} {v['speed_ratio']:.3f}" for v in ratios)
    return True, best


SECTIONS: dict[str, Callable[[Session], None]] = {
    "numerics": numerics,
    "compile": compile_,
    "training": training,
    "throughput": throughput,
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models in the throughput part")
    parser.add_argument("--skip", nargs="+", choices=tuple(SECTIONS), default=[], help="parts to leave out")
    parser.add_argument("--budget-minutes", type=float, default=9.0, help="start nothing that would go beyond (default 9)")
    add_common_arguments(parser, pairs=5)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run all parts; exit code."""
    options = parse(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: no CUDA device is visible to torch; --device cpu --tiny tries the script itself", file=sys.stderr)
        return 2
    session = Session(options)
    machine(session)
    for name, section in SECTIONS.items():
        if name in session.skipped:
            session.note(name, "all", "SKIP", "left out by --skip")
        else:
            section(session)
    rows = [[o.status, o.section, o.check, o.detail] for o in session.outcomes]
    session.report.table("summary", ("", "part", "check", "found"), rows)
    failed = sum(o.status == "FAIL" for o in session.outcomes)
    counts = {status: sum(o.status == status for o in session.outcomes) for status in ("PASS", "FAIL", "SKIP")}
    session.report.say(f"{'FAIL' if failed else 'PASS'}: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
    session.report.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
