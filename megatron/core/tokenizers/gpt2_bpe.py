"""GPT2BPETokenizer: GPT-2's byte-level BPE from its two files, `encoder.json` (vocabulary) and `vocab.bpe` (merges)."""

from megatron.core.errors import ConfigError
from megatron.core.tokenizers.base import existing_file
from megatron.core.tokenizers.huggingface import LibraryTokenizer, SpecialNames, import_tokenizers

END_OF_TEXT = "<|endoftext|>"


class GPT2BPETokenizer(LibraryTokenizer):
    """`<|endoftext|>` is EOD, where the vocabulary has it. No BOS, no padding token."""

    def __init__(self, vocab_file: str | None, merge_file: str | None) -> None:
        vocab_path = existing_file(vocab_file, "--vocab-file", "GPT2BPETokenizer")
        merge_path = existing_file(merge_file, "--merge-file", "GPT2BPETokenizer")
        library_module = import_tokenizers("GPT2BPETokenizer")
        try:
            model = library_module.models.BPE.from_file(str(vocab_path), str(merge_path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{vocab_path} and {merge_path} are not a GPT-2 vocabulary and its merges: {error}") from None
        library = library_module.Tokenizer(model)
        library.pre_tokenizer = library_module.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = library_module.decoders.ByteLevel()
        super().__init__("GPT2BPETokenizer", library, SpecialNames(eod=END_OF_TEXT), [vocab_path, merge_path])
