"""Lists, checks, compares and merges checkpoints by logical tensor, whatever layout wrote them. One tensor in memory at a time.

    python tools/inspect_checkpoint.py D [--json] [--verify] [--diff D2] [--to-safetensors F]

D is a --save directory (its newest step) or one iter_* directory in it. Exit code 0, or 1 when something is damaged or differs.
"""

import argparse
import hashlib
import json
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without installation

import rich.console
import rich.table
import torch

from megatron.core.dist_checkpointing import steps
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, Manifest
from megatron.core.dist_checkpointing.reader import StepReader
from megatron.core.dist_checkpointing.serialization import DTYPES, byte_view, encode_header, item_size, lay_out
from megatron.core.errors import CheckpointError

RANK_STATE = "rng."  # belongs to a rank, not to the logical state


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("directory", metavar="D", type=Path, help="save directory (newest step) or one iter_* directory")
    parser.add_argument("--json", action="store_true", help="print iteration and, per tensor, shape, dtype and sha256 as JSON")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare every checksum")
    parser.add_argument("--diff", metavar="D2", type=Path, help="compare with another checkpoint; exit 1 if a tensor differs")
    parser.add_argument("--to-safetensors", metavar="F", type=Path, help="write the merged logical tensors to one file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns the exit code."""
    options = parse_arguments(argv)
    try:
        return run(options)
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    """What `options` ask for."""
    out = sys.stderr if options.json else sys.stdout
    code = verify(options.directory, out) if options.verify else 0
    with open_step(options.directory) as reader:
        if options.diff is not None:
            with open_step(options.diff) as other:
                code |= print_differences(reader, other, out)
        if options.to_safetensors is not None:
            write_merged(reader, options.to_safetensors)
            print(f"wrote {options.to_safetensors}", file=out)
        if options.json:
            print(json.dumps({"iteration": reader.manifest.iteration, "tensors": describe(reader)}))
        elif not options.verify and options.diff is None and options.to_safetensors is None:
            print_table(reader)
    return code


# ------------------------------------------------------------------------------------------------------------------ steps


def open_step(directory: Path) -> StepReader:
    """Reader of a step directory, or of the newest complete step of a save directory. Raises CheckpointError."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory; expected a --save directory or one iter_* in it")
    if (directory / MANIFEST_NAME).exists() or directory.name.startswith("iter_"):
        manifest = steps.read_manifest(directory)
        return open_complete(steps.Step(manifest.iteration, directory, manifest, steps.sizes_problem(directory, manifest)))
    found = steps.list_steps(directory)
    for step in found:
        if step.problem is None:
            return open_complete(step)
        print(f"warning: skipping step {step.iteration}: {step.problem}", file=sys.stderr)
    raise CheckpointError(f"{directory} holds no complete checkpoint (no iter_* directory with a sound {MANIFEST_NAME})")


def open_complete(step: steps.Step) -> StepReader:
    """Reader of an examined step. Raises CheckpointError if it is not complete."""
    if step.problem is not None or step.manifest is None:
        raise CheckpointError(f"{step.path} is not complete: {step.problem}")
    return StepReader(step.path, step.manifest)


def verify(directory: Path, out: TextIO) -> int:
    """Print every damage of the step, and of newer steps that are not complete; 1 if there is any."""
    with open_step(directory) as reader:
        problems = reader.verify()
        newest = reader.manifest.iteration
        if reader.path != directory:
            problems += [s.problem for s in steps.list_steps(directory) if s.problem is not None and s.iteration > newest]
        for problem in problems:
            print(f"damaged: {problem}", file=out)
        if not problems:
            files = reader.manifest.files
            size = sum(entry.bytes for entry in files.values()) / 1e6
            print(f"step {newest}: every checksum of {len(files)} file(s), {size:.1f} MB, is right", file=out)
    return 1 if problems else 0


# ---------------------------------------------------------------------------------------------------------------- content


def logical_names(manifest: Manifest) -> list[str]:
    """Names of the tensors that do not depend on the layout."""
    return sorted(name for name in manifest.tensors if not name.startswith(RANK_STATE))


def hashed(reader: StepReader) -> Iterator[tuple[str, str]]:
    """(name, sha256 of the row-major bytes of the logical tensor); an alias takes the hash of what it stands for."""
    known: dict[str, str] = {}
    for name in logical_names(reader.manifest):
        base = reader.manifest.tensors[name].alias_of or name
        if base not in known:
            known[base] = hashlib.sha256(byte_view(reader.read(base)).data).hexdigest()
        yield name, known[base]


def describe(reader: StepReader) -> dict[str, dict[str, object]]:
    """Per logical tensor: shape, dtype in torch's words, sha256."""
    tensors = reader.manifest.tensors
    return {
        name: {"shape": list(tensors[name].shape), "dtype": dtype_text(tensors[name].dtype), "sha256": sha256}
        for name, sha256 in hashed(reader)
    }


def dtype_text(name: str) -> str:
    """`float32` for `F32`."""
    return str(DTYPES[name]).removeprefix("torch.")


def print_table(reader: StepReader) -> None:
    """The tensors as a table on a terminal, else as aligned text."""
    rows = []
    for name, sha256 in hashed(reader):
        entry = reader.manifest.tensors[name]
        rows.append((name, "x".join(map(str, entry.shape)) or "scalar", dtype_text(entry.dtype), sha256))
    heads = ("tensor", "shape", "dtype", "sha256")
    if sys.stdout.isatty():
        table = rich.table.Table(*heads)
        for row in rows:
            table.add_row(*row)
        rich.console.Console().print(table)
    else:
        widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(4)]
        for row in [heads, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    manifest = reader.manifest
    stored = sum(entry.bytes for entry in manifest.files.values()) / 1e6
    ranks = len({name.split(".")[1] for name in manifest.tensors if name.startswith(RANK_STATE)})
    print(f"step {manifest.iteration}, written {manifest.created}: {len(rows)} tensors, {stored:.1f} MB in {len(manifest.files)} file(s)")
    print(f"random state of {ranks} rank(s), torch {manifest.libraries.get('torch', 'unknown')}")


def print_differences(first: StepReader, second: StepReader, out: TextIO) -> int:
    """Print each tensor that differs and how much; 1 if there is any."""
    one, two = logical_names(first.manifest), logical_names(second.manifest)
    found = 0
    for name in sorted({*one, *two}):
        text = difference(first, second, name)
        if text is not None:
            found += 1
            print(f"{name}: {text}", file=out)
    common = len({*one} & {*two})
    print(f"{found} of {len({*one, *two})} tensors differ ({common} are in both)", file=out)
    return 1 if found else 0


def difference(first: StepReader, second: StepReader, name: str) -> str | None:
    """How a tensor differs between two checkpoints, or None if it is bit-equal."""
    a, b = first.manifest.tensors.get(name), second.manifest.tensors.get(name)
    if a is None or b is None:
        return f"only in the {'second' if a is None else 'first'}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{dtype_text(a.dtype)} {list(a.shape)} and {dtype_text(b.dtype)} {list(b.shape)}"
    x, y = first.read(name), second.read(name)
    if torch.equal(torch.from_numpy(byte_view(x)), torch.from_numpy(byte_view(y))):
        return None
    gap = (x.double() - y.double()).abs()
    return f"max abs difference {gap.max().item():.6g}, {int((gap != 0).sum())} of {gap.numel()} elements"


def write_merged(reader: StepReader, path: Path) -> None:
    """Write all logical tensors, whole and under their names, to one safetensors file; nothing half-written gets the name."""
    tensors = reader.manifest.tensors
    names = sorted(logical_names(reader.manifest), key=lambda name: -item_size(tensors[name].dtype))
    slots = lay_out([(name, tensors[name].dtype, tensors[name].shape) for name in names])
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            file.write(encode_header(slots, {"iteration": str(reader.manifest.iteration)}))
            for name in names:
                file.write(byte_view(reader.read(name)).data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
