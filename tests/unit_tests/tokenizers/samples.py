"""Tiny tokenizers made on the spot, and texts that are hard to keep."""

import base64
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece

from megatron.core.tokenizers import Tokenizer
from megatron.core.tokenizers.huggingface import byte_level_alphabet

TRAINING_TEXT = "\n".join(
    f"{name} went to the {place} and said: 'It is {number} o'clock; to be, or not to be!'  Then {name} slept."
    for name in ("Ann", "Bob", "Cleo", "Dan")
    for place in ("market", "castle", "sea", "old mill")
    for number in range(1, 13)
)

HARD_TEXTS = [
    "",
    " ",
    "  two leading spaces",
    "trailing space ",
    "line\nbreak\r\nand\ttab",
    "nul \0 inside",
    "\0",
    "\u2581 is how SentencePiece writes a space \u2581\u2581",
    "\U0001f469\U0001f3fd\u200d\U0001f680 emoji with modifier",
    "\u6f22\u5b57\u4eee\u540d",
    "e\u0301 combining, \u00e9 composed",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "</s><s><unk><pad><eod><0x0A><|endoftext|>",
    "\ufeffbyte order mark, \ufffd replacement, \u2028 separator, \u00a0 no-break, \u3000 wide",
]


def random_texts(count: int, seed: int = 0) -> Iterator[str]:
    """Texts of up to 40 random code points from the whole of Unicode (surrogates left out), ASCII over-represented."""
    draw = random.Random(seed)
    for _ in range(count):
        characters = []
        for _ in range(draw.randrange(41)):
            top = draw.choice((0x80, 0x80, 0x250, 0x3000, 0x10000, 0x110000))
            code = draw.randrange(top)
            characters.append(chr(code) if not 0xD800 <= code < 0xE000 else " ")
        yield "".join(characters)


def stream(tokenizer: Tokenizer, token_ids: list[int], *, skip_special: bool = True) -> str:
    """All pieces of a streaming decode, joined."""
    decoder = tokenizer.stream_decoder(skip_special=skip_special)
    return "".join([decoder.push(token_id) for token_id in token_ids]) + decoder.finish()


def write_sentencepiece(path: Path, **changes: Any) -> Path:
    """A SentencePiece BPE model with byte fallback and the library's own normalisation, unless changed."""
    model = io.BytesIO()
    options = {"vocab_size": 420, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2, **changes}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TRAINING_TEXT.split("\n")), model_writer=model, **options)
    path.write_bytes(model.getvalue())
    return path


def write_gpt2_files(folder: Path) -> tuple[Path, Path]:
    """A byte-level vocabulary of 256 bytes, some merges and `<|endoftext|>`, in GPT-2's two files."""
    alphabet = byte_level_alphabet()
    merges = [("t", "h"), ("th", "e"), (alphabet[32], "the"), ("o", "r"), ("a", "n"), ("an", "d")]
    tokens = [*alphabet.values(), *(left + right for left, right in merges), "<|endoftext|>"]
    vocab, merge = folder / "encoder.json", folder / "vocab.bpe"
    vocab.write_text(json.dumps({token: i for i, token in enumerate(tokens)}), "utf-8")
    merge.write_text("#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges), "utf-8")
    return vocab, merge


def rank_pieces() -> list[bytes]:
    """Pieces of a tiny tiktoken file, by rank."""
    return [*(bytes([value]) for value in range(256)), b"th", b"the", b" the", b"or", b"an", b"and"]


def write_tiktoken(path: Path) -> Path:
    """A `.tiktoken` file of `rank_pieces`."""
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(rank_pieces())]
    path.write_text("".join(lines), "ascii")
    return path
