"""tools/preprocess_data.py from the command line: every line converted or accounted for, the same bytes from any workers."""

import gzip
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers import build_tokenizer
from tests.unit_tests.tokenizers.samples import (
    HARD_TEXTS,
    TRAINING_TEXT,
    random_texts,
    write_gpt2_files,
    write_sentencepiece,
    write_tiktoken,
)
from tools import preprocess_data

SCRIPT = Path(preprocess_data.__file__)
BOS, EOD = 257, 258
LONG_TEXT = "a" * (1 << 20)
ODD_LINES = [  # the lines of R12: 5 of 12 can be converted
    b'\xef\xbb\xbf{"text": "byte order mark"}\n',
    b'{"text": "crlf"}\r\n',
    b"\n",
    b"42\n",
    b'"text"\n',
    b'{"text": null}\n',
    b'{"txt": "x"}\n',
    b"{broken\n",
    '{"text": "\U0001f469\U0001f3fd\u200d\U0001f680 \u6f22\u5b57"}\n'.encode(),
    b'{"text": "a\\ud800b"}\n',
    b'{"text": "' + LONG_TEXT.encode() + b'"}\n',
    b'{"text": "no newline at the end"}',
]
GOOD_TEXTS = [
    "byte order mark",
    "crlf",
    "\U0001f469\U0001f3fd\u200d\U0001f680 \u6f22\u5b57",
    LONG_TEXT,
    "no newline at the end",
]


@pytest.fixture
def odd_input(tmp_path: Path) -> Path:
    folder = tmp_path / "my data"
    folder.mkdir()
    (folder / "in put.jsonl").write_bytes(b"".join(ODD_LINES))
    return folder / "in put.jsonl"


def command(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run the script as a user would, in the C locale."""
    environment = {**os.environ, "LC_ALL": "C", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, encoding="utf-8", env=environment, timeout=60, check=False)


def byte_level(source: Path, prefix: Path, *more: object) -> list[str]:
    """Arguments of a run with the byte-level tokenizer."""
    return ["--input", str(source), "--output-prefix", str(prefix), "--tokenizer-type", "ByteLevelTokenizer", *map(str, more)]


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def documents(prefix: Path) -> list[list[int]]:
    """The documents of a pair, after the invariants of R34 were checked."""
    data = IndexedDataset(f"{prefix}_text_document")
    assert int(data.sequence_lengths.sum()) * data.dtype.itemsize == os.path.getsize(f"{prefix}_text_document.bin")
    assert data.document_indices.tolist() == list(range(len(data) + 1))
    return [data[i].tolist() for i in range(len(data))]


def pair(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}_text_document.bin").read_bytes(), Path(f"{prefix}_text_document.idx").read_bytes()


# --- R12


def test_first_bad_line_stops_with_file_and_line_and_leaves_nothing(odd_input: Path, tmp_path: Path) -> None:
    done = command(*byte_level(odd_input, tmp_path / "out" / "o", "--append-eod"))
    assert done.returncode == 2
    assert 'in put.jsonl:4: not a JSON object: expected {"text": "..."}, got a number' in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_skip_mode_keeps_good_lines_and_accounts_for_the_others(odd_input: Path, tmp_path: Path, workers: int) -> None:
    prefix = tmp_path / "out put" / "o"
    done = command(*byte_level(odd_input, prefix, "--append-eod", "--on-bad-line", "skip", "--workers", workers))
    assert done.returncode == 0, done.stderr
    assert "read 12, written 5, skipped 7" in done.stdout
    for line, reason in {
        4: "not a JSON object",
        6: "not a string",
        7: "missing key",
        8: "invalid JSON",
        10: "lone surrogate",
    }.items():
        assert any(f"in put.jsonl:{line}: " in text and reason in text for text in done.stderr.splitlines()), reason
    assert "1 x blank line" in done.stdout
    assert documents(prefix) == [[*text.encode(), EOD] for text in GOOD_TEXTS]


def test_output_is_the_same_bytes_for_any_number_of_workers(tmp_path: Path) -> None:
    texts = [TRAINING_TEXT * (1 + i % 7) for i in range(60)] + HARD_TEXTS + list(random_texts(3000))
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    assert source.stat().st_size > 4 * preprocess_data.CHUNK_BYTES
    model = write_sentencepiece(tmp_path / "sp.model")
    results = []
    for workers in (1, 2, 8):
        prefix = tmp_path / f"o{workers}"
        done = command("--input", source, "--output-prefix", prefix, "--tokenizer-type", "SentencePieceTokenizer",
                       "--tokenizer-model", model, "--append-eod", "--workers", workers)  # fmt: skip
        assert done.returncode == 0, done.stderr
        results.append(pair(prefix))
    assert results[0] == results[1] == results[2]
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(model))
    assert documents(tmp_path / "o2") == [[*tokenizer.tokenize(text), tokenizer.eod] for text in texts]


def test_killed_worker_ends_the_run_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = set(multiprocessing.active_children())  # ranks that other tests of this process keep

    def endless_chunks(_: Sequence[str]) -> Iterator[preprocess_data.Chunk]:
        for number in itertools.count():
            if number == 20:
                worker = next(child for child in multiprocessing.active_children() if child not in others)
                os.kill(worker.pid or 0, signal.SIGKILL)
            yield preprocess_data.Chunk("in.jsonl", number + 1, json.dumps({"text": LONG_TEXT}).encode(), 0)

    monkeypatch.setattr(preprocess_data, "read_chunks", endless_chunks)
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    assert preprocess_data.main(byte_level(source, tmp_path / "out" / "o", "--workers", 3)) == 1
    assert "ended unexpectedly with exit code -9" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
    assert set(multiprocessing.active_children()) <= others


def test_terminated_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chunks_then_signal(_: Sequence[str]) -> Iterator[preprocess_data.Chunk]:
        yield preprocess_data.Chunk("in.jsonl", 1, b'{"text": "a"}\n', 0)
        os.kill(os.getpid(), signal.SIGTERM)
        yield preprocess_data.Chunk("in.jsonl", 2, b'{"text": "b"}\n', 0)

    monkeypatch.setattr(preprocess_data, "read_chunks", chunks_then_signal)
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    with pytest.raises(SystemExit, match="143"):
        preprocess_data.main(byte_level(source, tmp_path / "out" / "o", "--workers", 2))
    assert list((tmp_path / "out").iterdir()) == []


def test_unexpected_error_in_a_worker_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("inside a worker")

    monkeypatch.setattr(preprocess_data.Encoder, "encode", fail)
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    assert preprocess_data.main(byte_level(source, tmp_path / "o", "--workers", 2)) == 1
    assert "ZeroDivisionError: inside a worker" in capsys.readouterr().err


def test_many_files_and_gzip_keep_their_order_and_line_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = tmp_path / "b.jsonl.gz"
    first.write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}'))
    second = write_jsonl(tmp_path / "a.jsonl", ["three"])
    arguments = byte_level(first, tmp_path / "o")
    arguments.insert(2, str(second))
    assert preprocess_data.main(arguments) == 0
    assert documents(tmp_path / "o") == [list(b"one"), list(b"two"), list(b"three")]
    second.write_bytes(b'{"text": "three"}\n\n{}\n')
    assert preprocess_data.main(arguments) == 2
    assert "a.jsonl:3: missing key" in capsys.readouterr().err


def test_damaged_gzip_is_an_error_that_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "cut.jsonl.gz"
    source.write_bytes(gzip.compress(b'{"text": "one"}\n' * 1000)[:-20])
    assert preprocess_data.main(byte_level(source, tmp_path / "out" / "o", "--workers", 2)) == 2
    assert "cut.jsonl.gz is damaged or cut short" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


# --- R30, R34


def test_eod_ends_every_document_once_and_text_cannot_inject_it(tmp_path: Path) -> None:
    vocab, merge = write_gpt2_files(tmp_path)
    source = write_jsonl(tmp_path / "in.jsonl", ["the one", "", "say <|endoftext|> twice", "last"])
    arguments = [
        "--input",
        str(source),
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        str(vocab),
        "--merge-file",
        str(merge),
    ]
    assert preprocess_data.main([*arguments, "--append-eod", "--output-prefix", str(tmp_path / "o")]) == 0
    tokenizer = build_tokenizer("GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merge))
    for ids in documents(tmp_path / "o"):
        assert ids.index(tokenizer.eod) == len(ids) - 1
        assert max(ids) < tokenizer.vocab_size
    assert documents(tmp_path / "o")[0][:-1] == tokenizer.tokenize("the one")
    assert (
        preprocess_data.main([*arguments, "--append-eod", "--allow-special-tokens", "--output-prefix", str(tmp_path / "p")])
        == 0
    )
    assert [ids.count(tokenizer.eod) for ids in documents(tmp_path / "p")] == [1, 1, 2, 1]


def test_bos_begins_every_document_only_when_asked(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["a", "", "bc"])
    assert preprocess_data.main(byte_level(source, tmp_path / "without", "--append-eod")) == 0
    assert preprocess_data.main(byte_level(source, tmp_path / "with", "--append-eod", "--add-bos")) == 0
    assert documents(tmp_path / "without") == [[97, EOD], [EOD], [98, 99, EOD]]
    assert documents(tmp_path / "with") == [[BOS, 97, EOD], [BOS, EOD], [BOS, 98, 99, EOD]]


@pytest.mark.parametrize(("option", "missing"), [("--append-eod", "end-of-document"), ("--add-bos", "beginning-of-sequence")])
def test_missing_special_token_is_an_error_at_the_start(
    tmp_path: Path, option: str, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"[unk]": 0, "a": 1}, unk_token="[unk]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "tokenizer.json"))
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "out" / "o"), option]
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    assert preprocess_data.main([*arguments, *tokenizer]) == 2
    assert f"has no {missing} token" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_empty_documents_are_one_eod_or_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["", "a", "", "bc"])
    assert preprocess_data.main(byte_level(source, tmp_path / "eod", "--append-eod")) == 0
    assert [len(ids) for ids in documents(tmp_path / "eod")] == [1, 2, 1, 3]
    assert "read 4, written 4, skipped 0" in capsys.readouterr().out
    assert preprocess_data.main(byte_level(source, tmp_path / "bare")) == 0
    assert [len(ids) for ids in documents(tmp_path / "bare")] == [1, 2]
    assert "read 4, written 2, skipped 2\n  2 x empty document" in capsys.readouterr().out


@pytest.mark.parametrize("option", [[], ["--append-eod"]])
@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"text": ""}\n{"text": ""}\n'])
def test_input_without_any_text_is_an_error(
    tmp_path: Path, content: bytes, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    assert preprocess_data.main(byte_level(source, tmp_path / "out" / "o", *option)) == 2
    assert "no text in" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


# --- tokenizers, keys, options


def test_null_tokenizer_writes_the_integers_and_names_the_line_that_has_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["1 2 3", "7 x", "99"])
    arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "o"), "--tokenizer-type", "NullTokenizer",
                 "--vocab-size", "100", "--append-eod"]  # fmt: skip
    assert preprocess_data.main(arguments) == 2
    assert (
        "in.jsonl:2: text that cannot be encoded: NullTokenizer expects integers separated by spaces, got 'x'"
        in capsys.readouterr().err
    )
    assert preprocess_data.main([*arguments, "--on-bad-line", "skip"]) == 0
    assert documents(tmp_path / "o") == [[1, 2, 3, 100], [99, 100]]
    assert "read 3, written 2, skipped 1" in capsys.readouterr().out


def test_each_key_gets_its_own_output(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"title": "t", "text": "abc"}\n{"text": "d", "title": "uv"}\n', "utf-8")
    assert preprocess_data.main(byte_level(source, tmp_path / "o", "--json-keys", "text", "title")) == 0
    titles = IndexedDataset(tmp_path / "o_title_document")
    assert documents(tmp_path / "o") == [list(b"abc"), list(b"d")]
    assert [titles[i].tolist() for i in range(len(titles))] == [list(b"t"), list(b"uv")]


def test_tiktoken_and_dtype_of_the_vocabulary(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["the one"])
    ranks = write_tiktoken(tmp_path / "t.tiktoken")
    arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "o"), "--tokenizer-type", "TikTokenizer"]
    assert preprocess_data.main([*arguments, "--tokenizer-model", str(ranks)]) == 0
    assert IndexedDataset(tmp_path / "o_text_document").dtype == np.uint16
    null = ["--input", str(write_jsonl(tmp_path / "n.jsonl", ["69999"])), "--output-prefix", str(tmp_path / "n")]
    assert preprocess_data.main([*null, "--tokenizer-type", "NullTokenizer", "--vocab-size", "70000"]) == 0
    assert IndexedDataset(tmp_path / "n_text_document").dtype == np.int32
    assert documents(tmp_path / "n") == [[69999]]


def test_progress_lines_name_rate_and_time_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [TRAINING_TEXT] * 50)
    assert preprocess_data.main(byte_level(source, tmp_path / "o", "--log-interval", 10)) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "docs/s" in line]
    assert lines
    assert all("MB/s" in line and "ETA 0:0" in line for line in lines)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--split-sentences"], "not supported (documents are kept whole)"),
        (["--partitions", "4"], "not supported (--workers uses"),
        (["--tokenizer-modell", "x"], "--tokenizer-modell"),
        (["--workers", "0"], "--workers must be at least 1"),
        (["--workers", "two"], "--workers"),
        (["--json-keys", "text", "text"], "names a key twice"),
        (["--input", "/no/such.jsonl"], "'/no/such.jsonl' is not a file"),
        (["--input", "/"], "'/' is not a file"),
        (["--tokenizer-type", "BertWordPiece"], "BertWordPiece"),
        (["--tokenizer-type", "SentencePieceTokenizer"], "needs --tokenizer-model"),
    ],
)
def test_wrong_options_end_with_code_2_and_write_nothing(
    tmp_path: Path, more: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    try:
        code = preprocess_data.main(byte_level(source, tmp_path / "out" / "o", *more))
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
