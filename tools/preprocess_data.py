"""JSONL text to token files: PREFIX_KEY_document.bin/.idx for every key, in input order, whatever the number of workers.

    parent    reads 256 KB of whole lines --> worker: parse, encode, EOD --> parent: reorder, write
              one pipe per worker, one chunk at a time on it; at most 4 chunks per worker are between reading and writing

Every input line is either written or accounted for: bad lines stop the run with file and line, or are skipped and counted.
Output appears under its final name only when it is complete.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizers/corpus.model --append-eod --workers 8
"""

import argparse
import collections
import contextlib
import dataclasses
import gzip
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, bin_path, idx_path, optimal_dtype
from megatron.core.errors import ConfigError, DataError, MegatronError
from megatron.core.tokenizers import TOKENIZER_TYPES, Tokenizer, build_tokenizer

CHUNK_BYTES = 1 << 18
_BOM = b"\xef\xbb\xbf"
_SHOWN_LINES = 20  # bad lines that are printed one by one; all are counted
_JSON_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
_UNSUPPORTED = {
    "--split-sentences": "documents are kept whole",
    "--keep-newlines": "line breaks are always kept",
    "--lang": "it belongs to --split-sentences",
    "--partitions": "--workers uses all processes on one output",
    "--keep-sequential-samples": "the order of the input is always kept",
    "--find-optimal-num-workers": "start with one worker per core",
}


# --- options


class _Refuse(argparse.Action):
    """A Megatron flag that is known and not supported: an error that says why."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        flag = self.option_strings[0]
        parser.error(f"{flag} is a Megatron option that is not supported ({_UNSUPPORTED[flag]}); leave it out")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The options of this command, under Megatron's names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input", nargs="+", required=True, help="JSONL files (.gz is read too), taken in this order")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], help="keys to extract, each into its own output (default: text)"
    )
    parser.add_argument("--output-prefix", required=True, help="output is PREFIX_KEY_document.bin and .idx")
    parser.add_argument("--tokenizer-type", required=True, choices=TOKENIZER_TYPES)
    parser.add_argument("--tokenizer-model", help="SentencePiece .model, tokenizer.json (or its folder), or tiktoken file")
    parser.add_argument("--vocab-file", help="GPT-2 vocabulary (encoder.json)")
    parser.add_argument("--merge-file", help="GPT-2 merges (vocab.bpe)")
    parser.add_argument("--vocab-size", type=int, help="NullTokenizer: number of ids without EOD")
    parser.add_argument("--tiktoken-pattern", choices=("v1", "v2"), default="v2", help="TikTokenizer: v1 = cl100k, v2 = o200k")
    parser.add_argument("--append-eod", action="store_true", help="end every document with the tokenizer's EOD")
    parser.add_argument("--add-bos", action="store_true", help="begin every document with the tokenizer's BOS")
    parser.add_argument(
        "--allow-special-tokens", action="store_true", help="let the literal text of special tokens become their ids"
    )
    parser.add_argument(
        "--on-bad-line", choices=("stop", "skip"), default="stop", help="what to do with a line that cannot be used"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that encode (default: 1)")
    parser.add_argument("--log-interval", type=int, default=10000, help="documents between progress lines (default: 10000)")
    for flag in _UNSUPPORTED:
        parser.add_argument(flag, action=_Refuse, nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def check_options(options: argparse.Namespace) -> None:
    """Raise ConfigError for what cannot work, before anything is started or written."""
    for path in options.input:
        if not Path(path).is_file():
            raise ConfigError(f"--input {path!r} is not a file.")
        if not os.access(path, os.R_OK):
            raise ConfigError(f"--input {path!r} cannot be read; check its permissions.")
    if len(set(options.json_keys)) != len(options.json_keys):
        raise ConfigError(f"--json-keys {' '.join(options.json_keys)} names a key twice.")
    for name in ("workers", "log_interval"):
        if vars(options)[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {vars(options)[name]}.")


def tokenizer_of(options: argparse.Namespace) -> Tokenizer:
    """The tokenizer the options name, with the special tokens they need. Raises ConfigError otherwise."""
    tokenizer = build_tokenizer(
        options.tokenizer_type,
        tokenizer_model=options.tokenizer_model,
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
        vocab_size=options.vocab_size,
        tiktoken_pattern=options.tiktoken_pattern,
    )
    if options.append_eod:
        tokenizer.required_eod()
    if options.add_bos:
        tokenizer.required_bos()
    return tokenizer


# --- reading


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Whole lines of one file. first_line: number of its first line, from 1. position: bytes of all files consumed after it."""

    path: str
    first_line: int
    data: bytes
    position: int


def read_chunks(paths: Sequence[str]) -> Iterator[Chunk]:
    """All lines of all files in order, about CHUNK_BYTES at a time. Raises DataError for damaged .gz files."""
    before = 0
    for path in paths:
        with open(path, "rb") as raw:
            text: BinaryIO = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw  # type: ignore[assignment]
            first_line = 1
            while data := _whole_lines(text, path):
                yield Chunk(path, first_line, data, before + raw.tell())
                first_line += data.count(b"\n")
        before += os.path.getsize(path)


def _whole_lines(text: BinaryIO, path: str) -> bytes:
    try:
        data = text.read(CHUNK_BYTES)
        return data if data.endswith(b"\n") else data + text.readline()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged or cut short: {error}") from None


# --- encoding


@dataclasses.dataclass(frozen=True)
class SkippedLine:
    """An input line that gives no document. bad: it stops the run unless --on-bad-line skip. kind: what is counted."""

    line: int
    kind: str
    detail: str
    bad: bool


@dataclasses.dataclass(frozen=True)
class EncodedKey:
    """Documents of one key: tokens as bytes of the output's dtype, lengths [documents]."""

    tokens: bytes
    lengths: list[int]


@dataclasses.dataclass(frozen=True)
class EncodedChunk:
    """What became of a chunk: `lines` = `written` + len(`skipped`). with_text: records that hold any text."""

    lines: int
    written: int
    with_text: int
    skipped: list[SkippedLine]
    keys: list[EncodedKey]


class _BadLine(Exception):
    """kind, detail of a line that cannot be used."""


@dataclasses.dataclass(frozen=True)
class Encoder:
    """How lines become documents: the same in every worker."""

    tokenizer: Tokenizer
    json_keys: tuple[str, ...]
    append_eod: bool
    add_bos: bool
    allow_special: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of the stored tokens."""
        return np.dtype(optimal_dtype(self.tokenizer.vocab_size))

    def encode(self, first_line: int, data: bytes) -> EncodedChunk:
        """Parse and encode the lines of a chunk. Never raises for what a line holds."""
        lines = data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        skipped: list[SkippedLine] = []
        records: list[tuple[int, list[str]]] = []
        for number, raw in enumerate(lines, start=first_line):
            try:
                records.append((number, parse_line(raw, self.json_keys, is_first=number == 1)))
            except _BadLine as error:
                kind, detail = error.args
                skipped.append(SkippedLine(number, kind, detail, bad=kind != "blank line"))
        encoded = self._encode_records(records, skipped)
        left_out = {line.line for line in skipped}
        with_text = sum(1 for number, texts in records if number not in left_out and any(texts))
        skipped.sort(key=lambda line: line.line)
        return EncodedChunk(len(lines), len(encoded), with_text, skipped, self._by_key(encoded))

    def _encode_records(self, records: list[tuple[int, list[str]]], skipped: list[SkippedLine]) -> list[list[list[int]]]:
        """Ids of each record's texts; records that cannot be encoded or hold nothing are added to `skipped`."""
        if not self.append_eod:
            empty = {number for number, texts in records if not any(texts)}
            skipped += [SkippedLine(number, "empty document", "no text and no EOD to write", bad=False) for number in empty]
            records = [record for record in records if record[0] not in empty]
        try:
            flat = self._tokenize([text for _, texts in records for text in texts])
        except DataError:  # one of them; find out which
            encoded = []
            for number, texts in records:
                try:
                    encoded.append(self._tokenize(texts))
                except DataError as error:
                    skipped.append(SkippedLine(number, "text that cannot be encoded", str(error), bad=True))
            return encoded
        width = len(self.json_keys)
        return [flat[start : start + width] for start in range(0, len(flat), width)]

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer.tokenize_batch(texts, add_bos=self.add_bos, allow_special=self.allow_special)

    def _by_key(self, encoded: list[list[list[int]]]) -> list[EncodedKey]:
        end = [self.tokenizer.required_eod()] if self.append_eod else []
        keys = []
        for position in range(len(self.json_keys)):
            documents = [record[position] + end for record in encoded]
            lengths = [len(document) for document in documents if document]
            tokens = np.fromiter(itertools.chain.from_iterable(documents), dtype=self.dtype, count=sum(lengths))
            keys.append(EncodedKey(tokens.tobytes(), lengths))
        return keys


def parse_line(raw: bytes, json_keys: Sequence[str], *, is_first: bool) -> list[str]:
    """The strings under `json_keys` of one JSON line. Raises _BadLine(kind, detail)."""
    if is_first:
        raw = raw.removeprefix(_BOM)
    if not raw.strip():
        raise _BadLine("blank line", "nothing in it")
    try:
        record = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadLine("invalid UTF-8", f"byte {error.start} is {raw[error.start]:#04x}: {error.reason}") from None
    except json.JSONDecodeError as error:
        raise _BadLine("invalid JSON", f"{error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # numbers too long, brackets too deep
        raise _BadLine("invalid JSON", str(error)) from None
    if not isinstance(record, dict):
        raise _BadLine("not a JSON object", f'expected {{"{json_keys[0]}": "..."}}, got {_JSON_NAMES[type(record)]}')
    texts = []
    for key in json_keys:
        if key not in record:
            raise _BadLine("missing key", f'no key "{key}"; found: {", ".join(map(ascii, list(record)[:5])) or "none"}')
        if not isinstance(record[key], str):
            raise _BadLine("not a string", f'"{key}" is {_JSON_NAMES[type(record[key])]}, expected a string')
        texts.append(record[key])
    return texts


# --- workers


class WorkerPool:
    """Processes that encode chunks. A worker that ends on its own is an error at once: its pipe has no other end left."""

    def __init__(self, encoder: Encoder, workers: int) -> None:
        method = "fork" if sys.platform == "linux" else "spawn"  # fork: the tokenizer is loaded once and shared
        context: Any = multiprocessing.get_context(method)
        self._encoder = encoder
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(workers if workers > 1 else 0):
            ours, theirs = context.Pipe()
            # A forked child inherits our ends of the pipes made so far and must close them, or nobody would see us end.
            inherited = [*self._pipes, ours] if method == "fork" else []
            process = context.Process(target=_worker, args=(theirs, encoder, inherited), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if kind is not None:
                process.terminate()
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()

    def encode(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, EncodedChunk]]:
        """Chunks (their data dropped) with their encodings, in order. One worker means: in this process."""
        if not self._processes:
            for chunk in chunks:
                yield dataclasses.replace(chunk, data=b""), self._encoder.encode(chunk.first_line, chunk.data)
            return
        window = 4 * len(self._processes)
        numbered = enumerate(chunks)
        waiting: collections.deque[Chunk] = collections.deque()  # read and not yet handed on; the first has number `handed_on`
        done: dict[int, EncodedChunk] = {}
        busy: dict[Connection, int] = {}
        idle = list(self._pipes)
        handed_on = 0
        while True:
            while idle and len(waiting) < window and (item := next(numbered, None)) is not None:
                number, chunk = item
                self._send(idle[-1], (chunk.first_line, chunk.data))
                busy[idle.pop()] = number
                waiting.append(dataclasses.replace(chunk, data=b""))
            if handed_on in done:
                yield waiting.popleft(), done.pop(handed_on)
                handed_on += 1
            elif busy:
                for ready in multiprocessing.connection.wait(list(busy)):
                    assert isinstance(ready, Connection)
                    done[busy.pop(ready)] = self._receive(ready)
                    idle.append(ready)
            else:
                return

    def _send(self, pipe: Connection, message: tuple[int, bytes]) -> None:
        try:
            pipe.send(message)
        except OSError:
            raise self._ended(pipe) from None

    def _receive(self, pipe: Connection) -> EncodedChunk:
        try:
            result = pipe.recv()
        except (EOFError, OSError):
            raise self._ended(pipe) from None
        if isinstance(result, str):
            raise MegatronError(f"a worker failed:\n{result}")
        return result

    def _ended(self, pipe: Connection) -> MegatronError:
        process = self._processes[self._pipes.index(pipe)]
        process.join(timeout=5)
        return MegatronError(
            f"worker process {process.pid} ended unexpectedly with exit code {process.exitcode} (negative: killed by that "
            "signal; -9 is often the kernel's answer to lack of memory). Nothing was written; start again, with fewer "
            "--workers if memory ran out."
        )


def _worker(pipe: Connection, encoder: Encoder, inherited: Sequence[Connection]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    with contextlib.suppress(EOFError, OSError):  # the parent is done, or gone
        while True:
            first_line, data = pipe.recv()
            try:
                result: EncodedChunk | str = encoder.encode(first_line, data)
            except Exception:
                result = traceback.format_exc()
            pipe.send(result)


# --- progress and account


class Account:
    """Counts of lines, with the reasons of the skipped ones."""

    def __init__(self) -> None:
        self.read = 0
        self.written = 0
        self.with_text = 0
        self._reasons: dict[str, list[str]] = {}
        self._reason_counts: collections.Counter[str] = collections.Counter()

    @property
    def skipped(self) -> int:
        """Lines that gave no document."""
        return self._reason_counts.total()

    def add(self, chunk: Chunk, encoded: EncodedChunk, *, stop_at_bad_line: bool) -> None:
        """Count a chunk. With `stop_at_bad_line` its first bad line is a DataError that names file, line and reason."""
        self.read += encoded.lines
        self.written += encoded.written
        self.with_text += encoded.with_text
        for skipped in encoded.skipped:
            place = f"{chunk.path}:{skipped.line}"
            text = f"{place}: {skipped.kind}: {skipped.detail}"
            if skipped.bad and stop_at_bad_line:
                raise DataError(
                    f"{text.rstrip('.')}. Nothing was written; fix the line, or pass --on-bad-line skip to leave them out"
                )
            if skipped.bad and self.skipped < _SHOWN_LINES:
                print(f"skipped {text}", file=sys.stderr)
            self._reason_counts[skipped.kind] += 1
            places = self._reasons.setdefault(skipped.kind, [])
            if len(places) < _SHOWN_LINES:
                places.append(place)

    def summary(self) -> str:
        """`read 12, written 5, skipped 7`, then one line per reason with the places."""
        lines = [f"read {self.read}, written {self.written}, skipped {self.skipped}"]
        for kind, count in self._reason_counts.most_common():
            places = ", ".join(self._reasons[kind]) + (", ..." if count > len(self._reasons[kind]) else "")
            lines.append(f"  {count} x {kind}: {places}")
        return "\n".join(lines)


class Progress:
    """Documents/s, MB/s of text and time left: a bar on a terminal, plain lines elsewhere, both on stderr."""

    def __init__(self, total_bytes: int, log_interval: int) -> None:
        self._total = total_bytes
        self._interval = log_interval
        self._next_report = log_interval
        self._start = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:.0f}%"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("reading", total=self._total)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, documents: int, position: int) -> None:
        """`documents` written so far, `position` bytes of the input consumed."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        rates = f"{documents} documents, {documents / seconds:.0f} docs/s, {position / seconds / 1e6:.2f} MB/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=position, description=rates)
        elif documents >= self._next_report:
            self._next_report = documents - documents % self._interval + self._interval
            left = int(seconds * (self._total - position) / max(position, 1))
            done = 100 * position // max(self._total, 1)
            print(
                f"{rates}, {done}% done, ETA {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}", file=sys.stderr, flush=True
            )


# --- the whole


def preprocess(options: argparse.Namespace, tokenizer: Tokenizer) -> Account:
    """Read, encode and write as the options say. On any error nothing is left under the final names or beside them."""
    encoder = Encoder(tokenizer, tuple(options.json_keys), options.append_eod, options.add_bos, options.allow_special_tokens)
    account = Account()
    total_bytes = sum(os.path.getsize(path) for path in options.input)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(WorkerPool(encoder, options.workers))  # first: a fork should inherit no half-written file
        prefixes = [f"{options.output_prefix}_{key}_document" for key in options.json_keys]
        Path(options.output_prefix).absolute().parent.mkdir(parents=True, exist_ok=True)
        builders = [stack.enter_context(IndexedDatasetBuilder(bin_path(prefix), encoder.dtype)) for prefix in prefixes]
        progress = stack.enter_context(Progress(total_bytes, options.log_interval))
        for chunk, encoded in pool.encode(read_chunks(options.input)):
            account.add(chunk, encoded, stop_at_bad_line=options.on_bad_line == "stop")
            for builder, key in zip(builders, encoded.keys, strict=True):
                builder.add_documents(np.frombuffer(key.tokens, dtype=encoder.dtype), key.lengths)
            progress.update(account.written, chunk.position)
        if not account.with_text:
            raise DataError(f"no text in {', '.join(options.input)}; nothing was written.\n{account.summary()}")
        for builder, prefix in zip(builders, prefixes, strict=True):
            builder.finalize(idx_path(prefix))
    return account


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code: 0 done, 2 wrong options or data, 1 any other failure."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # file names of any kind in any locale
    options = parse_arguments(argv)
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unwinds, so files are removed
    try:
        check_options(options)
        account = preprocess(options, tokenizer_of(options))
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}; nothing was written.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written.", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(account.summary())
    names = ", ".join(f"{options.output_prefix}_{key}_document.bin/.idx" for key in options.json_keys)
    print(f"wrote {names}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
