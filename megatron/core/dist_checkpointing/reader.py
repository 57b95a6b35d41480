"""StepReader: the bytes of one step, by logical tensor and box; every byte that is handed out was compared with its checksum."""

import math
import os
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy
import torch

from megatron.core.dist_checkpointing.manifest import Manifest, PieceEntry, TensorEntry
from megatron.core.dist_checkpointing.mapping import Box, Piece, relative
from megatron.core.dist_checkpointing.reshard import flat_span, plan_transfers, row_major_strides, split_by_span, whole_box
from megatron.core.dist_checkpointing.serialization import (
    CHUNK_BYTES,
    DTYPES,
    DamagedCheckpointError,
    Slot,
    byte_view,
    item_size,
    read_checked,
    read_header,
    sha256_of_file,
)
from megatron.core.dist_checkpointing.steps import open_regular

READ_THREADS = min(4, os.cpu_count() or 1)
WINDOW_BYTES = 64 << 20  # most that one read holds beside its target


class _DataFile:
    """An open data file whose header agrees with the manifest. slots: byte ranges relative to `data_start`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        entry = manifest.files[path.name]
        self.descriptor, self.bytes = open_regular(path)
        try:
            if self.bytes != entry.bytes:
                raise DamagedCheckpointError(f"{path} has {self.bytes} bytes, expected {entry.bytes}")
            header, self.slots = read_header(self.descriptor, self.bytes, str(path))
            if zlib.crc32(header) != entry.header_crc32:
                raise DamagedCheckpointError(f"{path}: the header does not match its checksum")
        except BaseException:
            self.close()
            raise
        self.data_start = len(header)

    def slot(self, piece: PieceEntry, dtype: str) -> Slot:
        slot = self.slots.get(piece.key)
        if slot is None or (slot.dtype, slot.shape) != (dtype, piece.box.shape):
            raise DamagedCheckpointError(f"{self.path}: {piece.key} is missing or has another dtype or shape than the manifest says")
        return slot

    def close(self) -> None:
        os.close(self.descriptor)


class StepReader:
    """Reads one step. Use as a context manager; files are opened when first needed.

    Every method raises DamagedCheckpointError, naming file and tensor, when bytes are not what was written.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._files: dict[str, _DataFile] = {}

    def __enter__(self) -> "StepReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def read_pieces(self, wanted: Iterable[tuple[str, Piece]]) -> None:
        """Fill each piece (any device, any strides) with its box of the named logical tensor; names and dtypes are checked already.

        Reads only the chunks that the boxes touch, in parallel; memory beside the pieces is bounded by READ_THREADS windows.
        """
        jobs = [job for name, piece in wanted for job in self._jobs(name, piece)]
        with ThreadPoolExecutor(READ_THREADS) as pool:
            for done in [pool.submit(self._read, *job) for job in jobs]:
                done.result()

    def read(self, name: str) -> torch.Tensor:
        """A logical tensor as contiguous CPU memory."""
        entry = self.manifest.stored(name)
        data = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.read_pieces([(name, Piece(whole_box(entry.shape), data))])
        return data

    def verify(self) -> list[str]:
        """Every problem of the step: sha256 of each file, header, crc32 of each piece, unread bytes. [] when it is whole."""
        problems = []
        for name, entry in self.manifest.files.items():
            try:
                file = self._file(name)
                if sha256_of_file(file.descriptor, file.bytes) != entry.sha256:
                    problems.append(f"{file.path}: does not match its sha256")
            except DamagedCheckpointError as error:
                problems.append(str(error))
        for name, tensor in self.manifest.tensors.items():
            for piece in tensor.pieces:
                try:
                    self._verify_piece(name, tensor, piece)
                except DamagedCheckpointError as error:
                    problems.append(str(error))
        return list(dict.fromkeys(problems))

    def _verify_piece(self, name: str, tensor: TensorEntry, piece: PieceEntry) -> None:
        file = self._file(piece.file)
        slot = file.slot(piece, tensor.dtype)
        window = numpy.empty(CHUNK_BYTES, dtype=numpy.uint8)
        for number, crc in enumerate(piece.crc32):
            start = slot.begin + number * CHUNK_BYTES
            part = window[: min(CHUNK_BYTES, slot.end - start)]
            read_checked(file.descriptor, f"{file.path}: tensor {name}", file.data_start + start, [crc], part)

    def _file(self, name: str) -> _DataFile:
        if name not in self._files:
            self._files[name] = _DataFile(self.path / name, self.manifest)
        return self._files[name]

    def _jobs(self, name: str, piece: Piece) -> list[tuple[str, _DataFile, Slot, PieceEntry, Box, torch.Tensor]]:
        """One read per stored piece and window: (name, file, slot, stored piece, region of it, target memory)."""
        entry = self.manifest.stored(name)
        data = piece.shaped()
        limit = WINDOW_BYTES // item_size(entry.dtype)
        jobs = []
        for transfer in plan_transfers(piece.box, [stored.box for stored in entry.pieces]):
            stored = entry.pieces[transfer.source]
            file = self._file(stored.file)
            slot = file.slot(stored, entry.dtype)
            for region in _windows(transfer.region, stored.box, data, limit):
                target = data[relative(region, piece.box).slices()]
                jobs.append((name, file, slot, stored, relative(region, stored.box), target))
        return jobs

    def _read(self, name: str, file: _DataFile, slot: Slot, stored: PieceEntry, region: Box, target: torch.Tensor) -> None:
        """Read `region` (coordinates of the stored piece) into `target` of the same shape."""
        where = f"{file.path}: tensor {name}"
        start = file.data_start + slot.begin
        if _is_plain(target) and region.shape == slot.shape:
            read_checked(file.descriptor, where, start, stored.crc32, byte_view(target))
            return
        size = item_size(slot.dtype)
        first, last = flat_span(region, slot.shape)
        low = first * size // CHUNK_BYTES
        high = -(-last * size // CHUNK_BYTES)
        window = numpy.empty(min(high * CHUNK_BYTES, slot.end - slot.begin) - low * CHUNK_BYTES, dtype=numpy.uint8)
        read_checked(file.descriptor, where, start + low * CHUNK_BYTES, stored.crc32[low:high], window)
        elements = torch.from_numpy(window).view(DTYPES[slot.dtype])
        offset = first - low * CHUNK_BYTES // size
        target.copy_(torch.as_strided(elements, region.shape, row_major_strides(slot.shape), offset))


def _windows(region: Box, stored: Box, data: torch.Tensor, limit: int) -> Sequence[Box]:
    """`region` in parts that each need a window of at most `limit` elements; whole if it is read straight into its target."""
    if region == stored and math.prod(region.shape) == data.numel() and _is_plain(data):
        return [region]
    parts = split_by_span(relative(region, stored), stored.shape, limit)
    return [Box(tuple(o + s for o, s in zip(part.offset, stored.offset, strict=True)), part.shape) for part in parts]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()
