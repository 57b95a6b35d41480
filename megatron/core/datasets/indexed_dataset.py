"""Token files: Megatron's `.bin` / `.idx` pair, read (memory-mapped or with file calls), written and merged.

    PREFIX.bin   the tokens of all sequences, one after the other, nothing else
    PREFIX.idx   "MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | sequences u64 | document marks u64
                 | lengths i32 [sequences] | byte offsets in .bin i64 [sequences] | document marks i64 [documents + 1]
                 | modes i8 [sequences], only in multimodal sets                                    (all little endian)

Document marks are [0, end of document 0, end of document 1, ...] counted in sequences; a GPT document is one sequence. Both
files are checked against each other when a pair is opened: a truncated, damaged or foreign file is a DataError that names
both paths and the sizes found, never tokens. Files are written under temporary names and renamed when they are complete.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import shutil
import struct
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from megatron.core.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_COUNTS = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
_CODES = {np.dtype(kind): code for code, kind in _DTYPES.items()}

Tokens = npt.NDArray[Any]


def bin_path(prefix: str | os.PathLike[str]) -> str:
    """The token file of a prefix."""
    return f"{os.fspath(prefix)}.bin"


def idx_path(prefix: str | os.PathLike[str]) -> str:
    """The index file of a prefix."""
    return f"{os.fspath(prefix)}.idx"


def optimal_dtype(vocab_size: int | None) -> type[np.generic]:
    """uint16 for a vocabulary below 65500, else int32 (Megatron's rule)."""
    return np.uint16 if vocab_size is not None and vocab_size < 65500 else np.int32


@dataclasses.dataclass(frozen=True)
class _Index:
    """The content of an .idx file: dtype; lengths int32 and pointers int64 [sequences]; marks int64 [documents + 1]."""

    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    marks: npt.NDArray[np.int64]
    modes: npt.NDArray[np.int8] | None


class IndexedDataset:
    """The sequences of one .bin/.idx pair, by number.

    prefix: path without suffix. mmap: map the files; otherwise read them with positioned file calls (for file systems that
    cannot map). Raises DataError if anything about the pair is wrong. Safe to use in forked and spawned workers.
    """

    def __init__(self, prefix: str | os.PathLike[str], mmap: bool = True) -> None:
        self.prefix = os.fspath(prefix)
        self.mmap = mmap
        self._open()

    def _open(self) -> None:
        try:
            self._open_checked()
        except OSError as error:
            _refuse(self.prefix, f"cannot be read: {error}")

    def _open_checked(self) -> None:
        sizes = _file_sizes(self.prefix)
        index = _read_index(self.prefix, sizes, self.mmap)
        _check_index(self.prefix, index, sizes)
        self.dtype = index.dtype
        self.sequence_lengths = index.lengths
        self.sequence_pointers = index.pointers
        self.document_indices = index.marks
        self.sequence_modes = index.modes
        self._file = open(bin_path(self.prefix), "rb", buffering=0)  # noqa: SIM115 - lives as long as the data set
        self._tokens: Tokens | None = np.memmap(self._file, dtype=self.dtype, mode="r") if self.mmap else None

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences together."""
        return int(self.sequence_lengths.sum(dtype=np.int64))

    def __getitem__(self, sequence: int) -> Tokens:
        """All tokens of a sequence, in the file's dtype (read-only when mapped)."""
        return self.get(sequence)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> Tokens:
        """`length` tokens of a sequence (default: the rest) from token `offset`, in the file's dtype.

        Raises IndexError outside the sequence, DataError if the file has become shorter since it was opened.
        """
        size = int(self.sequence_lengths[sequence])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"tokens [{offset}, {offset + length}) of sequence {sequence}, which has {size}")
        first = int(self.sequence_pointers[sequence]) // self.dtype.itemsize + offset
        if self._tokens is not None:
            return self._tokens[first : first + length]
        wanted = length * self.dtype.itemsize
        data = os.pread(self._file.fileno(), wanted, first * self.dtype.itemsize)
        if len(data) != wanted:
            raise DataError(
                f"{bin_path(self.prefix)} became shorter while it was in use: {wanted} bytes expected at offset "
                f"{first * self.dtype.itemsize}, {len(data)} read; restore the file and start again"
            )
        return np.frombuffer(data, dtype=self.dtype)

    def close(self) -> None:
        """Release the token file; the data set cannot be read afterwards."""
        self._tokens = None
        self._file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "mmap": self.mmap}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.prefix, self.mmap = state["prefix"], state["mmap"]
        self._open()


class IndexedDatasetBuilder:
    """Writes a pair. Nothing exists under the final names before `finalize`, and then both files are complete and on disk.

    bin_file: final path of the token file. dtype: of the stored tokens (see `optimal_dtype`). A context manager: leaving it by
    an exception, or without `finalize`, removes the temporary file.
    """

    def __init__(self, bin_file: str | os.PathLike[str], dtype: npt.DTypeLike = np.int32, multimodal: bool = False) -> None:
        self.bin_file = os.fspath(bin_file)
        self.dtype = np.dtype(dtype)
        if self.dtype not in _CODES:
            raise DataError(f"dtype {self.dtype} cannot be stored; use one of {', '.join(sorted(str(d) for d in _CODES))}")
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._marks: list[npt.NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
        self._modes: list[npt.NDArray[np.int8]] | None = [] if multimodal else None
        self._sequences = 0
        self._temporary = f"{self.bin_file}.{os.getpid()}.partial"
        self._out: BinaryIO = open(self._temporary, "wb", buffering=1 << 20)  # noqa: SIM115 - closed by finalize or abort

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()

    def add_item(self, tokens: Any, mode: int = 0) -> None:
        """Append one sequence (a tensor, array or list of integers) to the current document; `end_document` closes it."""
        array = self._checked(tokens)
        self._append(array, [len(array)], [mode])

    def end_document(self) -> None:
        """Close the document of the sequences added since the last mark."""
        self._marks.append(np.array([self._sequences], dtype=np.int64))

    def add_document(self, tokens: Any, lengths: Sequence[int] | None = None, modes: Sequence[int] | None = None) -> None:
        """Append one document: its tokens, and the lengths of its sequences (default: one sequence, possibly empty)."""
        array = self._checked(tokens)
        lengths = [len(array)] if lengths is None else lengths
        self._append(array, lengths, [0] * len(lengths) if modes is None else modes)
        self.end_document()

    def add_documents(self, tokens: Any, lengths: Sequence[int] | npt.NDArray[Any]) -> None:
        """Append many one-sequence documents at once: tokens [sum(lengths)], lengths [documents]."""
        first = self._sequences
        self._append(self._checked(tokens), lengths, [0] * len(lengths) if self._modes is not None else [])
        self._marks.append(np.arange(first + 1, self._sequences + 1, dtype=np.int64))

    def add_index(self, prefix: str | os.PathLike[str]) -> None:
        """Append all documents of another pair, in its order. Raises DataError if that pair is damaged or of another dtype."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype or (other.sequence_modes is None) != (self._modes is None):
            raise DataError(
                f"{idx_path(prefix)} holds {other.dtype}{' with modes' if other.sequence_modes is not None else ''}, "
                f"{self.bin_file} is written as {self.dtype}{' with modes' if self._modes is not None else ''}; "
                "merge only sets made with the same tokenizer and settings"
            )
        self._lengths.append(np.array(other.sequence_lengths))
        self._marks.append(np.asarray(other.document_indices[1:]) + self._sequences)
        if self._modes is not None:
            self._modes.append(np.array(other.sequence_modes, dtype=np.int8))
        self._sequences += len(other)
        with open(bin_path(prefix), "rb") as source:
            shutil.copyfileobj(source, self._out, 1 << 24)
        other.close()

    def finalize(self, idx_file: str | os.PathLike[str]) -> None:
        """Write the index and give both files their final names: tokens first, so that an index never names missing tokens.

        Raises DataError, and leaves nothing, if no tokens were added.
        """
        lengths = np.concatenate([np.zeros(0, dtype=np.int32), *self._lengths])
        if not int(lengths.sum(dtype=np.int64)):
            self.abort()
            raise DataError(
                f"{len(lengths)} documents without a single token were to be written to {self.bin_file}; nothing written"
            )
        assert int(self._marks[-1][-1]) == self._sequences, "a document was not closed with end_document"
        temporary = f"{os.fspath(idx_file)}.{os.getpid()}.partial"
        try:
            with open(temporary, "wb") as out:
                self._write_index(out, lengths)
                _to_disk(out)
            _to_disk(self._out)
            self._out.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(idx_file)
            os.replace(self._temporary, self.bin_file)
            os.replace(temporary, idx_file)
            for folder in {os.path.dirname(os.path.abspath(path)) for path in (self.bin_file, idx_file)}:
                sync_folder(folder)
        except BaseException:
            _remove(temporary)
            self.abort()
            raise

    def abort(self) -> None:
        """Drop what was written so far; no effect after `finalize`."""
        self._out.close()
        _remove(self._temporary)

    def _checked(self, tokens: Any) -> Tokens:
        array = np.asarray(tokens)
        if array.size == 0:
            return np.zeros(0, dtype=self.dtype)
        if array.dtype != self.dtype and self.dtype.kind in "iu":
            if array.dtype.kind not in "iu":
                raise DataError(f"tokens are integers, got values of dtype {array.dtype} for {self.bin_file}")
            low, high, bounds = int(array.min()), int(array.max()), np.iinfo(self.dtype)
            if low < bounds.min or high > bounds.max:
                raise DataError(
                    f"token ids {low} to {high} do not fit into {self.dtype} of {self.bin_file}; use a larger dtype"
                )
        return array.astype(self.dtype, copy=False)

    def _append(self, tokens: Tokens, lengths: Sequence[int] | npt.NDArray[Any], modes: Sequence[int]) -> None:
        sizes = np.asarray(lengths, dtype=np.int64)
        if int(sizes.sum()) != tokens.size or (sizes < 0).any() or (sizes > np.iinfo(np.int32).max).any():
            raise DataError(
                f"sequence lengths with sum {int(sizes.sum())} do not describe {tokens.size} tokens for {self.bin_file}"
            )
        self._out.write(np.ascontiguousarray(tokens).astype(self.dtype.newbyteorder("<"), copy=False).tobytes())
        self._lengths.append(sizes.astype(np.int32))
        self._sequences += len(sizes)
        if self._modes is not None:
            self._modes.append(np.asarray(modes, dtype=np.int8))

    def _write_index(self, out: BinaryIO, lengths: npt.NDArray[np.int32]) -> None:
        marks = np.concatenate(self._marks)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        out.write(_COUNTS.pack(MAGIC, 1, _CODES[self.dtype], len(lengths), len(marks)))
        out.write(lengths.astype("<i4", copy=False).tobytes())
        out.write((ends - lengths.astype(np.int64) * self.dtype.itemsize).astype("<i8", copy=False).tobytes())
        out.write(marks.astype("<i8", copy=False).tobytes())
        if self._modes is not None:
            out.write(np.concatenate([np.zeros(0, dtype=np.int8), *self._modes]).tobytes())


def merge(prefixes: Iterable[str | os.PathLike[str]], output_prefix: str | os.PathLike[str]) -> None:
    """Write the documents of all pairs, in the order given, as one pair under `output_prefix`.

    Raises DataError for damaged or differing inputs, and when the output would replace one of them; nothing is written then.
    """
    sources = [IndexedDataset(prefix) for prefix in prefixes]
    if not sources:
        raise DataError(f"no data sets to merge into {os.fspath(output_prefix)}; give at least one prefix")
    target = pathlib.Path(bin_path(output_prefix)).resolve()
    if any(pathlib.Path(bin_path(source.prefix)).resolve() == target for source in sources):
        raise DataError(f"{target} is both an input and the output of a merge; choose another output prefix")
    with IndexedDatasetBuilder(bin_path(output_prefix), sources[0].dtype, sources[0].sequence_modes is not None) as builder:
        for source in sources:
            builder.add_index(source.prefix)
            source.close()
        builder.finalize(idx_path(output_prefix))


def _to_disk(out: BinaryIO) -> None:
    out.flush()
    os.fsync(out.fileno())


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _refuse(prefix: str, reason: str) -> NoReturn:
    raise DataError(f"data set {prefix}: {reason} (files {bin_path(prefix)} and {idx_path(prefix)}); write the pair again")


def _file_sizes(prefix: str) -> tuple[int, int]:
    """Bytes of (.bin, .idx), or a DataError that names what is missing."""
    sizes = []
    for path in (bin_path(prefix), idx_path(prefix)):
        if not os.path.isfile(path):
            _refuse(prefix, f"{path} is missing or not a file")
        sizes.append(os.path.getsize(path))
    return sizes[0], sizes[1]


def _read_index(prefix: str, sizes: tuple[int, int], mmap: bool) -> _Index:
    """The arrays of the .idx, after its size was found to be what its own counts say; nothing larger is ever allocated."""
    path, actual = idx_path(prefix), sizes[1]
    if actual < _COUNTS.size:
        _refuse(prefix, f"{path} has {actual} bytes, fewer than the {_COUNTS.size} of its header")
    with open(path, "rb") as file:
        header = file.read(_COUNTS.size)
    magic, version, code, sequences, marks = _COUNTS.unpack(header)
    if magic != MAGIC:
        _refuse(prefix, f"{path} begins with {magic!r}, expected {MAGIC!r}: not an index file")
    if version != 1:
        _refuse(prefix, f"{path} has format version {version}, expected 1")
    if code not in _DTYPES:
        _refuse(prefix, f"{path} has dtype code {code}, expected one of 1 to 8")
    expected = _COUNTS.size + 12 * sequences + 8 * marks
    if actual not in (expected, expected + sequences):
        _refuse(
            prefix,
            f"{path} should have {expected} bytes for {sequences} sequences and {marks} document marks, but has {actual}",
        )
    raw: Tokens = np.memmap(path, dtype=np.uint8, mode="r") if mmap else np.fromfile(path, dtype=np.uint8)
    if len(raw) != actual:
        _refuse(prefix, f"{path} changed from {actual} to {len(raw)} bytes while it was opened")
    cuts = np.cumsum([_COUNTS.size, 4 * sequences, 8 * sequences, 8 * marks])
    parts = [raw[a:b] for a, b in itertools.pairwise(cuts)]
    modes = raw[cuts[-1] :].view(np.int8) if actual > expected else None
    return _Index(np.dtype(_DTYPES[code]), parts[0].view("<i4"), parts[1].view("<i8"), parts[2].view("<i8"), modes)


def _check_index(prefix: str, index: _Index, sizes: tuple[int, int]) -> None:
    """Lengths, offsets, document marks and the size of the .bin must tell one story."""
    path, lengths, marks = idx_path(prefix), index.lengths, index.marks
    if len(lengths) and int(lengths.min()) < 0:
        _refuse(prefix, f"{path} holds the negative length {int(lengths.min())} for sequence {int(lengths.argmin())}")
    itemsize = index.dtype.itemsize
    ends = np.cumsum(lengths, dtype=np.int64) * itemsize
    wrong = np.flatnonzero(index.pointers != ends - lengths.astype(np.int64) * itemsize)
    if len(wrong):
        first = int(wrong[0])
        expected = int(ends[first]) - int(lengths[first]) * itemsize
        _refuse(
            prefix, f"{path} puts sequence {first} at byte {int(index.pointers[first])}, but the lengths put it at {expected}"
        )
    if not len(marks) or marks[0] != 0 or marks[-1] != len(lengths) or (np.diff(marks) < 0).any():
        shown = f"{int(marks[0])} ... {int(marks[-1])}" if len(marks) else "none"
        _refuse(prefix, f"{path} has document marks {shown}, expected a rising sequence from 0 to {len(lengths)}")
    total = int(ends[-1]) if len(ends) else 0
    if sizes[0] != total:
        _refuse(
            prefix,
            f"{bin_path(prefix)} should have {total} bytes for {len(lengths)} sequences of {index.dtype}, but has {sizes[0]}",
        )
    if not total:
        _refuse(prefix, f"the {len(lengths)} sequences hold no tokens at all")
