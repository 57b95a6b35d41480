"""Time from the start of the process to the end of the first training step, product against plain torch (target 7: <= 1.2x).

    python scripts/bench/bench_start.py [--pairs 6] [--threads 1] [--tiny]

The product is `pretrain_gpt.py` as a user types it, on synthetic data; the yardstick is `plain_gpt.py`, which imports torch alone.
Both build reference job R (or a tiny one), train one step of one sample and print a line, at which the clock stops. Shown as well: the
packages that the product imports and the yardstick does not, with the time of the import.
"""

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from scripts.bench.common import REPOSITORY, Report, add_common_arguments, interleave
from scripts.bench.job_flags import run_flags
from scripts.bench.plain_gpt import TINY, Job

FIRST_STEP = re.compile(r"iteration +1\b")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def commands(job: Job) -> dict[str, list[str]]:
    """Arguments of python for both contestants."""
    product = run_flags(job, micro_batch=1, global_batch=1, iterations=1)
    plain = [f"--{name}={getattr(job, name)}" for name in ("layers", "hidden", "heads", "ffn", "vocab", "sequence")]
    return {
        "product": [str(REPOSITORY / "pretrain_gpt.py"), *product],
        "plain torch": [str(REPOSITORY / "scripts" / "bench" / "plain_gpt.py"), *plain],
    }


def environment(threads: int) -> dict[str, str]:
    """This process's, without a launcher's variables."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return kept | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}


def first_step(arguments: Sequence[str], threads: int) -> float:
    """Start python, and return the seconds until it prints its first step; waits for its end."""
    begun = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(threads)
    ) as process:
        assert process.stdout is not None
        seconds = next((time.perf_counter() - begun for line in process.stdout if FIRST_STEP.search(line)), None)
        _, errors = process.communicate()
    if seconds is None or process.returncode:
        raise SystemExit(f"{' '.join(arguments)}\nended with exit code {process.returncode}:\n{errors}")
    return seconds


def imported_packages(arguments: Sequence[str], threads: int) -> dict[str, int]:
    """Top-level package -> microseconds that its modules took to import, what they import themselves not counted."""
    run = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], env=environment(threads), capture_output=True, text=True, check=True
    )
    packages: dict[str, int] = {}
    for own, name in re.findall(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", run.stderr, re.MULTILINE):
        package = name.split(".")[0]
        packages[package] = packages.get(package, 0) + int(own)
    return packages


def report_imports(report: Report, runs: dict[str, list[str]], threads: int) -> None:
    """What only the product imports; the standard library is left out."""
    own, plain = (imported_packages(arguments, threads) for arguments in runs.values())
    extra = {name: time_us for name, time_us in own.items() if name not in plain and name not in sys.stdlib_module_names}
    report.results.append({"title": "imports", "microseconds": extra})
    listed = sorted(extra.items(), key=lambda item: -item[1])
    report.say("only the product imports: " + ", ".join(f"{name} {time_us / 1000:.0f} ms" for name, time_us in listed))


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_common_arguments(parser, pairs=6)
    parser.add_argument("--threads", type=int, default=1, help="of both contestants")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead of R: almost all of the time is the start")
    options = parser.parse_args(argv)
    report = Report(options.json)
    runs = commands(TINY if options.tiny else Job())

    def timed(name: str) -> Callable[[], None]:
        return lambda: times[name].append(first_step(runs[name], options.threads))

    times: dict[str, list[float]] = {name: [] for name in runs}
    interleave({name: timed(name) for name in runs}, options.pairs, warmup=0 if options.tiny else 1)  # warms the file cache
    product, plain = (values[-options.pairs :] for values in times.values())
    ratios = [own / theirs for own, theirs in zip(product, plain, strict=True)]
    title = "start to first step, " + ("tiny model" if options.tiny else "job R")
    report.results.append({"title": title, "product_s": product, "plain_torch_s": plain, "time_ratio": statistics.median(ratios)})
    report.say(
        f"{title}: product {statistics.median(product):.2f} s, plain torch {statistics.median(plain):.2f} s, product / plain torch "
        f"time ratio {statistics.median(ratios):.3f} (range {min(ratios):.3f}-{max(ratios):.3f}, {len(ratios)} pairs); target <= 1.2"
    )
    report_imports(report, runs, options.threads)
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
