"""Merge token files: the documents of several .bin/.idx pairs, in a stated order, as one pair.

    python tools/merge_datasets.py --input data/shards --output-prefix data/corpus_text_document
    python tools/merge_datasets.py --inputs data/a data/b data/c --output-prefix data/corpus_text_document

`--input` takes every pair of a folder in natural order (s1, s2, ..., s10); `--inputs` keeps the order given. Inputs are checked
first, and nothing appears under the output name before it is complete.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.datasets.indexed_dataset import IndexedDataset, bin_path, idx_path, merge
from megatron.core.errors import DataError, MegatronError


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sort key under which numbers inside names count as numbers: s2 before s10."""
    parts = re.split(r"(\d+)", text)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]


def prefixes_in(folder: str) -> list[str]:
    """Prefixes of all pairs of a folder, in natural order. DataError where a .bin or .idx has no partner."""
    if not os.path.isdir(folder):
        raise DataError(f"--input {folder} is not a folder; give a folder of .bin/.idx pairs, or prefixes with --inputs")
    stems = {suffix: {p.stem for p in Path(folder).glob(f"*{suffix}")} for suffix in (".bin", ".idx")}
    alone = sorted(stems[".bin"] ^ stems[".idx"], key=natural_key)
    if alone:
        raise DataError(
            f"in {folder} only one of .bin and .idx is there for: {', '.join(alone)}; remove or complete these pairs"
        )
    if not stems[".bin"]:
        raise DataError(f"{folder} holds no .bin/.idx pairs")
    return [os.path.join(folder, stem) for stem in sorted(stems[".bin"], key=natural_key)]


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code: 0 done, 2 wrong options or data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", metavar="FOLDER", help="folder whose pairs are merged in natural order")
    source.add_argument("--inputs", metavar="PREFIX", nargs="+", help="prefixes, merged in this order")
    parser.add_argument("--output-prefix", metavar="PREFIX", required=True, help="prefix of the merged pair")
    options = parser.parse_args(argv)
    try:
        prefixes = prefixes_in(options.input) if options.input else options.inputs
        merge(prefixes, options.output_prefix)
        merged = IndexedDataset(options.output_prefix)
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}; nothing was written", file=sys.stderr)
        return 1
    for prefix in prefixes:
        print(f"merged {prefix}")
    print(
        f"wrote {bin_path(options.output_prefix)} and {idx_path(options.output_prefix)}: "
        f"{merged.num_documents} documents, {merged.num_tokens} tokens"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
