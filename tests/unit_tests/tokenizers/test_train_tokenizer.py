"""tools/train_tokenizer.py: the same files every time, whole files only, clear errors."""

import json
from pathlib import Path

import pytest
import sentencepiece

from megatron.core.tokenizers import build_tokenizer
from tests.unit_tests.tokenizers.samples import TRAINING_TEXT
from tools import train_tokenizer


def arguments(source: Path, prefix: Path, *more: str) -> list[str]:
    return ["--input", str(source), "--output-prefix", str(prefix), "--vocab-size", "340", *more]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TRAINING_TEXT, "utf-8")
    return path


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_training_twice_gives_the_same_files(text_file: Path, tmp_path: Path, model_type: str) -> None:
    for name in ("one", "two"):
        more = ["--model-type", model_type, "--num-threads", "2", "--vocab-size", "305"]
        assert train_tokenizer.main(arguments(text_file, tmp_path / "new folder" / name, *more)) == 0
    for suffix in (".model", ".vocab"):
        assert (tmp_path / "new folder" / f"one{suffix}").read_bytes() == (
            tmp_path / "new folder" / f"two{suffix}"
        ).read_bytes()
    assert len((tmp_path / "new folder" / "one.vocab").read_text("utf-8").splitlines()) == 305
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(tmp_path / "new folder" / "one.model"))
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod, tokenizer.pad) == (305, 1, 2, 3)
    assert sorted(path.name for path in (tmp_path / "new folder").iterdir()) == [
        "one.model",
        "one.vocab",
        "two.model",
        "two.vocab",
    ]


def test_jsonl_and_text_of_the_same_lines_give_the_same_model(text_file: Path, tmp_path: Path) -> None:
    jsonl = tmp_path / "text.jsonl"
    jsonl.write_text(json.dumps({"body": TRAINING_TEXT}) + "\n", "utf-8")
    assert train_tokenizer.main(arguments(text_file, tmp_path / "a")) == 0
    assert train_tokenizer.main(arguments(jsonl, tmp_path / "b", "--json-key", "body")) == 0
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()


def test_max_lines_limits_what_is_learnt_from(text_file: Path) -> None:
    assert len(list(train_tokenizer._first(train_tokenizer.training_lines([str(text_file)], "text"), 7))) == 7


def test_very_long_lines_are_learnt_from(tmp_path: Path) -> None:
    source = tmp_path / "long.txt"
    source.write_text(TRAINING_TEXT.replace("\n", " ") * 20, "utf-8")
    assert train_tokenizer.main(arguments(source, tmp_path / "long")) == 0
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "long.model"))
    assert "\u2581the" in processor.encode("to the sea", out_type=str)


@pytest.mark.parametrize(
    ("content", "more", "text"),
    [
        (b"few words", ["--vocab-size", "5000"], "cannot train --vocab-size 5000 on this text: Vocabulary size too high"),
        (b"few words", ["--vocab-size", "100"], "one character are 261; use more"),
        (b"", [], "no text to learn from"),
        (b"ok\n\xff\n", [], "in.jsonl:2: not a valid line"),
        (b"ok\n", [], "in.jsonl:1: not a valid line"),
        (b'{"text": 5}\n', [], 'in.jsonl:1: expected a JSON object with a string under "text"'),
        (b'{"text": "a\\ud800"}\n', [], "in.jsonl:1: not a valid line"),
        (b"x", ["--num-threads", "0"], "--num-threads must be at least 1"),
        (b"x", ["--input", "/no/such"], "'/no/such' is not a file"),
    ],
)
def test_wrong_input_ends_with_code_2_and_writes_nothing(
    tmp_path: Path, content: bytes, more: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    is_json = "in.jsonl" in text
    source = tmp_path / ("in.jsonl" if is_json else "in.txt")
    source.write_bytes(content.replace(b"ok\n", b'{"text": "ok"}\n') if is_json and content != b"ok\n" else content)
    assert train_tokenizer.main(arguments(source, tmp_path / "out", *more)) == 2
    assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
