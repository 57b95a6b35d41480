"""Tokenizer: text to ids and back, whole or as a stream. The rules that hold for every kind are written here once.

* User text never becomes a special id by itself: a literal `</s>` is encoded as the characters `<`, `/`, `s`, `>`.
  `allow_special=True` opts in.
* Nothing is added silently: no BOS, no EOD, no prefix. `add_bos=True` puts one BOS in front; whoever writes documents
  appends `required_eod()`.
* `vocab_size` is the largest id plus one, added tokens included, so a model of that size covers every id.
"""

import abc
import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from megatron.core.errors import ConfigError, DataError


class StreamDecoder(abc.ABC):
    """Turns ids into text one at a time; what it returns, joined, is `detokenize` of the same ids."""

    @abc.abstractmethod
    def push(self, token_id: int) -> str:
        """The text that this id completes: empty while a character is still missing bytes."""

    @abc.abstractmethod
    def finish(self) -> str:
        """What is left at the end of the stream: empty, or replacement characters for bytes that are no valid UTF-8."""


class BytesStreamDecoder(StreamDecoder):
    """For tokenizers whose every id stands for fixed bytes: feeds them to an incremental UTF-8 decoder."""

    def __init__(self, bytes_of_id: Callable[[int], bytes]) -> None:
        self._bytes_of_id = bytes_of_id
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of_id(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class Tokenizer(abc.ABC):
    """Base of all tokenizers.

    name: the `--tokenizer-type` that builds it.
    vocab_size: largest id + 1, added and special tokens included.
    eod, bos, pad: ids of the end-of-document, beginning-of-sequence and padding tokens, or None where there is none.
    specials: literal text of each special token -> id.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        *,
        specials: Mapping[str, int],
        eod: int | None = None,
        bos: int | None = None,
        pad: int | None = None,
        files: Iterable[Path] = (),
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.specials = dict(specials)
        self.eod = eod
        self.bos = bos
        self.pad = pad
        self._special_texts = {token_id: text for text, token_id in self.specials.items()}
        self._files = tuple(files)
        longest_first = sorted(self.specials, key=len, reverse=True)
        self._special_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    # What a kind of tokenizer has to say.

    @abc.abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Ids of `text` taken literally. `text` holds no lone surrogate."""

    @abc.abstractmethod
    def _decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids that are inside the vocabulary and not special."""

    @abc.abstractmethod
    def _text_stream_decoder(self) -> StreamDecoder:
        """Stream decoder for ids that are inside the vocabulary and not special."""

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; overridden where the library is faster on many texts at once."""
        return [self._encode(text) for text in texts]

    # What everybody calls.

    def tokenize(self, text: str, *, add_bos: bool = False, allow_special: bool = False) -> list[int]:
        """Ids of `text`.

        add_bos: put one BOS in front. allow_special: the literal text of a special token becomes its id.
        Raises DataError for text that is no valid Unicode, ConfigError for add_bos without a BOS token.
        """
        return self.tokenize_batch([text], add_bos=add_bos, allow_special=allow_special)[0]

    def tokenize_batch(self, texts: Sequence[str], *, add_bos: bool = False, allow_special: bool = False) -> list[list[int]]:
        """Ids of each text, as `tokenize` gives them; one call into the library for all."""
        for text in texts:
            check_text(text)
        if allow_special and self._special_pattern is not None:
            encoded = [self._encode_with_specials(text, self._special_pattern) for text in texts]
        else:
            encoded = self._encode_batch(texts)
        if add_bos:
            bos = self.required_bos()
            encoded = [[bos, *token_ids] for token_ids in encoded]
        return encoded

    def detokenize(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids. Special ids give nothing, or their literal text with skip_special=False. DataError for unknown ids."""
        parts: list[str] = []
        plain: list[int] = []
        for token_id in token_ids:
            self._check_id(token_id)
            special = self._special_texts.get(token_id)
            if special is None:
                plain.append(token_id)
            elif not skip_special:
                parts += [self._decode(plain), special]
                plain = []
        return "".join([*parts, self._decode(plain)])

    def stream_decoder(self, *, skip_special: bool = True) -> StreamDecoder:
        """A fresh decoder for one stream of ids; special ids as in `detokenize`."""
        return _SpecialAwareStreamDecoder(self, skip_special)

    def files(self) -> list[Path]:
        """The files this tokenizer was built from, to be copied beside a checkpoint; empty for the built-in ones."""
        return list(self._files)

    def required_eod(self) -> int:
        """The end-of-document id. Raises ConfigError where the tokenizer has none."""
        if self.eod is None:
            raise ConfigError(
                f"{self.name} has no end-of-document token (expected an eos/eod token, found special tokens "
                f"{sorted(self.specials) or 'none'}); leave out --append-eod or use a tokenizer that defines one."
            )
        return self.eod

    def required_bos(self) -> int:
        """The beginning-of-sequence id. Raises ConfigError where the tokenizer has none."""
        if self.bos is None:
            raise ConfigError(
                f"{self.name} has no beginning-of-sequence token (found special tokens {sorted(self.specials) or 'none'}); "
                "leave out --add-bos or use a tokenizer that defines one."
            )
        return self.bos

    def _encode_with_specials(self, text: str, pattern: re.Pattern[str]) -> list[int]:
        token_ids: list[int] = []
        for part in pattern.split(text):
            if part in self.specials:
                token_ids.append(self.specials[part])
            elif part:
                token_ids += self._encode(part)
        return token_ids

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise DataError(f"token id {token_id} is outside the vocabulary of {self.name}: expected 0..{self.vocab_size - 1}.")


class _SpecialAwareStreamDecoder(StreamDecoder):
    """Handles special ids as `detokenize` does and passes the others on."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._text_decoder = tokenizer._text_stream_decoder()

    def push(self, token_id: int) -> str:
        self._tokenizer._check_id(token_id)
        special = self._tokenizer._special_texts.get(token_id)
        if special is None:
            return self._text_decoder.push(token_id)
        if self._skip_special:
            return ""
        rest = self._text_decoder.finish()
        self._text_decoder = self._tokenizer._text_stream_decoder()
        return rest + special

    def finish(self) -> str:
        return self._text_decoder.finish()


def check_text(text: str) -> None:
    """Raise DataError if `text` holds a lone surrogate, which no encoding can express."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise DataError(
            f"the text holds a lone surrogate (\\u{code:04x}) at character {error.start}; it is not valid Unicode."
        ) from None


def existing_file(path: str | None, option: str, tokenizer_type: str) -> Path:
    """`path` as a Path. ConfigError if it is missing, naming the option."""
    if not path:
        raise ConfigError(f"{tokenizer_type} needs {option}: give the path of the file.")
    if not Path(path).is_file():
        raise ConfigError(f"{option}={path!r} is not a file; {tokenizer_type} reads it, so give an existing path.")
    return Path(path)
