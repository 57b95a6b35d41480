"""SentencePieceTokenizer: a SentencePiece `.model` file, BPE or unigram, ours (`tools/train_tokenizer.py`) or anybody's.

Decoding works on the bytes of each piece, so that the stream and the whole text agree:

    piece   ▁the     <0xF0> <0x9F> ...      </s>
    bytes   " the"   the byte itself        nothing (control)

A model with byte fallback, identity normalisation and no dummy prefix (what our trainer writes) gives back every text
exactly. SentencePiece itself cannot tell a literal U+2581 (the character it writes for a space) from a space; in such a
model it is therefore encoded as its three bytes. Models with another normalisation give back the normalised text.
User-defined symbols of a model are part of its text vocabulary, as SentencePiece defines them; control symbols are special.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.core.errors import ConfigError
from megatron.core.tokenizers.base import BytesStreamDecoder, StreamDecoder, Tokenizer, existing_file

if TYPE_CHECKING:
    import sentencepiece

_SPACE = "\u2581"
_UNKNOWN_TEXT = " \u2047 "  # what SentencePiece prints for an unknown piece


class SentencePieceTokenizer(Tokenizer):
    """Wraps a SentencePiece processor. EOD is the control piece `<eod>` if there is one, else the model's eos."""

    def __init__(self, tokenizer_model: str | None) -> None:
        path = existing_file(tokenizer_model, "--tokenizer-model", "SentencePieceTokenizer")
        self._processor = _load(str(path))
        size = self._processor.vocab_size()
        specials = {self._processor.id_to_piece(i): i for i in range(size) if self._processor.is_control(i)}
        super().__init__(
            "SentencePieceTokenizer",
            size,
            specials=specials,
            eod=specials.get("<eod>", _id_or_none(self._processor.eos_id())),
            bos=_id_or_none(self._processor.bos_id()),
            pad=_id_or_none(self._processor.pad_id()),
            files=[path],
        )
        # The processor has no accessor for its options; a letter alone shows whether a space is put in front.
        self._has_dummy_prefix = self._processor.id_to_piece(self._processor.encode("a"))[0].startswith(_SPACE)
        self._piece_bytes = [self._bytes_of_piece(i) for i in range(size)]
        byte_ids = {self._piece_bytes[i]: i for i in range(size) if self._processor.is_byte(i)}
        self._space_literal = [byte_ids[bytes([value])] for value in _SPACE.encode()] if len(byte_ids) == 256 else None

    def _encode(self, text: str) -> list[int]:
        if _SPACE not in text or self._space_literal is None or self._has_dummy_prefix:
            return self._processor.encode(text)
        first, *others = text.split(_SPACE)
        token_ids = self._processor.encode(first)
        for part in others:
            token_ids += [*self._space_literal, *self._processor.encode(part)]
        return token_ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        text = b"".join([self._piece_bytes[i] for i in token_ids]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._has_dummy_prefix else text

    def _text_stream_decoder(self) -> StreamDecoder:
        decoder = BytesStreamDecoder(self._piece_bytes.__getitem__)
        return _NoFirstSpace(decoder) if self._has_dummy_prefix else decoder

    def _bytes_of_piece(self, token_id: int) -> bytes:
        piece = self._processor.id_to_piece(token_id)
        if self._processor.is_byte(token_id):
            return bytes([int(piece[1:-1], 16)])  # "<0x0A>"
        if self._processor.is_unknown(token_id):
            return _UNKNOWN_TEXT.encode()
        return piece.replace(_SPACE, " ").encode()


class _NoFirstSpace(StreamDecoder):
    """Drops the space that the model's dummy prefix put before the first word."""

    def __init__(self, decoder: StreamDecoder) -> None:
        self._decoder = decoder
        self._started = False

    def push(self, token_id: int) -> str:
        return self._strip(self._decoder.push(token_id))

    def finish(self) -> str:
        return self._strip(self._decoder.finish())

    def _strip(self, text: str) -> str:
        if self._started or not text:
            return text
        self._started = True
        return text.removeprefix(" ")


def _load(path: str) -> "sentencepiece.SentencePieceProcessor":
    import sentencepiece  # here, so that runs with another tokenizer do not load it

    try:
        return sentencepiece.SentencePieceProcessor(model_file=path)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"--tokenizer-model={path!r} is not a SentencePiece model ({error}); give a .model file.") from None


def _id_or_none(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None
