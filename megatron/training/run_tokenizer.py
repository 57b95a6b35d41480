"""The tokenizer that a run's configuration names, and the vocabulary the model has with it."""

from pathlib import Path

from megatron.core.tokenizers import Tokenizer, build_tokenizer
from megatron.training.config.run_config import RunConfig


def build_run_tokenizer(config: RunConfig, copies: Path | None = None) -> Tokenizer:
    """From the `data` section; `model.vocab_size` is NullTokenizer's size. Raises ConfigError.

    copies: a folder whose files stand for configured ones of the same name (the copies beside a checkpoint).
    """
    data = config.data
    return build_tokenizer(
        data.tokenizer_type or "NullTokenizer",
        tokenizer_model=_copy_of(data.tokenizer_model, copies),
        vocab_file=_copy_of(data.vocab_file, copies),
        merge_file=_copy_of(data.merge_file, copies),
        vocab_size=config.model.vocab_size,
        tiktoken_pattern=data.tiktoken_pattern,
    )


def true_vocab_size(config: RunConfig, tokenizer: Tokenizer) -> int:
    """Ids of the model: the tokenizer's, or more if `model.vocab_size` asks for more."""
    return max(tokenizer.vocab_size, config.model.vocab_size or 0)


def _copy_of(configured: str | None, folder: Path | None) -> str | None:
    if configured is None or folder is None:
        return configured
    for name in (Path(configured).name, "tokenizer.json"):  # the second where a folder was configured
        if (folder / name).is_file():
            return str(folder / name)
    return configured
