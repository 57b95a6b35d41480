"""NullTokenizer: text is the ids themselves, as integers separated by white space. For tests, benchmarks and ready-made ids.

With `vocab_size=N` the ids are 0..N-1 and EOD is N, so the model has N + 1 true ids (Megatron's rule).
"""

import re
from collections.abc import Sequence

from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers.base import StreamDecoder, Tokenizer

_IDS = re.compile(r"[0-9\s]*", re.ASCII)


class NullTokenizer(Tokenizer):
    """ids 0..vocab_size-1 written as decimal numbers; `tokenizer.vocab_size` is the option plus one, for EOD."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ConfigError(f"NullTokenizer needs vocab_size >= 1, got {vocab_size}.")
        super().__init__("NullTokenizer", vocab_size + 1, specials={"<eod>": vocab_size}, eod=vocab_size)

    def _encode(self, text: str) -> list[int]:
        if _IDS.fullmatch(text) is None:
            wrong = next(word for word in text.split() if _IDS.fullmatch(word) is None)
            raise DataError(f"NullTokenizer expects integers separated by spaces, got {wrong[:40]!r}.")
        token_ids = [_small_int(word) for word in text.split()]
        if token_ids and max(token_ids) >= self.vocab_size - 1:
            raise DataError(f"NullTokenizer with vocab_size={self.vocab_size - 1} expects ids below it, got {max(token_ids)}.")
        return token_ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def _text_stream_decoder(self) -> StreamDecoder:
        return _SpacedStreamDecoder()


class _SpacedStreamDecoder(StreamDecoder):
    """Puts a space before every id but the first."""

    def __init__(self) -> None:
        self._started = False

    def push(self, token_id: int) -> str:
        text = f" {token_id}" if self._started else str(token_id)
        self._started = True
        return text

    def finish(self) -> str:
        return ""


def _small_int(word: str) -> int:
    if len(word) > 18:  # longer numbers fit no id type, and Python refuses to parse very long ones
        raise DataError(f"NullTokenizer got a number of {len(word)} digits, which is no token id.")
    return int(word)
