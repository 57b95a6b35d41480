"""TikTokenizer: byte-pair ranks in one of three files, encoded by the `tiktoken` library.

    X.tiktoken   lines of "base64 rank"; ids are the ranks, `<|endoftext|>` comes after them
    tekken.json  {"config": {...}, "vocab": [{"rank", "token_bytes"}, ...]}; special ids first, then rank + their number
    ranks.json   the bare list [{"rank", "token_bytes"}, ...]; 1000 special ids first (Megatron's form)

The splitting pattern is the file's own where it has one, else the option: v1 = cl100k's, v2 = o200k's.
"""

import base64
import binascii
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.errors import ConfigError
from megatron.core.tokenizers.base import BytesStreamDecoder, StreamDecoder, Tokenizer, existing_file

# From tiktoken's own definitions of cl100k_base and o200k_base (MIT licence).
PATTERNS = {
    "v1": "|".join(
        [
            r"""'(?i:[sdmt]|ll|ve|re)""",
            r"""[^\r\n\p{L}\p{N}]?+\p{L}++""",
            r"""\p{N}{1,3}+""",
            r""" ?[^\s\p{L}\p{N}]++[\r\n]*+""",
            r"""\s++$""",
            r"""\s*[\r\n]""",
            r"""\s+(?!\S)""",
            r"""\s""",
        ]
    ),
    "v2": "|".join(
        [
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""\p{N}{1,3}""",
            r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
            r"""\s*[\r\n]+""",
            r"""\s+(?!\S)""",
            r"""\s+""",
        ]
    ),
}
END_OF_TEXT = "<|endoftext|>"
_PUBLISHED_END_OF_TEXT = {100256: 100257, 199998: 199999}  # number of ranks -> id: cl100k_base, o200k_base
_FIRST_SPECIALS = ("<unk>", "<s>", "</s>")
_LIST_SPECIALS = 1000


@dataclasses.dataclass(frozen=True)
class _RankFile:
    """ranks: bytes -> rank. offset: id = rank + offset. specials: text -> id."""

    ranks: dict[bytes, int]
    offset: int
    specials: dict[str, int]
    pattern: str


class TikTokenizer(Tokenizer):
    """`tokenizer_model`: a rank file. EOD is `<|endoftext|>` (.tiktoken) or `</s>` (JSON)."""

    def __init__(self, tokenizer_model: str | None, tiktoken_pattern: str = "v2") -> None:
        path = existing_file(tokenizer_model, "--tokenizer-model", "TikTokenizer")
        if tiktoken_pattern not in PATTERNS:
            raise ConfigError(f"tiktoken_pattern={tiktoken_pattern!r} is unknown; use one of {sorted(PATTERNS)}.")
        read = _read_json_ranks if path.suffix == ".json" else _read_base64_ranks
        try:
            content = read(path, PATTERNS[tiktoken_pattern])
        except (ValueError, KeyError, TypeError, UnicodeDecodeError, binascii.Error) as error:
            raise ConfigError(f"{path} is not a tiktoken rank file (.tiktoken) or tekken-like .json: {error!r}") from None
        self._encoding = _encoding(path.stem, content)
        self._offset = content.offset
        size = max(*(rank + content.offset for rank in content.ranks.values()), *content.specials.values()) + 1
        self._piece_bytes = [b""] * size
        for piece, rank in content.ranks.items():
            self._piece_bytes[rank + content.offset] = piece
        super().__init__(
            "TikTokenizer",
            size,
            specials=content.specials,
            eod=content.specials.get(END_OF_TEXT, content.specials.get("</s>")),
            bos=content.specials.get("<s>"),
            pad=content.specials.get("<pad>"),
            files=[path],
        )

    def _encode(self, text: str) -> list[int]:
        ranks = self._encoding.encode_ordinary(text)
        return [rank + self._offset for rank in ranks] if self._offset else ranks

    def _decode(self, token_ids: Sequence[int]) -> str:
        return b"".join([self._piece_bytes[i] for i in token_ids]).decode("utf-8", "replace")

    def _text_stream_decoder(self) -> StreamDecoder:
        return BytesStreamDecoder(self._piece_bytes.__getitem__)


def _encoding(name: str, content: _RankFile) -> Any:
    try:
        import tiktoken
    except ImportError:
        raise ConfigError(
            "TikTokenizer needs the package `tiktoken`; install the extra: pip install 'megadlms[tiktoken]'."
        ) from None
    missing = [value for value in range(256) if bytes([value]) not in content.ranks]
    if missing:
        raise ConfigError(f"the rank file {name!r} lacks {len(missing)} of the 256 single bytes (first: {missing[0]:#04x}).")
    return tiktoken.Encoding(name, pat_str=content.pattern, mergeable_ranks=content.ranks, special_tokens={})


def _read_base64_ranks(path: Path, pattern: str) -> _RankFile:
    ranks: dict[bytes, int] = {}
    for line in path.read_bytes().splitlines():
        if line:
            encoded, rank = line.split()
            ranks[base64.b64decode(encoded, validate=True)] = int(rank)
    end_of_text = _PUBLISHED_END_OF_TEXT.get(len(ranks), max(ranks.values(), default=-1) + 1)
    return _RankFile(ranks, 0, {END_OF_TEXT: end_of_text}, pattern)


def _read_json_ranks(path: Path, pattern: str) -> _RankFile:
    content = json.loads(path.read_text("utf-8"))
    entries, number_of_specials, kept = content, _LIST_SPECIALS, None
    special_texts: dict[int, str] = {}
    if isinstance(content, dict):
        config = content["config"]
        entries, pattern = content["vocab"], config["pattern"]
        number_of_specials = config["default_num_special_tokens"]
        kept = config["default_vocab_size"] - number_of_specials
        special_texts = {entry["rank"]: entry["token_str"] for entry in content.get("special_tokens") or []}
    special_texts = special_texts or dict(enumerate(_FIRST_SPECIALS))
    specials = {special_texts.get(i, f"<SPECIAL_{i}>"): i for i in range(number_of_specials)}
    ranks = {base64.b64decode(entry["token_bytes"], validate=True): entry["rank"] for entry in entries[:kept]}
    return _RankFile(ranks, number_of_specials, specials, pattern)
