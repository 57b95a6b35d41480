"""Tokenizers by Megatron's `--tokenizer-type` names. `build_tokenizer` is the one way to make one."""

from megatron.core.errors import ConfigError
from megatron.core.tokenizers.base import StreamDecoder, Tokenizer
from megatron.core.tokenizers.byte import ByteLevelTokenizer
from megatron.core.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from megatron.core.tokenizers.null import NullTokenizer
from megatron.core.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron.core.tokenizers.tiktoken import TikTokenizer

__all__ = ["FILE_OPTIONS", "TOKENIZER_TYPES", "StreamDecoder", "Tokenizer", "build_tokenizer"]

# Type -> the file options it reads.
FILE_OPTIONS = {
    "ByteLevelTokenizer": (),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "TikTokenizer": ("tokenizer_model",),
    "NullTokenizer": (),
}
TOKENIZER_TYPES = tuple(FILE_OPTIONS)


def build_tokenizer(
    tokenizer_type: str,
    *,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    tiktoken_pattern: str = "v2",
) -> Tokenizer:
    """The tokenizer of that type.

    tokenizer_model: SentencePiece .model, tokenizer.json (or its folder), or tiktoken rank file.
    vocab_file, merge_file: GPT-2's two files. tiktoken_pattern: splitting pattern for rank files without their own.
    vocab_size: NullTokenizer's number of ids without EOD; for the others a lower bound that must not be below their own size.
    Raises ConfigError for an unknown type, a missing file or package, a file option that the type does not read.
    """
    if tokenizer_type not in FILE_OPTIONS:
        raise ConfigError(f"tokenizer_type={tokenizer_type!r} is unknown; use one of {', '.join(TOKENIZER_TYPES)}.")
    given = {"tokenizer_model": tokenizer_model, "vocab_file": vocab_file, "merge_file": merge_file}
    for option, value in given.items():
        if value is not None and option not in FILE_OPTIONS[tokenizer_type]:
            raise ConfigError(f"{option}={value!r} is not read by {tokenizer_type}; leave it out.")
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None:
            raise ConfigError("NullTokenizer needs vocab_size: the number of ids without EOD.")
        return NullTokenizer(vocab_size)
    tokenizer = _build_with_own_size(tokenizer_type, tokenizer_model, vocab_file, merge_file, tiktoken_pattern)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"vocab_size={vocab_size} does not cover the {tokenizer.vocab_size} ids of {tokenizer_type}; "
            "leave it out or raise it."
        )
    return tokenizer


def _build_with_own_size(
    tokenizer_type: str, tokenizer_model: str | None, vocab_file: str | None, merge_file: str | None, tiktoken_pattern: str
) -> Tokenizer:
    if tokenizer_type == "SentencePieceTokenizer":
        return SentencePieceTokenizer(tokenizer_model)
    if tokenizer_type == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(tokenizer_model)
    if tokenizer_type == "GPT2BPETokenizer":
        return GPT2BPETokenizer(vocab_file, merge_file)
    if tokenizer_type == "TikTokenizer":
        return TikTokenizer(tokenizer_model, tiktoken_pattern)
    return ByteLevelTokenizer()
