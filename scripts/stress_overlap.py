"""Trains the suite's tiny job with all overlap on 2 ranks again and again under load, and compares what the runs leave.

The job is T0 of `tests/harness/t0.py` on the data D0, 10 steps, several buckets, accumulation, started as users start it. Compared
are the sha256 of every logical tensor of the last checkpoint (weights, main params, moments) and loss and gradient norm of each step.
The load is one busy process per core; each ends itself as soon as its parent is gone.
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.harness.d0 import write_d0
from tests.harness.t0 import read_metrics, run_pretrain, t0_flags
from tools.inspect_checkpoint import describe, open_step

BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(1000000):
        pass
"""
OVERLAP = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "overlap_param_gather_with_optimizer_step": True,
    "ddp_bucket_size": 2000,
}


@contextlib.contextmanager
def every_core_busy() -> Iterator[int]:
    """Busy processes, one per core, for as long as the context lasts; yields their number."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]))
        yield count
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def one_run(data: str, folder: Path) -> tuple[str, str, int]:
    """(digest of all logical state, digest of losses and norms, number of tensors) of a fresh run."""
    done = run_pretrain(t0_flags(data, save=str(folder), micro_batch_size=1, **OVERLAP), nproc=2, timeout=600)
    if done.returncode:
        sys.exit(f"the run failed with exit code {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr}")
    with open_step(folder) as reader:
        tensors = describe(reader)
    steps = [[line[name] for name in ("iteration", "lm_loss", "grad_norm")] for line in read_metrics(folder / "metrics.jsonl")]
    return _digest({name: entry["sha256"] for name, entry in tensors.items()}), _digest(steps), len(tensors)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("repetitions", nargs="?", type=int, default=10, help="runs to compare (default 10)")
    repetitions = parser.parse_args(argv).repetitions
    if repetitions < 2:
        parser.error(f"repetitions={repetitions}: at least 2 runs can be compared")
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(143))
    found = []
    with tempfile.TemporaryDirectory() as folder, every_core_busy() as busy:
        data = write_d0(Path(folder) / "d0")
        print(f"{repetitions} runs on 2 ranks, {busy} busy processes on {busy} core(s)\n")
        print("| run | sha256 of all logical state | sha256 of losses and norms | seconds |\n|---|---|---|---|")
        for index in range(repetitions):
            begun = time.monotonic()
            state, losses, tensors = one_run(data, Path(folder) / f"run{index}")
            found.append((state, losses))
            print(f"| {index + 1} | {state[:16]} | {losses[:16]} | {time.monotonic() - begun:.1f} |", flush=True)
    equal = len(set(found)) == 1
    print(f"\n{tensors} tensors, {'all runs are bit-equal' if equal else f'{len(set(found))} different results'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
