"""Time of the sample index: 5 M documents into samples of 2048 tokens, and a blend of 5 M samples; best of some rounds, range.

    python scripts/bench/bench_data_index.py [--documents 5000000] [--seq-length 2048] [--rounds 5]

Timed is everything that a first start computes: documents shuffled, sample boundaries, samples shuffled; no file is read.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron.core.datasets.index_helpers import blending_indices, epoch_order, megatron_order


def timed(name: str, work: Callable[[], object], rounds: int) -> None:
    """Print the seconds that `work` takes."""
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    print(f"{name}: {min(seconds):.3f} s (range {min(seconds):.3f}-{max(seconds):.3f} s, {rounds} rounds)")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=5_000_000)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    lengths = np.random.default_rng(0).integers(1, 4000, options.documents, dtype=np.int32)
    documents = np.arange(options.documents, dtype=np.int32)
    samples = (int(lengths.sum(dtype=np.int64)) - 1) // options.seq_length
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}")
    print(f"{options.documents} documents, {samples} samples of {options.seq_length} tokens")
    for name, order in (("index, Megatron-LM's order", megatron_order), ("index, epoch order", epoch_order)):
        timed(
            name,
            lambda order=order: order(lengths, documents, seq_length=options.seq_length, num_samples=samples, seed=1234),  # type: ignore[misc]
            options.rounds,
        )
    for weights in ((0.7, 0.3), tuple(1.0 / k for k in range(1, 21))):
        timed(
            f"blend of {len(weights)} sets, {options.documents} samples",
            lambda weights=weights: blending_indices(weights, options.documents),  # type: ignore[misc]
            options.rounds,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
