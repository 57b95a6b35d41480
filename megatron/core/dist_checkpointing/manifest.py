"""Manifest: what a checkpoint step holds, as strict JSON that is checked field by field before anything is believed.

    {"sha256":"<64 hex>","format":"megadlms-checkpoint","version":1,"iteration":100, ... }
               `------ covers every byte after it, from `"format"` to the end of the file

Unknown versions, wrong types, names that are not plain file names, pieces outside of their tensor, pieces that overlap or leave
holes, and files or pieces that are used twice are refused. Nothing here is executed, and no size is allocated unchecked.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.mapping import Box
from megatron.core.dist_checkpointing.reshard import cover_problem
from megatron.core.dist_checkpointing.serialization import CHUNK_BYTES, DTYPES, DamagedCheckpointError, item_size

MANIFEST_NAME = "manifest.json"
FORMAT, VERSION = "megadlms-checkpoint", 1
SIZE_LIMIT = 256 << 20  # bytes of a manifest
_HEAD = re.compile(rb'\A\{"sha256":"([0-9a-f]{64})",')
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_MAX_DIMS, _MAX_SIZE = 16, 1 << 48


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """A data file: size, sha256 of all bytes, crc32 of its header."""

    bytes: int
    sha256: str
    header_crc32: int


@dataclasses.dataclass(frozen=True)
class PieceEntry:
    """A stored box: the tensor `key` of `file`, and the crc32 of each CHUNK_BYTES of it."""

    file: str
    key: str
    box: Box
    crc32: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A logical tensor. alias_of: its values are those of another entry, stored once."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[PieceEntry, ...] = ()
    alias_of: str | None = None

    @property
    def nbytes(self) -> int:
        """Size of the logical tensor."""
        return math.prod(self.shape) * item_size(self.dtype)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A complete step. sequence: counts the saves into the directory, so that newest does not depend on clocks or step numbers."""

    iteration: int
    sequence: int
    created: str
    libraries: Mapping[str, str]
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    common: Mapping[str, Any]

    def stored(self, name: str) -> TensorEntry:
        """The entry that holds the bytes of `name`: itself, or what it is an alias of."""
        entry = self.tensors[name]
        return entry if entry.alias_of is None else self.tensors[entry.alias_of]

    def encode(self) -> bytes:
        """The bytes of manifest.json. Raises ValueError if `common` is not JSON (NaN and infinity are not)."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "iteration": self.iteration,
            "sequence": self.sequence,
            "created": self.created,
            "chunk_bytes": CHUNK_BYTES,
            "libraries": dict(self.libraries),
            "common": self.common,
            "files": {name: dataclasses.asdict(entry) for name, entry in sorted(self.files.items())},
            "tensors": {name: _tensor_json(entry) for name, entry in sorted(self.tensors.items())},
        }
        rest = (json.dumps(body, allow_nan=False, separators=(",", ":"))[1:] + "\n").encode()
        return b'{"sha256":"' + hashlib.sha256(rest).hexdigest().encode() + b'",' + rest


def _tensor_json(entry: TensorEntry) -> dict[str, Any]:
    head: dict[str, Any] = {"dtype": entry.dtype, "shape": entry.shape}
    if entry.alias_of is not None:
        return head | {"alias_of": entry.alias_of}
    pieces = [
        {"file": p.file, "key": p.key, "offset": p.box.offset, "shape": p.box.shape, "crc32": p.crc32} for p in entry.pieces
    ]
    return head | {"pieces": pieces}


def decode(data: bytes, where: str) -> Manifest:
    """Parse and check the bytes of a manifest.

    Raises DamagedCheckpointError with `where` and the reason if any byte or field is not as it must be.
    """
    head = _HEAD.match(data)
    if head is None:
        raise DamagedCheckpointError(f"{where}: not a checkpoint manifest (no checksum at its start)")
    if hashlib.sha256(data[head.end() :]).hexdigest().encode() != head.group(1):
        raise DamagedCheckpointError(f"{where}: the manifest does not match its own checksum")
    try:
        return _parse(json.loads(data))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DamagedCheckpointError(f"{where}: {reason}") from error


def _parse(body: Any) -> Manifest:
    if _get(body, "format", str) != FORMAT:
        raise ValueError(f"format {body['format']!r}, expected {FORMAT!r}")
    if _get(body, "version", int) != VERSION:
        raise ValueError(f"format version {body['version']}, this program reads {VERSION}; use the version that wrote it")
    if _get(body, "chunk_bytes", int) != CHUNK_BYTES:
        raise ValueError(f"chunk_bytes {body['chunk_bytes']}, expected {CHUNK_BYTES}")
    files = {_plain(name): _parse_file(entry) for name, entry in _get(body, "files", dict).items()}
    tensors = {name: _parse_tensor(name, entry) for name, entry in _get(body, "tensors", dict).items()}
    manifest = Manifest(
        _size(_get(body, "iteration", int)),
        _size(_get(body, "sequence", int)),
        _get(body, "created", str),
        {str(key): str(value) for key, value in _get(body, "libraries", dict).items()},
        files,
        tensors,
        _get(body, "common", dict),
    )
    _check_references(manifest)
    return manifest


def _get(entry: Any, key: str, kind: type) -> Any:
    if type(entry) is not dict or type(entry.get(key)) is not kind:
        raise ValueError(f"manifest field {key!r} is missing or not {kind.__name__}")
    return entry[key]


def _plain(name: str) -> str:
    if _PLAIN_NAME.fullmatch(name) is None or name == MANIFEST_NAME:
        raise ValueError(f"{name[:200]!r} is not a plain file name")
    return name


def _size(number: Any) -> int:
    if type(number) is not int or not 0 <= number < _MAX_SIZE:
        raise ValueError(f"{str(number)[:50]} is not a size below {_MAX_SIZE}")
    return number


def _sizes(entry: Any, key: str) -> tuple[int, ...]:
    numbers = _get(entry, key, list)
    if len(numbers) > _MAX_DIMS and key != "crc32":
        raise ValueError(f"{key} has {len(numbers)} dims, at most {_MAX_DIMS} are possible")
    return tuple(_size(number) for number in numbers)


def _parse_file(entry: Any) -> FileEntry:
    return FileEntry(_size(_get(entry, "bytes", int)), _get(entry, "sha256", str), _size(_get(entry, "header_crc32", int)))


def _parse_tensor(name: str, entry: Any) -> TensorEntry:
    dtype, shape = _get(entry, "dtype", str), _sizes(entry, "shape")
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name}: unknown dtype {dtype[:20]!r}")
    if "alias_of" in entry:
        return TensorEntry(dtype, shape, alias_of=_get(entry, "alias_of", str))
    pieces = tuple(_parse_piece(piece, dtype) for piece in _get(entry, "pieces", list))
    problem = cover_problem(shape, [piece.box for piece in pieces])
    if problem is not None:
        raise ValueError(f"tensor {name}: {problem}")
    return TensorEntry(dtype, shape, pieces)


def _parse_piece(entry: Any, dtype: str) -> PieceEntry:
    box = Box(_sizes(entry, "offset"), _sizes(entry, "shape"))
    crcs = _sizes(entry, "crc32")
    if len(crcs) != -(-box.numel * item_size(dtype) // CHUNK_BYTES):
        raise ValueError(f"piece {_get(entry, 'key', str)[:200]}: {len(crcs)} checksums do not fit its size")
    return PieceEntry(_get(entry, "file", str), _get(entry, "key", str), box, crcs)


def _check_references(manifest: Manifest) -> None:
    used: set[tuple[str, str]] = set()
    space = {name: entry.bytes for name, entry in manifest.files.items()}
    for name, entry in manifest.tensors.items():
        if entry.alias_of is not None:
            base = manifest.tensors.get(entry.alias_of)
            if base is None or base.alias_of is not None or (base.dtype, base.shape) != (entry.dtype, entry.shape):
                raise ValueError(f"tensor {name} is an alias of {entry.alias_of[:200]}, which is missing or differs in shape or dtype")
        for piece in entry.pieces:
            if piece.file not in manifest.files:
                raise ValueError(f"tensor {name} lies in {piece.file[:200]!r}, which is not listed")
            if (piece.file, piece.key) in used:
                raise ValueError(f"{piece.file}: {piece.key[:200]} is used twice")
            used.add((piece.file, piece.key))
            space[piece.file] -= piece.box.numel * item_size(entry.dtype)
            if space[piece.file] < 0:
                raise ValueError(f"{piece.file}: its pieces are larger than the file")
