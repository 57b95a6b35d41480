"""Train a SentencePiece tokenizer with byte fallback from text or JSONL files: writes P.model and P.vocab.

The tokenizer gives back every text exactly: no normalisation, no dummy prefix, extra white space kept, and what the
vocabulary lacks (line breaks among it) is written as bytes. The same input, options and thread count give the same files.

    python tools/train_tokenizer.py --input corpus.jsonl --output-prefix tokenizers/corpus --vocab-size 8000
"""

import argparse
import io
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.errors import ConfigError, DataError, MegatronError

_LONGEST_PIECE_OF_LINE = 16384  # characters; SentencePiece skips longer sentences instead of cutting them
_SMALLEST_VOCABULARY = 256 + 4 + 1  # bytes, the four special pieces, one character


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The options of this command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input", nargs="+", required=True, help="text files, one passage a line, or .jsonl files")
    parser.add_argument("--json-key", default="text", help="key of the text in .jsonl files (default: text)")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.model and PREFIX.vocab")
    parser.add_argument("--vocab-size", type=int, required=True, help="number of ids, bytes and special tokens included")
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="kind of model (default: bpe)")
    parser.add_argument(
        "--character-coverage", type=float, default=0.9995, help="share of the characters that get a piece of their own"
    )
    parser.add_argument("--max-lines", type=int, help="learn from the first so many lines only (default: all)")
    parser.add_argument("--num-threads", type=int, default=1, help="threads of the trainer (default: 1)")
    return parser.parse_args(argv)


def training_lines(paths: Sequence[str], json_key: str) -> Iterator[str]:
    """Lines of text to learn from, in order: line breaks removed, very long lines cut, empty lines left out.

    Raises DataError naming file and line of a line that is not valid UTF-8 or JSON.
    """
    for path in paths:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                for line in _passage(path, number, raw, json_key).split("\n"):
                    for start in range(0, len(line), _LONGEST_PIECE_OF_LINE):
                        piece = line[start : start + _LONGEST_PIECE_OF_LINE].rstrip("\r").replace("\0", "")
                        if piece:
                            yield piece


def train(options: argparse.Namespace) -> bytes:
    """Train as the options say; returns the serialised model.

    Raises DataError if there is no text, ConfigError if the vocabulary size cannot be reached with it.
    """
    lines = _first(training_lines(options.input, options.json_key), options.max_lines)
    first_line = next(lines, None)
    if first_line is None:
        raise DataError(f"no text to learn from in {', '.join(options.input)}.")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.chain([first_line], lines),
            model_writer=model,
            model_type=options.model_type,
            vocab_size=options.vocab_size,
            character_coverage=options.character_coverage,
            num_threads=options.num_threads,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            split_digits=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            max_sentence_length=8 * _LONGEST_PIECE_OF_LINE,  # bytes; a character has at most four
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rsplit("] ", 1)[-1].strip()
        raise ConfigError(
            f"SentencePiece cannot train --vocab-size {options.vocab_size} on this text: {reason or error}"
        ) from None
    return model.getvalue()


def write_atomically(prefix: Path, model: bytes) -> None:
    """Write PREFIX.vocab, then PREFIX.model; each appears whole or not at all."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(processor.vocab_size())
    vocabulary = "".join(f"{processor.id_to_piece(i)}\t{processor.get_score(i):g}\n" for i in ids)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for suffix, content in ((".vocab", vocabulary.encode("utf-8")), (".model", model)):
        final = prefix.with_name(prefix.name + suffix)
        temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(content)
            os.replace(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)


def check_options(options: argparse.Namespace) -> None:
    """Raise ConfigError for what cannot work, before anything is read."""
    for path in options.input:
        if not Path(path).is_file():
            raise ConfigError(f"--input {path!r} is not a file.")
    if options.vocab_size < _SMALLEST_VOCABULARY:
        raise ConfigError(
            f"--vocab-size {options.vocab_size} is too small: 256 bytes, 4 special tokens and one character are "
            f"{_SMALLEST_VOCABULARY}; use more."
        )
    for name in ("max_lines", "num_threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse_arguments(argv)
    try:
        check_options(options)
        model = train(options)
        write_atomically(Path(options.output_prefix), model)
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.output_prefix}.model and .vocab: {options.vocab_size} ids, {options.model_type} with byte fallback")
    return 0


def _passage(path: str, number: int, raw: bytes, json_key: str) -> str:
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        if not path.endswith((".jsonl", ".json")) or not text.strip():
            return text
        record = json.loads(text)
        passage = record[json_key]
        passage.encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{number}: not a valid line: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise DataError(f'{path}:{number}: expected a JSON object with a string under "{json_key}".') from None
    return passage


def _first(lines: Iterator[str], count: int | None) -> Iterator[str]:
    for number, line in enumerate(lines):
        if count is not None and number >= count:
            return
        yield line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
