"""Count what token files hold: documents, tokens, and how long the documents are.

    python tools/count_tokens.py data/corpus_text_document data/other_text_document [--json] [--entropy]

The index is read and checked against the size of the token file; the tokens themselves are read only for `--entropy`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.datasets.indexed_dataset import IndexedDataset, bin_path
from megatron.core.errors import MegatronError

CHUNK = 1 << 24  # tokens read at a time


def unigram_entropy(dataset: IndexedDataset, prefix: str) -> float:
    """Entropy of the token frequencies, nats per token: the loss of a model that knows frequencies and no context."""
    tokens = np.memmap(bin_path(prefix), dtype=dataset.dtype, mode="r")
    histogram = np.zeros(0, dtype=np.int64)
    for start in range(0, len(tokens), CHUNK):
        part = np.bincount(tokens[start : start + CHUNK])
        width = max(len(part), len(histogram))
        histogram = np.pad(histogram, (0, width - len(histogram))) + np.pad(part, (0, width - len(part)))
    shares = histogram[histogram > 0] / histogram.sum()
    return float(-(shares * np.log(shares)).sum())


def counts(prefix: str, entropy: bool = False) -> dict[str, Any]:
    """Counts of one pair; document lengths are in tokens, EOD included. Raises DataError for a damaged pair."""
    dataset = IndexedDataset(prefix)
    ends = np.concatenate([[0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)])
    lengths = np.diff(ends[dataset.document_indices])
    found = {
        "prefix": prefix,
        "documents": dataset.num_documents,
        "empty_documents": int((lengths == 0).sum()),
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
        "dtype": str(dataset.dtype),
        "bytes": dataset.num_tokens * dataset.dtype.itemsize,
        "document_tokens": {
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": float(lengths.mean()),
            "max": int(lengths.max()),
        },
    }
    return found | ({"unigram_entropy_nats": unigram_entropy(dataset, prefix)} if entropy else {})


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code: 0 done, 2 wrong options or damaged data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("prefixes", metavar="PREFIX", nargs="+", help="path of a .bin/.idx pair without suffix")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--entropy", action="store_true", help="also the entropy of the token frequencies, in nats")
    options = parser.parse_args(argv)
    try:
        found = [counts(prefix, options.entropy) for prefix in options.prefixes]
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    totals = {name: sum(one[name] for one in found) for name in ("documents", "tokens")}
    if options.json:
        print(json.dumps({"datasets": found, "total": totals}, indent=2))
        return 0
    for one in found:
        lengths = one["document_tokens"]
        print(
            f"{one['prefix']}: {one['documents']:,} documents ({one['empty_documents']:,} empty), {one['tokens']:,} tokens as "
            f"{one['dtype']}; tokens per document: min {lengths['min']:,}, median {lengths['median']:,.1f}, "
            f"mean {lengths['mean']:,.1f}, max {lengths['max']:,}"
            + (f"; unigram entropy {one['unigram_entropy_nats']:.4f} nats" if options.entropy else "")
        )
    if len(found) > 1:
        print(f"total: {totals['documents']:,} documents, {totals['tokens']:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
