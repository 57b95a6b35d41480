"""ByteLevelTokenizer: every byte of the UTF-8 text is an id. Built in: no file, no training, lossless for any text.

    0..255  the bytes      256  pad      257  bos      258  eod
"""

from collections.abc import Sequence

from megatron.core.tokenizers.base import BytesStreamDecoder, StreamDecoder, Tokenizer

PAD, BOS, EOD = 256, 257, 258
_BYTES = [bytes([value]) for value in range(256)]


class ByteLevelTokenizer(Tokenizer):
    """259 ids: 256 bytes, padding, beginning of sequence, end of document."""

    def __init__(self) -> None:
        specials = {"<pad>": PAD, "<bos>": BOS, "<eod>": EOD}
        super().__init__("ByteLevelTokenizer", 259, specials=specials, eod=EOD, bos=BOS, pad=PAD)

    def _encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def _decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def _text_stream_decoder(self) -> StreamDecoder:
        return BytesStreamDecoder(_BYTES.__getitem__)
