"""IndexCache: index arrays on disk, keyed by content, built once per file system, never trusted unchecked.

    <folder>/<sha256 of the description>.index
        "MEGAIDX1" | header length u64 | CRC-32 of the header u32 | header JSON | arrays, each at a multiple of 64 bytes

The key is a description of everything the arrays depend on, so a file is never out of date; another time stamp or path
changes nothing. A file appears complete under its name (written aside, fsync, rename), is checked by size and CRC-32 when
loaded, and is rebuilt when damaged. Builders on one file system take turns by a file lock, which the kernel frees if its
holder dies; whoever gets the lock second finds the file. A folder that cannot be written costs a warning: the arrays then
live in memory only.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Arrays = dict[str, npt.NDArray[Any]]
_MAGIC = b"MEGAIDX1"
_PREFIX = struct.Struct("<8sQI")
_ALIGNMENT = 64


class IndexCache:
    """Arrays by description in one folder. announce: whether this process says that the folder cannot be written."""

    def __init__(self, folder: str | os.PathLike[str], announce: bool = True) -> None:
        self.folder = pathlib.Path(folder)
        self.announce = announce

    def path(self, description: Mapping[str, Any]) -> pathlib.Path:
        """The file of a description (JSON values only)."""
        return self.folder / f"{hashlib.sha256(_canonical(description)).hexdigest()}.index"

    def get(self, description: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """The arrays of `description`: from the folder, or else from `build()`, which is then stored. Read-only when loaded."""
        arrays = self.load(description)
        if arrays is not None:
            return arrays
        with self._lock() as locked:
            arrays = self.load(description)
            if arrays is not None:
                return arrays
            path = self.path(description)
            if path.exists():
                logger.warning("index cache file %s is damaged and is built again", path)
            logger.info("building index %s", path)
            arrays = build()
            self._store(path, description, arrays, locked)
        return self.load(description) or arrays

    def load(self, description: Mapping[str, Any]) -> Arrays | None:
        """The stored arrays, memory-mapped, or None if there is no undamaged file."""
        try:
            return _read(self.path(description), description)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Hold the folder's lock; yields False where none is to be had (unwritable folder, file system without locks)."""
        with contextlib.ExitStack() as stack:
            locked = False
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                handle = stack.enter_context(open(self.folder / ".lock", "ab"))
                fcntl.flock(handle, fcntl.LOCK_EX)
                locked = True
            yield locked

    def _store(self, path: pathlib.Path, description: Mapping[str, Any], arrays: Arrays, locked: bool) -> None:
        temporary = path.with_suffix(f".{os.getpid()}.partial")
        try:
            if locked:  # then no builder of this folder is alive: what is left aside is of killed ones
                for left in self.folder.glob("*.partial"):
                    left.unlink()
            with open(temporary, "wb") as out:
                _write(out, description, arrays)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if self.announce:
                logger.warning(
                    "the index cache %s cannot be written (%s); the index is kept in memory only", self.folder, error
                )


def _canonical(description: Mapping[str, Any]) -> bytes:
    return json.dumps(description, sort_keys=True, separators=(",", ":")).encode()


def _write(out: Any, description: Mapping[str, Any], arrays: Arrays) -> None:
    entries, offset = [], 0
    for name, array in arrays.items():
        crc = zlib.crc32(np.ascontiguousarray(array).data)
        entries.append({"name": name, "dtype": array.dtype.str, "shape": array.shape, "offset": offset, "crc32": crc})
        offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    header = _canonical({"description": description, "arrays": entries, "bytes": offset})
    out.write(_PREFIX.pack(_MAGIC, len(header), zlib.crc32(header)))
    out.write(header)
    out.write(b"\0" * (-(_PREFIX.size + len(header)) % _ALIGNMENT))
    for array in arrays.values():
        out.write(np.ascontiguousarray(array).data)
        out.write(b"\0" * (-array.nbytes % _ALIGNMENT))


def _read(path: pathlib.Path, description: Mapping[str, Any]) -> Arrays:
    """The arrays of a file; ValueError (or KeyError, TypeError) if anything is not as written."""
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    if len(raw) < _PREFIX.size:
        raise ValueError("no header")
    magic, length, crc = _PREFIX.unpack(raw[: _PREFIX.size].tobytes())
    header = raw[_PREFIX.size : _PREFIX.size + length].tobytes() if length <= len(raw) else b""
    if magic != _MAGIC or len(header) != length or zlib.crc32(header) != crc:
        raise ValueError("damaged header")
    content = json.loads(header)
    if _canonical(content["description"]) != _canonical(description):
        raise ValueError("another description")
    base = -(-(_PREFIX.size + length) // _ALIGNMENT) * _ALIGNMENT
    if len(raw) != base + content["bytes"]:
        raise ValueError("wrong size")
    arrays = {}
    for entry in content["arrays"]:
        dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
        start = base + entry["offset"]
        part = raw[start : start + dtype.itemsize * int(np.prod(shape, dtype=np.int64))]
        if zlib.crc32(part.data) != entry["crc32"]:
            raise ValueError(f"damaged array {entry['name']}")
        arrays[entry["name"]] = part.view(dtype).reshape(shape)
    return arrays
