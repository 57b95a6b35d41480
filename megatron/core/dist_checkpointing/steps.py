"""Steps of a save directory: their names, which are complete, which is newest, the pointer file, clean-up and retention.

    <save>/iter_0000100/                    a published step
    <save>/iter_0000100.tmp-<id>/           being written, or left by a killed run: never read, removed when the next run starts
    <save>/iter_0000100.old-<id>/           the former content of a step that is being replaced: read while the new one is not there
    <save>/iter_0000100.del-<id>/           being deleted
    <save>/latest_checkpointed_iteration.txt  a hint for people and other tools; the manifests decide
"""

import dataclasses
import os
import re
import stat
import uuid
from collections.abc import Sequence
from pathlib import Path

from megatron.core.dist_checkpointing import durable
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, SIZE_LIMIT, Manifest, decode
from megatron.core.dist_checkpointing.serialization import DamagedCheckpointError

POINTER_NAME = "latest_checkpointed_iteration.txt"
_STEP = re.compile(r"iter_(\d{7,15})(?:\.old-[0-9a-f]{32})?")
_LEFTOVER = re.compile(r"(?:iter_\d{7,15}|latest_checkpointed_iteration\.txt)\.(tmp|del)-[0-9a-f]{32}")
_REPLACED = re.compile(r"(iter_\d{7,15})\.old-[0-9a-f]{32}")


def step_name(iteration: int) -> str:
    """`iter_0000100`"""
    return f"iter_{iteration:07d}"


@dataclasses.dataclass(frozen=True)
class Step:
    """A step directory. manifest: None if it cannot be read; problem: why the step is not complete, None if it is."""

    iteration: int
    path: Path
    manifest: Manifest | None
    problem: str | None


def read_manifest(step: Path) -> Manifest:
    """The checked manifest of a step directory. Raises DamagedCheckpointError if it is missing, no plain file, or wrong."""
    path = step / MANIFEST_NAME
    descriptor, size = open_regular(path)
    try:
        if size > SIZE_LIMIT:
            raise DamagedCheckpointError(f"{path}: {size} bytes, a manifest has at most {SIZE_LIMIT}")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return decode(file.read(SIZE_LIMIT), str(path))
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: {durable.explain(error)}") from error
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> tuple[int, int]:
    """Descriptor and size of a regular file; links and special files are refused.

    Raises DamagedCheckpointError. The caller closes the descriptor.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: {durable.explain(error)}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise DamagedCheckpointError(f"{path} is not a regular file")
    return descriptor, status.st_size


def examine(path: Path, iteration: int) -> Step:
    """Manifest of a step directory and whether every file it lists is there in full length (contents are not read)."""
    try:
        manifest = read_manifest(path)
    except DamagedCheckpointError as error:
        return Step(iteration, path, None, str(error))
    if manifest.iteration != iteration:
        return Step(iteration, path, manifest, f"{path / MANIFEST_NAME} is that of step {manifest.iteration}")
    return Step(iteration, path, manifest, sizes_problem(path, manifest))


def sizes_problem(path: Path, manifest: Manifest) -> str | None:
    """The first listed file that is missing, no regular file or of the wrong length; None if there is none."""
    for name, entry in manifest.files.items():
        try:
            status = os.lstat(path / name)
        except OSError as error:
            return durable.explain(error)
        if not stat.S_ISREG(status.st_mode):
            return f"{path / name} is not a regular file"
        if status.st_size != entry.bytes:
            return f"{path / name} has {status.st_size} bytes, expected {entry.bytes}"
    return None


def list_steps(directory: Path) -> list[Step]:
    """All steps of a save directory, newest first; a directory that does not exist has none.

    Newest is the one saved last (by the manifests' sequence numbers), which after a restart from an older step need not be the
    one with the highest number. A step without readable manifest sorts by its number behind the others.
    """
    found: dict[int, Path] = {}
    for path in sorted(directory.iterdir() if directory.is_dir() else []):  # `iter_N` sorts before `iter_N.old-...`
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found.setdefault(int(match.group(1)), path)
    steps = [examine(path, iteration) for iteration, path in found.items()]
    return sorted(steps, key=lambda step: (step.manifest.sequence if step.manifest else -1, step.iteration), reverse=True)


def find_step(directory: Path, iteration: int) -> Step | None:
    """The step of this number, complete or not; None if there is none."""
    candidates = [directory / step_name(iteration), *sorted(directory.glob(step_name(iteration) + ".old-*"))]
    path = next((path for path in candidates if path.is_dir() and not path.is_symlink()), None)
    return None if path is None else examine(path, iteration)


def read_pointer(directory: Path) -> int | None:
    """The step that the pointer file names; None if it is missing or garbage."""
    try:
        text = (directory / POINTER_NAME).read_bytes()[:32].decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None


def write_pointer(directory: Path, iteration: int) -> None:
    """Name `iteration` in the pointer file, durable and in one step."""
    durable.replace_file(directory / POINTER_NAME, f"{iteration}\n".encode(), uuid.uuid4().hex)


def publish(temporary: Path, target: Path) -> None:
    """Give a finished step its final name; a step of the same number is moved aside first and removed afterwards."""
    aside = None
    if target.exists():
        aside = target.with_name(f"{target.name}.old-{uuid.uuid4().hex}")
        durable.rename(target, aside)
    durable.rename(temporary, target)
    if aside is not None:
        remove_step(aside)


def remove_step(path: Path) -> None:
    """Delete a step directory: first renamed, so that a half-deleted step never carries a step's name."""
    name = path.name.split(".")[0]
    doomed = path.with_name(f"{name}.del-{uuid.uuid4().hex}")
    durable.rename(path, doomed)
    durable.remove_tree(doomed)


def clean_up(directory: Path) -> None:
    """Remove what killed runs left: half-written and half-deleted steps; finish or undo a replacement. Needs the lease."""
    for path in sorted(directory.iterdir()):
        replaced = _REPLACED.fullmatch(path.name)
        if _LEFTOVER.fullmatch(path.name):
            durable.remove_tree(path)
        elif replaced and (directory / replaced.group(1)).exists():
            remove_step(path)
        elif replaced:
            durable.rename(path, directory / replaced.group(1))


def retain(directory: Path, keep_last: int) -> list[int]:
    """Delete all but the newest `keep_last` complete steps; returns the deleted steps' numbers.

    Only directories with a readable manifest are touched, so neither foreign nor unreadable ones are lost.
    """
    assert keep_last >= 1
    steps = [step for step in list_steps(directory) if step.manifest is not None]
    complete = [step for step in steps if step.problem is None]
    if not complete:
        return []
    oldest_kept = complete[:keep_last][-1]
    doomed = _older_than(steps, oldest_kept)
    for step in doomed:
        remove_step(step.path)
    return [step.iteration for step in doomed]


def _older_than(steps: Sequence[Step], kept: Step) -> list[Step]:
    return list(steps[list(steps).index(kept) + 1 :])
