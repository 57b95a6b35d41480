"""Data files of a checkpoint: the safetensors format, written with checksums on the way and read by byte range.

    8 bytes            header length n, little endian
    n bytes            JSON {key: {"dtype", "shape", "data_offsets": [begin, end]}}, padded with spaces to a multiple of 8
    rest               the tensors' row-major bytes, one after the other without holes

Format: https://github.com/huggingface/safetensors (format section of its README).
"""

import dataclasses
import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy
import torch

from megatron.core.dist_checkpointing.durable import explain, named_errors
from megatron.core.errors import CheckpointError

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

CHUNK_BYTES = 4 << 20  # each crc32 covers this many bytes of a piece; a multiple of every item size
_HEADER_LIMIT = 100_000_000  # bytes, as the safetensors library
_THREADS_FROM = 1 << 18  # bytes; smaller chunks are hashed in place, a hand-over to a thread would cost more


class DamagedCheckpointError(CheckpointError):
    """Bytes on disk are not what was written: a checksum, a size or a file is wrong. An older step may still load."""


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a dtype. Raises CheckpointError for one it does not have."""
    if dtype not in _NAMES:
        raise CheckpointError(f"dtype {dtype} cannot be stored; expected one of {', '.join(map(str, _NAMES))}")
    return _NAMES[dtype]


def item_size(name: str) -> int:
    """Bytes per element of a dtype name."""
    return DTYPES[name].itemsize


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a tensor lies in a file's data section: half-open byte range [begin, end)."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> dict[str, Slot]:
    """Slots of (key, dtype name, shape) tensors, one after the other in the given order."""
    slots, position = {}, 0
    for key, dtype, shape in tensors:
        size = math.prod(shape) * item_size(dtype)
        slots[key] = Slot(dtype, shape, position, position + size)
        position += size
    return slots


def encode_header(slots: Mapping[str, Slot], metadata: Mapping[str, str]) -> bytes:
    """Length field and header; `metadata` is free text for other readers."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    entries |= {k: {"dtype": s.dtype, "shape": list(s.shape), "data_offsets": [s.begin, s.end]} for k, s in slots.items()}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(descriptor: int, file_bytes: int, where: str) -> tuple[bytes, dict[str, Slot]]:
    """Header (with its length field) and slots of an open file, checked before anything is allocated for tensors.

    Raises DamagedCheckpointError if the header is not well formed or its tensors do not tile the rest of the file.
    """
    length = os.pread(descriptor, 8, 0)
    size = int.from_bytes(length, "little")
    if len(length) < 8 or size > min(file_bytes - 8, _HEADER_LIMIT):
        raise DamagedCheckpointError(f"{where}: the header does not fit into the file of {file_bytes} bytes")
    text = os.pread(descriptor, size, 8)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        slots = {key: _parse_slot(entry) for key, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{where}: the header is not readable ({type(error).__name__})") from error
    position = 0
    for slot in sorted(slots.values(), key=lambda slot: (slot.begin, slot.end)):
        if slot.begin != position or slot.end - slot.begin != math.prod(slot.shape) * item_size(slot.dtype):
            raise DamagedCheckpointError(f"{where}: the header's byte ranges overlap or leave holes")
        position = slot.end
    if position != file_bytes - 8 - size:
        raise DamagedCheckpointError(f"{where}: the header describes {position} bytes of data, found {file_bytes - 8 - size}")
    return length + text, slots


def _parse_slot(entry: dict[str, object]) -> Slot:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, *offsets]  # type: ignore[misc]
    if dtype not in DTYPES or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise ValueError("bad entry")
    begin, end = numbers[-2:]
    return Slot(str(dtype), tuple(numbers[:-2]), begin, end)


def byte_view(tensor: torch.Tensor) -> numpy.ndarray:
    """uint8 [nbytes] view of a contiguous CPU tensor of any dtype."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as contiguous CPU memory; itself if it is that already."""
    return tensor.detach().to("cpu").contiguous()


@dataclasses.dataclass(frozen=True)
class WrittenFile:
    """What the manifest records of a file. checksums: per key the crc32 of each chunk of the tensor's bytes."""

    bytes: int
    sha256: str
    header_crc32: int
    checksums: dict[str, tuple[int, ...]]


class _HashingWriter:
    """Writes chunks, and meanwhile hashes them in two threads: sha256 over the whole file, crc32 per chunk."""

    def __init__(self, file: BinaryIO, pool: Executor) -> None:
        self.file, self.pool = file, pool
        self.sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, chunk: bytes | memoryview) -> int:
        """Append `chunk`; returns its crc32."""
        self.bytes += len(chunk)
        if len(chunk) < _THREADS_FROM:
            self.file.write(chunk)
            self.sha256.update(chunk)
            return zlib.crc32(chunk)
        sha = self.pool.submit(self.sha256.update, chunk)
        crc = self.pool.submit(zlib.crc32, chunk)
        self.file.write(chunk)
        sha.result()
        return crc.result()


def chunks(data: numpy.ndarray) -> Iterator[memoryview]:
    """The CHUNK_BYTES long parts of a uint8 array; the last may be shorter; none for an empty array."""
    for start in range(0, data.size, CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES].data


def write_tensors(path: Path, tensors: Sequence[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> WrittenFile:
    """Write a new safetensors file, synced; tensors may be on any device and of any strides, copied one at a time.

    Raises OSError with the file's name when the disk is full or fails.
    """
    ordered = sorted(tensors, key=lambda item: -item[1].dtype.itemsize)  # keeps every tensor aligned to its item size
    slots = lay_out([(key, dtype_name(tensor.dtype), tuple(tensor.shape)) for key, tensor in ordered])
    checksums = {}
    with named_errors(path), ThreadPoolExecutor(2) as pool, open(path, "xb") as file:
        writer = _HashingWriter(file, pool)
        header_crc32 = writer.write(encode_header(slots, metadata))
        for key, tensor in ordered:
            checksums[key] = tuple(writer.write(chunk) for chunk in chunks(byte_view(on_cpu(tensor))))
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(writer.bytes, writer.sha256.hexdigest(), header_crc32, checksums)


def read_checked(descriptor: int, where: str, start: int, crcs: Sequence[int], out: numpy.ndarray) -> None:
    """Fill `out` (uint8) with the file's bytes from `start` and compare each chunk with its crc32.

    crcs: checksums of the chunks of `out`. Raises DamagedCheckpointError naming `where` (file and tensor).
    """
    assert len(crcs) == -(-out.size // CHUNK_BYTES), (len(crcs), out.size)
    for number, (chunk, crc) in enumerate(zip(chunks(out), crcs, strict=True)):
        position = start + number * CHUNK_BYTES
        done = 0
        while done < len(chunk):
            try:
                got = os.preadv(descriptor, [chunk[done:]], position + done)
            except OSError as error:
                raise DamagedCheckpointError(f"{where}: {explain(error)} at byte {position + done}") from error
            if got == 0:
                raise DamagedCheckpointError(f"{where}: the file ends at byte {position + done}")
            done += got
        if zlib.crc32(chunk) != crc:
            raise DamagedCheckpointError(f"{where}: bytes {position} to {position + len(chunk)} do not match their checksum")


def sha256_of_file(descriptor: int, file_bytes: int) -> str:
    """sha256 of a whole open file, read in bounded chunks."""
    digest, position = hashlib.sha256(), 0
    while position < file_bytes:
        block = os.pread(descriptor, min(CHUNK_BYTES, file_bytes - position), position)
        if not block:
            break
        digest.update(block)
        position += len(block)
    return digest.hexdigest()
