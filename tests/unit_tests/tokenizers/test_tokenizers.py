"""Every kind of tokenizer: equal to its library, lossless where it can be, no special id that nobody asked for."""

import base64
import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public as published
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from megatron.core.errors import ConfigError, DataError
from megatron.core.tokenizers import TOKENIZER_TYPES, Tokenizer, build_tokenizer
from megatron.core.tokenizers.tiktoken import PATTERNS
from tests.unit_tests.tokenizers.samples import (
    HARD_TEXTS,
    TRAINING_TEXT,
    random_texts,
    rank_pieces,
    stream,
    write_gpt2_files,
    write_sentencepiece,
    write_tiktoken,
)
from tools import train_tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of our own trainer: path of the .model."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TRAINING_TEXT, "utf-8")
    arguments = ["--input", str(folder / "text.txt"), "--output-prefix", str(folder / "tiny"), "--vocab-size", "420"]
    assert train_tokenizer.main(arguments) == 0
    return folder / "tiny.model"


def huggingface(folder: Path, library: tokenizers.Tokenizer, config: dict[str, Any] | None = None) -> Tokenizer:
    library.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))


def byte_level_bpe() -> tokenizers.Tokenizer:
    """Byte-level BPE with two special tokens, one plain added token."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|begin|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([TRAINING_TEXT], trainer)
    library.add_tokens(["<think>"])
    return library


def byte_fallback_bpe() -> tokenizers.Tokenizer:
    """Llama's form of a tokenizer.json: prepended space, byte fallback, decoder that looks at neighbours."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{value:02X}>" for value in range(256)),
        *"\u2581abcdefghijklmnopqrstuvwxyz",
        "\u2581a",
    ]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


# --- R36: nothing is lost


def lossless_tokenizers(folder: Path, trained: Path) -> list[Tokenizer]:
    vocab, merge = write_gpt2_files(folder)
    return [
        build_tokenizer("ByteLevelTokenizer"),
        build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(trained)),
        build_tokenizer("GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merge)),
        build_tokenizer("TikTokenizer", tokenizer_model=str(write_tiktoken(folder / "t.tiktoken"))),
        huggingface(folder, byte_level_bpe()),
    ]


def test_any_text_survives_encode_and_decode_whole_and_as_a_stream(tmp_path: Path, trained: Path) -> None:
    texts = [*HARD_TEXTS, *random_texts(1000)]
    for tokenizer in lossless_tokenizers(tmp_path, trained):
        for text, token_ids in zip(texts, tokenizer.tokenize_batch(texts), strict=True):
            assert tokenizer.tokenize(text) == token_ids
            assert tokenizer.detokenize(token_ids) == text, tokenizer.name
            assert stream(tokenizer, token_ids) == text, tokenizer.name


def test_stream_gives_a_character_only_when_all_its_bytes_are_there() -> None:
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    decoder = tokenizer.stream_decoder()
    assert [decoder.push(i) for i in tokenizer.tokenize("\u6f22!")] == ["", "", "\u6f22", "!"]
    assert decoder.finish() == ""


def test_stream_that_ends_inside_a_character_says_so_at_the_end() -> None:
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    token_ids = tokenizer.tokenize("\u6f22")[:2]
    assert stream(tokenizer, token_ids) == tokenizer.detokenize(token_ids) == "\ufffd"


def test_neighbour_dependent_decoder_streams_what_it_decodes(tmp_path: Path) -> None:
    tokenizer = huggingface(tmp_path, byte_fallback_bpe())
    for text in (*(text for text in HARD_TEXTS if "\u2581" not in text), "a a  b", *random_texts(200)):
        token_ids = tokenizer.tokenize(text)
        assert stream(tokenizer, token_ids) == tokenizer.detokenize(token_ids)
        if "\u2581" not in text:
            assert tokenizer.detokenize(token_ids) == text


# --- equal to the libraries


def test_sentencepiece_equals_its_library_also_with_normalisation_and_dummy_prefix(tmp_path: Path) -> None:
    for number, changes in enumerate(
        ({}, {"model_type": "unigram", "vocab_size": 300}, {"byte_fallback": False, "vocab_size": 120})
    ):
        path = write_sentencepiece(tmp_path / f"{number}.model", **changes)
        library = sentencepiece.SentencePieceProcessor(model_file=str(path))
        tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(path))
        assert tokenizer.vocab_size == library.vocab_size()
        for text in HARD_TEXTS:
            assert tokenizer.tokenize(text) == library.encode(text)
            token_ids = tokenizer.tokenize(text)
            assert stream(tokenizer, token_ids) == tokenizer.detokenize(token_ids) == library.decode(token_ids)


def test_trained_sentencepiece_equals_its_library_where_the_library_is_lossless(trained: Path) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(trained))
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(trained))
    texts = [text for text in HARD_TEXTS if "\u2581" not in text]
    assert tokenizer.tokenize_batch(texts) == [library.encode(text) for text in texts]


def test_huggingface_equals_its_library(tmp_path: Path) -> None:
    library = byte_level_bpe()
    tokenizer = huggingface(tmp_path, library)
    plain = [text for text in (*HARD_TEXTS, TRAINING_TEXT) if "<|" not in text]
    assert tokenizer.tokenize_batch(plain) == [library.encode(text, add_special_tokens=False).ids for text in plain]
    assert [tokenizer.detokenize(library.encode(text).ids) for text in plain] == plain


def test_gpt2_bpe_equals_the_library_with_the_same_files(tmp_path: Path) -> None:
    vocab, merge = write_gpt2_files(tmp_path)
    library = tokenizers.ByteLevelBPETokenizer.from_file(str(vocab), str(merge))
    tokenizer = build_tokenizer("GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merge))
    assert [tokenizer.tokenize(text) for text in HARD_TEXTS] == [library.encode(text).ids for text in HARD_TEXTS]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos) == (256 + 6 + 1, 262, None)
    assert tokenizer.files() == [vocab, merge]


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_tiktoken_equals_its_library_with_the_same_ranks(tmp_path: Path, pattern: str) -> None:
    ranks = {piece: rank for rank, piece in enumerate(rank_pieces())}
    library = tiktoken.Encoding("tiny", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={})
    tokenizer = build_tokenizer(
        "TikTokenizer", tokenizer_model=str(write_tiktoken(tmp_path / "t.tiktoken")), tiktoken_pattern=pattern
    )
    assert [tokenizer.tokenize(text) for text in HARD_TEXTS] == [library.encode_ordinary(text) for text in HARD_TEXTS]
    assert (tokenizer.eod, tokenizer.vocab_size) == (262, 263)


def test_patterns_are_tiktokens_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *_, **__: {})  # the ranks would be downloaded
    assert {"v1": published.cl100k_base()["pat_str"], "v2": published.o200k_base()["pat_str"]} == PATTERNS


def test_tekken_json_puts_special_tokens_first(tmp_path: Path) -> None:
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(rank_pieces())
    ]
    config = {"pattern": PATTERNS["v1"], "default_num_special_tokens": 10, "default_vocab_size": 10 + len(entries) - 1}
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps({"config": config, "vocab": entries}), "utf-8")
    tokenizer = build_tokenizer("TikTokenizer", tokenizer_model=str(path))
    assert (tokenizer.bos, tokenizer.eod, tokenizer.vocab_size) == (1, 2, 10 + len(entries) - 1)
    assert tokenizer.tokenize("a the") == [10 + ord("a"), 10 + 258]
    assert tokenizer.detokenize([2, *tokenizer.tokenize("a the")], skip_special=False) == "</s>a the"


# --- R30: special tokens only where they were asked for


def test_text_of_special_tokens_stays_text_unless_allowed(tmp_path: Path, trained: Path) -> None:
    for tokenizer in lossless_tokenizers(tmp_path, trained):
        assert tokenizer.eod is not None
        literal = next(text for text, token_id in tokenizer.specials.items() if token_id == tokenizer.eod)
        text = f"a{literal}b"
        assert not set(tokenizer.specials.values()) & set(tokenizer.tokenize(text))
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
        allowed = tokenizer.tokenize(text, allow_special=True)
        assert allowed == [*tokenizer.tokenize("a"), tokenizer.eod, *tokenizer.tokenize("b")]
        assert tokenizer.detokenize(allowed) == stream(tokenizer, allowed) == "ab"
        assert tokenizer.detokenize(allowed, skip_special=False) == stream(tokenizer, allowed, skip_special=False) == text


def test_special_word_of_a_whole_word_vocabulary_is_not_found_in_text(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "<": 3, "/s>": 4}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<unk>", "</s>"])
    tokenizer = huggingface(tmp_path, library)
    assert tokenizer.tokenize("a </s> zzz") == [2, 3, 4, 0]


def test_post_processor_truncation_padding_and_dropout_of_a_file_change_no_document(tmp_path: Path) -> None:
    library = byte_level_bpe()
    expected = library.encode(TRAINING_TEXT, add_special_tokens=False).ids
    library.post_processor = processors.TemplateProcessing(
        "<|begin|> $A <|endoftext|>", special_tokens=[("<|begin|>", 1), ("<|endoftext|>", 0)]
    )
    library.enable_truncation(7)
    library.enable_padding(length=5)
    library.model.dropout = 0.9
    tokenizer = huggingface(tmp_path, library)
    assert tokenizer.tokenize(TRAINING_TEXT) == expected


def test_names_of_special_tokens_come_from_the_config_beside_the_file(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "<think>"}, "bos_token": "<|begin|>", "pad_token": None}
    tokenizer = huggingface(tmp_path, byte_level_bpe(), config)
    assert (tokenizer.detokenize([tokenizer.eod], skip_special=False), tokenizer.bos, tokenizer.pad) == ("<think>", 1, None)
    assert tokenizer.eod not in tokenizer.tokenize("<think>")
    assert tokenizer.files() == [tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"]


def test_vocabulary_covers_added_tokens(tmp_path: Path) -> None:
    library = byte_level_bpe()
    library.add_special_tokens(["<x>", "<y>", "<z>"])
    tokenizer = huggingface(tmp_path, library)
    assert max(tokenizer.tokenize("<think><x><y><z>", allow_special=True)) == tokenizer.vocab_size - 1


def test_bos_is_added_once_when_asked_and_never_otherwise(trained: Path) -> None:
    for tokenizer in (
        build_tokenizer("ByteLevelTokenizer"),
        build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(trained)),
    ):
        assert tokenizer.tokenize("abc").count(tokenizer.bos) == 0
        assert tokenizer.tokenize("abc", add_bos=True) == [tokenizer.bos, *tokenizer.tokenize("abc")]


def test_missing_eod_or_bos_is_an_error_that_names_the_option() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=5)
    with pytest.raises(ConfigError, match="--add-bos"):
        tokenizer.tokenize("1", add_bos=True)
    tokenizer.eod = None
    with pytest.raises(ConfigError, match="--append-eod"):
        tokenizer.required_eod()


# --- the small ones


def test_byte_level_has_259_ids() -> None:
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    assert (tokenizer.vocab_size, tokenizer.pad, tokenizer.bos, tokenizer.eod) == (259, 256, 257, 258)
    assert tokenizer.tokenize("\u00e9a") == [0xC3, 0xA9, 97]
    assert tokenizer.files() == []


def test_null_tokenizer_reads_integers_and_adds_one_id_for_eod() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize(" 5 0\t99\n") == [5, 0, 99]
    assert tokenizer.detokenize([5, 0, 99, 100]) == stream(tokenizer, [5, 0, 99, 100]) == "5 0 99"


@pytest.mark.parametrize("text", ["x", "1.5", "-1", "100", "1_0", "\u0661", "9" * 5000])
def test_null_tokenizer_refuses_what_is_no_id(text: str) -> None:
    with pytest.raises(DataError):
        build_tokenizer("NullTokenizer", vocab_size=100).tokenize(text)


# --- errors


@pytest.mark.parametrize("tokenizer_type", TOKENIZER_TYPES)
def test_lone_surrogate_is_a_data_error(tokenizer_type: str, tmp_path: Path, trained: Path) -> None:
    if tokenizer_type == "NullTokenizer":
        tokenizer = build_tokenizer("NullTokenizer", vocab_size=3)
    else:
        tokenizer = next(t for t in lossless_tokenizers(tmp_path, trained) if t.name == tokenizer_type)
    with pytest.raises(DataError, match=r"lone surrogate \(\\ud800\) at character 1"):
        tokenizer.tokenize("a\ud800")


def test_id_outside_the_vocabulary_is_a_data_error() -> None:
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    for token_id in (-1, 259):
        with pytest.raises(DataError, match=r"expected 0\.\.258"):
            tokenizer.detokenize([token_id])
        with pytest.raises(DataError, match=r"expected 0\.\.258"):
            tokenizer.stream_decoder().push(token_id)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tokenizer_type": "BertWordPiece"}, "BertWordPiece.*use one of"),
        ({"tokenizer_type": "SentencePieceTokenizer"}, "needs --tokenizer-model"),
        ({"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "/no/such"}, "'/no/such' is not a file"),
        ({"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": __file__}, "not a SentencePiece model"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": __file__}, "not a tokenizer.json"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(Path(__file__).parent)}, "holds no tokenizer.json"),
        ({"tokenizer_type": "TikTokenizer", "tokenizer_model": __file__}, "not a tiktoken rank file"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": __file__}, "needs --merge-file"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": __file__, "merge_file": __file__}, "not a GPT-2 vocabulary"),
        ({"tokenizer_type": "NullTokenizer"}, "needs vocab_size"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 0}, "vocab_size >= 1, got 0"),
        ({"tokenizer_type": "ByteLevelTokenizer", "merge_file": "x"}, "merge_file='x' is not read by ByteLevelTokenizer"),
        ({"tokenizer_type": "ByteLevelTokenizer", "vocab_size": 256}, "does not cover the 259 ids"),
    ],
)
def test_wrong_options_are_config_errors_that_say_what_to_do(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_tokenizer(**options)


@pytest.mark.parametrize(("package", "extra"), [("tokenizers", "hf"), ("tiktoken", "tiktoken")])
def test_missing_package_names_the_extra(package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    real_import = builtins.__import__

    def without_package(name: str, *rest: Any, **named: Any) -> Any:
        if name == package:
            raise ImportError(name)
        return real_import(name, *rest, **named)

    monkeypatch.delitem(sys.modules, package)
    monkeypatch.setattr(builtins, "__import__", without_package)
    with pytest.raises(ConfigError, match=rf"pip install 'megadlms\[{extra}\]'"):
        if package == "tokenizers":
            build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
        else:
            build_tokenizer("TikTokenizer", tokenizer_model=str(write_tiktoken(tmp_path / "t.tiktoken")))
