"""Runs the whole matrix of `tests/harness/dp_matrix.py` and prints it as two Markdown tables."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.harness.distributed import run_distributed
from tests.harness.dp_matrix import ALL, BUCKET_SIZES, compare_combinations, compare_engines

LARGEST_DEVIATION = 1e-12
BUCKETS = {1: "one parameter", 150: "150 elements", None: "everything"}


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3, 4], choices=(1, 2, 3, 4), help="data-parallel sizes")
    sizes = parser.parse_args(argv).ranks
    bad = combinations(sizes)
    bad += engines(sizes)
    print("\neverything agrees" if not bad else "\nwhat does not agree:\n" + "\n".join(bad))
    return 1 if bad else 0


def combinations(sizes: Sequence[int]) -> list[str]:
    """Overlap options; prints the table and returns what differs."""
    print("| ranks | bucket | combinations | bit-equal to no overlap |\n|---|---|---|---|")
    bad = []
    for size in sizes:
        for bucket_size in BUCKET_SIZES:
            by_rank = run_distributed(compare_combinations, size, ALL, bucket_size, timeout=3600)
            differ = {combination for found in by_rank for combination, texts in found.items() if texts}
            print(f"| {size} | {BUCKETS[bucket_size]} | {len(ALL)} | {len(ALL) - len(differ)} |", flush=True)
            bad += [f"{size} ranks, bucket of {BUCKETS[bucket_size]}: {combination}" for combination in differ]
    return bad


def engines(sizes: Sequence[int]) -> list[str]:
    """Plain, distributed and single-process optimizer; prints the table and returns what differs."""
    print("\n| ranks | bucket | microbatches | plain = distributed | gradient | AdamW weights | norm | loss |\n|---|---|---|---|---|---|---|---|")
    bad = []
    for size in sizes:
        for bucket_size in BUCKET_SIZES:
            for accumulate in (1, 4):
                by_rank = run_distributed(compare_engines, size, bucket_size, accumulate, timeout=600)
                equal = not any(rank.plain_differs for rank in by_rank)
                worst = [max(getattr(rank, name) for rank in by_rank) for name in ("gradient", "update", "norm", "loss")]
                row = f"| {size} | {BUCKETS[bucket_size]} | {accumulate} | {'bit-equal' if equal else 'DIFFERS'} | "
                row += " | ".join(f"{value:.1e}" for value in worst) + " |"
                print(row, flush=True)
                if not equal or max(worst) >= LARGEST_DEVIATION:
                    bad.append(row)
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
