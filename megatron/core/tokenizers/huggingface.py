"""HuggingFaceTokenizer: a `tokenizer.json` file, or a folder that holds one, through the `tokenizers` library.

Only data is read from the folder: no code of it is run, no template is expanded. What the file says about adding BOS/EOS,
truncation, padding and BPE dropout is switched off, because each of them would change documents silently. The names of the
special tokens come from `tokenizer_config.json` or `special_tokens_map.json` beside the file, else from the usual names.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.base import BytesStreamDecoder, StreamDecoder, Tokenizer, existing_file

if TYPE_CHECKING:
    import tokenizers

_SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_USUAL_NAMES = {
    "eos_token": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<eod>", "[EOS]"),
    "bos_token": ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]"),
    "pad_token": ("<pad>", "<|pad|>", "[PAD]"),
}


@dataclasses.dataclass(frozen=True)
class SpecialNames:
    """Literal text of the special tokens; None where there is none."""

    eod: str | None = None
    bos: str | None = None
    pad: str | None = None


class LibraryTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` under this project's rules. Base of the kinds that this library reads."""

    def __init__(self, name: str, library: "tokenizers.Tokenizer", names: SpecialNames, files: Sequence[Path]) -> None:
        vocabulary = library.get_vocab(with_added_tokens=True)
        _make_deterministic(library, [n for n in (names.eod, names.bos, names.pad) if n in vocabulary])
        specials = {token.content: i for i, token in library.get_added_tokens_decoder().items() if token.special}
        super().__init__(
            name,
            max(vocabulary.values(), default=-1) + 1,
            specials=specials,
            eod=vocabulary.get(names.eod or ""),
            bos=vocabulary.get(names.bos or ""),
            pad=vocabulary.get(names.pad or ""),
            files=files,
        )
        self._library = library
        unknown = _unknown_token(library)
        self._never_from_text = {i for text, i in specials.items() if text != unknown}
        self._piece_bytes = _byte_level_pieces(vocabulary, self.vocab_size) if _is_byte_level(library) else None

    def _encode(self, text: str) -> list[int]:
        return self._without_specials(text, self._library.encode(text, add_special_tokens=False).ids)

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._without_specials(text, encoding.ids) for text, encoding in zip(texts, encodings, strict=True)]

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._piece_bytes is not None:
            return b"".join([self._piece_bytes[i] for i in token_ids]).decode("utf-8", "replace")
        return self._library.decode(list(token_ids), skip_special_tokens=False)

    def _text_stream_decoder(self) -> StreamDecoder:
        if self._piece_bytes is not None:
            return BytesStreamDecoder(self._piece_bytes.__getitem__)
        return _WindowStreamDecoder(self._library)

    def _without_specials(self, text: str, token_ids: list[int]) -> list[int]:
        """`token_ids`, unless a word of `text` is a special token to the model: then its spelling is encoded in two parts."""
        if self._never_from_text.isdisjoint(token_ids) or self._special_pattern is None:
            return token_ids
        split: list[int] = []
        start = 0
        for match in self._special_pattern.finditer(text):
            split += self._library.encode(text[start : match.start() + 1], add_special_tokens=False).ids
            start = match.start() + 1
        split += self._library.encode(text[start:], add_special_tokens=False).ids
        if not self._never_from_text.isdisjoint(split):
            raise DataError(f"{self.name} turns ordinary text into a special token; pass allow_special if that is meant.")
        return split


class HuggingFaceTokenizer(LibraryTokenizer):
    """`tokenizer_model`: a tokenizer.json, or the folder that holds it."""

    def __init__(self, tokenizer_model: str | None) -> None:
        path = _tokenizer_json(tokenizer_model)
        library_module = import_tokenizers("HuggingFaceTokenizer")
        try:
            library = library_module.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} is not a tokenizer.json that `tokenizers` can read: {error}") from None
        side_files = [path.with_name(name) for name in _SIDE_FILES if path.with_name(name).is_file()]
        super().__init__("HuggingFaceTokenizer", library, _special_names(library, side_files), [path, *side_files])


class _WindowStreamDecoder(StreamDecoder):
    """For decoders that look at neighbouring tokens: decodes the last tokens with and without the new one.

    Text is held back while it ends in U+FFFD, because that is how an unfinished character looks.
    """

    def __init__(self, library: "tokenizers.Tokenizer") -> None:
        self._library = library
        self._token_ids: list[int] = []
        self._window_start = 0
        self._emitted_end = 0

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd"):
            return ""
        if text:
            self._window_start, self._emitted_end = self._emitted_end, len(self._token_ids)
        return text

    def finish(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        decode = self._library.decode
        before = decode(self._token_ids[self._window_start : self._emitted_end], skip_special_tokens=False)
        return decode(self._token_ids[self._window_start :], skip_special_tokens=False)[len(before) :]


def import_tokenizers(tokenizer_type: str) -> Any:
    """The `tokenizers` module, with its thread pool off (our workers are processes). ConfigError if it is not installed."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(
            f"{tokenizer_type} needs the package `tokenizers`; install the extra: pip install 'megadlms[hf]'."
        ) from None
    return tokenizers


def _tokenizer_json(given: str | None) -> Path:
    if given and Path(given).is_dir():
        inside = Path(given) / "tokenizer.json"
        if not inside.is_file():
            raise ConfigError(
                f"--tokenizer-model={given!r} holds no tokenizer.json, which HuggingFaceTokenizer reads; for a SentencePiece "
                "tokenizer.model use --tokenizer-type SentencePieceTokenizer."
            )
        return inside
    return existing_file(given, "--tokenizer-model", "HuggingFaceTokenizer")


def _special_names(library: "tokenizers.Tokenizer", side_files: Sequence[Path]) -> SpecialNames:
    declared: dict[str, Any] = {}
    for path in reversed(side_files):  # tokenizer_config.json wins
        declared.update({key: value for key, value in _read_json_object(path).items() if value is not None})
    specials = {token.content for token in library.get_added_tokens_decoder().values() if token.special}

    def name_of(key: str) -> str | None:
        if not side_files:
            return next((name for name in _USUAL_NAMES[key] if name in specials), None)
        value = declared.get(key)
        value = value.get("content") if isinstance(value, Mapping) else value
        return value if isinstance(value, str) else None

    return SpecialNames(eod=name_of("eos_token"), bos=name_of("bos_token"), pad=name_of("pad_token"))


def _read_json_object(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} should hold a JSON object, found {type(value).__name__}.")
    return value


def _make_deterministic(library: "tokenizers.Tokenizer", special_names: Sequence[str]) -> None:
    library.no_truncation()
    library.no_padding()
    library.add_special_tokens(list(special_names))  # marks tokens that the vocabulary already has
    library.encode_special_tokens = True  # special text is encoded literally
    if type(library.model).__name__ == "BPE":
        library.model.dropout = None


def _unknown_token(library: "tokenizers.Tokenizer") -> str | None:
    model = library.model
    if type(model).__name__ == "Unigram":
        unknown_id = json.loads(library.to_str())["model"]["unk_id"]  # this model class has no attribute for it
        return None if unknown_id is None else library.id_to_token(unknown_id)
    return model.unk_token


def _is_byte_level(library: "tokenizers.Tokenizer") -> bool:
    return type(library.decoder).__name__ == "ByteLevel"


def _byte_level_pieces(vocabulary: Mapping[str, int], size: int) -> list[bytes]:
    """Bytes of each id of a byte-level BPE; added tokens stand for their own text."""
    byte_of_character = {character: byte for byte, character in byte_level_alphabet().items()}
    pieces = [b""] * size
    for token, token_id in vocabulary.items():
        try:
            pieces[token_id] = bytes([byte_of_character[character] for character in token])
        except KeyError:
            pieces[token_id] = token.encode("utf-8")
    return pieces


def byte_level_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in of each byte: itself where printable, else the next characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in alphabet]
    alphabet.update({byte: chr(256 + position) for position, byte in enumerate(others)})
    return alphabet
