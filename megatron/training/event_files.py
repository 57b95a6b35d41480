"""TensorBoard event files: written record by record, and cut back to a step when a run resumes.

A file is a row of records: u64 length, u32 checksum, protobuf Event, u32 checksum. A run that was killed leaves events past the
checkpoint it resumes from; they are removed from the files themselves, so that every reader sees each step once (TensorBoard's
own purge mark would also hide the history of the "... vs samples" scalars, whose steps are sample counts).
"""

import itertools
import os
import pathlib
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

_MARK = "tfevents"  # TensorBoard reads the files that have this in their name
SAMPLES_SUFFIX = " vs samples"
_COUNTER = itertools.count()


class EventWriter:
    """Appends scalars to a new event file in `folder`, whose name sorts behind all others there."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = Event
        self._summary: Any = Summary
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        newest = max((_stamp(path) for path in event_files(self.folder)), default=0)
        stamp = max(int(time.time()), newest + 1)
        name = f"events.out.{_MARK}.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.{next(_COUNTER)}"
        self._records: Any = RecordWriter((self.folder / name).open("wb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self.flush()

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Append one point."""
        point = self._summary(value=[self._summary.Value(tag=tag, simple_value=value)])
        self._write(self._event(wall_time=time.time(), step=step, summary=point))

    def flush(self) -> None:
        """Hand everything to the operating system: it survives the end of this process."""
        self._records.flush()

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        if not self._records.closed:
            self._records.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def event_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folder's event files, in the order in which TensorBoard reads them."""
    return sorted(path for path in folder.glob(f"*{_MARK}*") if path.is_file())


def cut_after(folder: str | os.PathLike[str], last_step: int) -> None:
    """Remove the scalars of all steps after `last_step`.

    Scalars "... vs samples" go with the scalar written before them. last_step=0: nothing is kept, and the old files are only
    renamed (`superseded` in place of `tfevents`), because they may belong to another run.
    """
    files = event_files(pathlib.Path(folder))
    if last_step == 0:
        for path in files:
            path.rename(path.with_name(path.name.replace(_MARK, "superseded")))
        return
    for path in reversed(files):
        if not _cut_file(path, last_step):
            return  # files are in order of steps: the older ones end even earlier


def has_scalar(folder: str | os.PathLike[str], tag: str, step: int) -> bool:
    """Whether a point of this tag and step is in the folder's files."""
    return any(
        event.step == step and any(value.tag == tag for value in event.summary.value)
        for path in event_files(pathlib.Path(folder))
        for _, event in _records(path)
    )


def _cut_file(path: pathlib.Path, last_step: int) -> bool:
    """Whether to look into older files too: something was removed here, or nothing is left here."""
    kept, removed, scalars, keep = [], 0, 0, True
    for raw, event in _records(path):
        tags = [value.tag for value in event.summary.value]
        if tags and not tags[0].endswith(SAMPLES_SUFFIX):
            keep = event.step <= last_step
        if tags and not keep:
            removed += 1
            continue
        kept.append(raw)
        scalars += bool(tags)
    if removed and not scalars:
        path.unlink()
    elif removed:
        temporary = path.with_name(f".cut-{os.getpid()}.tmp")
        temporary.write_bytes(b"".join(kept))
        os.replace(temporary, path)
    return bool(removed) or not scalars


def _records(path: pathlib.Path) -> Iterator[tuple[bytes, Any]]:
    """(record as in the file, event) up to the end or to a torn last record."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    data = path.read_bytes()
    position = 0
    while position + 16 <= len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        end = position + 16 + length
        if end > len(data):
            return
        try:
            event = Event.FromString(data[position + 12 : end - 4])
        except DecodeError:
            return
        yield data[position:end], event
        position = end


def _stamp(path: pathlib.Path) -> int:
    """The time in an event file's name (`events.out.tfevents.<seconds>.<host>...`); 0 if there is none."""
    digits = path.name.partition(f"{_MARK}.")[2].partition(".")[0]
    return int(digits) if digits.isdigit() else 0
