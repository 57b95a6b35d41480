"""Durable file operations: nothing returns before what it did survives a power cut. The only place that syncs and renames."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_SPACE = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota exceeded",
    errno.EFBIG: "file size limit reached",
    errno.EROFS: "read-only file system",
    errno.EIO: "input/output error of the storage",
}


def explain(error: OSError) -> str:
    """What went wrong in a user's words, with the file's name."""
    reason = _SPACE.get(error.errno or 0, error.strerror or type(error).__name__)
    return f"{reason} ({error.filename})" if error.filename else reason


def write_file(path: Path, data: bytes) -> None:
    """Create `path` (which must not exist) with `data`, synced."""
    with named_errors(path), open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Give an OSError without a file name the name of `path` (failing writes and syncs do not carry one)."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def sync_directory(path: Path) -> None:
    """Make creations, renames and removals in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a directory; there is nothing to add
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename inside one directory, durable."""
    os.rename(source, target)
    sync_directory(target.parent)


def replace_file(path: Path, data: bytes, unique: str) -> None:
    """Give `path` new content in one step: readers see the old or the new, also after a power cut."""
    temporary = path.with_name(f"{path.name}.tmp-{unique}")
    try:
        write_file(temporary, data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory or file if it is there; a link is removed, never followed."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.exists():
        shutil.rmtree(path, ignore_errors=True)
