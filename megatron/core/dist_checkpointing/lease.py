"""Lease on a save directory: at most one run writes there. A POSIX lock on `<directory>/.lock`, freed when its holder dies.

POSIX record locks are chosen over flock because a forked data-loader worker does not inherit them: the lock of a killed
trainer is free at once. They belong to the process, so stores of one process share the lease and count their use.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

from megatron.core.dist_checkpointing.durable import explain
from megatron.core.errors import CheckpointError

LOCK_NAME = ".lock"
_log = logging.getLogger(__name__)
_held: dict[Path, tuple[int, int]] = {}  # resolved directory -> (file descriptor, users in this process)


def acquire(directory: Path) -> None:
    """Take the lease of an existing directory for this process.

    Raises CheckpointError naming the holder's pid and host if another process has it, or if the directory cannot be written.
    The file of a dead holder is taken over, since the system frees its lock. A file system without locks gives a warning.
    """
    key = directory.resolve()
    if key in _held:
        descriptor, users = _held[key]
        _held[key] = (descriptor, users + 1)
        return
    path = directory / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise CheckpointError(f"cannot write to the save directory {directory}: {explain(error)}; choose another --save") from error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = _read_holder(descriptor)
            os.close(descriptor)
            raise CheckpointError(
                f"another run writes to {directory} ({holder}); wait for it, stop it, or choose another --save"
            ) from error
        _log.warning("%s: no file locks here (%s); make sure that only one run writes to it", directory, explain(error))
    _write_holder(descriptor)
    _held[key] = (descriptor, 1)


def release(directory: Path) -> None:
    """Give back one use of the lease; the last one frees the lock. The lock file stays (removing it would race)."""
    key = directory.resolve()
    descriptor, users = _held.pop(key)  # acquired before: our own invariant
    if users > 1:
        _held[key] = (descriptor, users - 1)
    else:
        os.close(descriptor)


def _write_holder(descriptor: int) -> None:
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _read_holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"pid {holder['pid']} on host {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "its holder left no name"
