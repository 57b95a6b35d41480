"""Token files: Megatron's format both ways, every damage refused by name, merges keep order and boundaries."""

import filecmp
import json
import os
import pathlib
import pickle
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.core.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    bin_path,
    idx_path,
    merge,
    optimal_dtype,
)
from megatron.core.errors import DataError
from tests.harness.d0 import d0_documents, write_d0, write_documents
from tools import count_tokens, merge_datasets

FIXTURES = pathlib.Path(__file__).resolve().parents[2] / "fixtures" / "megatron_core"


def read_all(prefix, mmap=True):
    dataset = IndexedDataset(prefix, mmap)
    return [dataset[i].tolist() for i in range(len(dataset))]


def check_invariants(prefix, documents):
    """The three invariants of a pair, and the tokens."""
    dataset = IndexedDataset(prefix)
    assert int(dataset.sequence_lengths.sum()) * dataset.dtype.itemsize == os.path.getsize(bin_path(prefix))
    assert dataset.document_indices[-1] == len(dataset) == len(documents)
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents


@pytest.mark.parametrize(("name", "documents", "factor"), [("d0", 64, 31), ("d1", 40, 93)])
def test_written_files_are_byte_identical_to_megatron_cores(tmp_path, name, documents, factor):
    write_d0(tmp_path / name, documents=documents, factor=factor)
    for suffix in (".bin", ".idx"):
        assert filecmp.cmp(tmp_path / f"{name}{suffix}", FIXTURES / f"{name}{suffix}", shallow=False)


@pytest.mark.parametrize("mmap", [True, False])
def test_megatron_cores_files_are_read(mmap):
    assert read_all(FIXTURES / "d0", mmap) == d0_documents()
    assert IndexedDataset(FIXTURES / "d0", mmap).num_tokens == 959


def test_a_part_of_a_sequence_is_read_and_nothing_beyond_it():
    for mmap in (True, False):
        dataset = IndexedDataset(FIXTURES / "d0", mmap)
        assert dataset.get(1, 2, 3).tolist() == d0_documents()[1][2:5]
        assert dataset.get(1, 2).tolist() == d0_documents()[1][2:]
        with pytest.raises(IndexError):
            dataset.get(1, 2, len(d0_documents()[1]))
        with pytest.raises(IndexError):
            dataset.get(1, -1, 1)


def test_pickled_dataset_opens_the_files_again():
    dataset = IndexedDataset(FIXTURES / "d0", mmap=False)
    assert pickle.loads(pickle.dumps(dataset))[3].tolist() == d0_documents()[3]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(101, np.uint16), (65499, np.uint16), (65500, np.int32), (None, np.int32)])
def test_dtype_follows_the_vocabulary(vocab_size, dtype):
    assert optimal_dtype(vocab_size) is dtype


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16, np.float32, np.float64])
def test_every_dtype_code_round_trips(tmp_path, dtype):
    with IndexedDatasetBuilder(bin_path(tmp_path / "x"), dtype) as builder:
        builder.add_document(np.arange(5, dtype=dtype))
        builder.finalize(idx_path(tmp_path / "x"))
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.dtype == dtype
    assert dataset[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "documents",
    [[[97, 100], [100], [98, 99, 100]], [[97], [], [98, 99]], [[], [97]], [[97], []], [[97]]],
    ids=["with-eod", "empty-inside", "empty-first", "empty-last", "one"],
)
def test_lengths_describe_exactly_the_documents(tmp_path, documents):
    prefix = write_documents(tmp_path / "x", documents)
    check_invariants(prefix, documents)
    assert IndexedDataset(prefix).sequence_lengths.tolist() == [len(d) for d in documents]


def test_bulk_and_single_appends_write_the_same_bytes(tmp_path):
    documents = d0_documents()
    write_documents(tmp_path / "single", documents)
    with IndexedDatasetBuilder(bin_path(tmp_path / "bulk"), np.uint16) as builder:
        for half in (documents[:30], documents[30:]):
            builder.add_documents(np.concatenate(half), [len(d) for d in half])
        builder.finalize(idx_path(tmp_path / "bulk"))
    assert filecmp.cmp(bin_path(tmp_path / "single"), bin_path(tmp_path / "bulk"), shallow=False)
    assert filecmp.cmp(idx_path(tmp_path / "single"), idx_path(tmp_path / "bulk"), shallow=False)


def test_documents_of_several_sequences_keep_their_marks_and_modes(tmp_path):
    with IndexedDatasetBuilder(bin_path(tmp_path / "x"), np.uint16, multimodal=True) as builder:
        builder.add_document([1, 2, 3], lengths=[2, 1], modes=[0, 1])
        builder.add_item([4, 5], mode=1)
        builder.add_item([6])
        builder.end_document()
        builder.finalize(idx_path(tmp_path / "x"))
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.document_indices.tolist() == [0, 2, 4]
    assert dataset.sequence_modes.tolist() == [0, 1, 1, 0]
    assert dataset[2].tolist() == [4, 5]


def test_all_empty_documents_are_an_error_and_leave_nothing(tmp_path):
    with pytest.raises(DataError, match="without a single token"):
        write_documents(tmp_path / "x", [[], []])
    assert not list(tmp_path.iterdir())


def test_ids_that_do_not_fit_are_refused(tmp_path):
    for tokens in ([65536], [-1], [0.5]):
        with pytest.raises(DataError), IndexedDatasetBuilder(bin_path(tmp_path / "x"), np.uint16) as builder:
            builder.add_document(tokens)
    assert not list(tmp_path.iterdir())


def test_nothing_has_the_final_name_before_finalize_and_an_abandoned_write_leaves_nothing(tmp_path):
    with IndexedDatasetBuilder(bin_path(tmp_path / "x"), np.uint16) as builder:
        builder.add_document([1, 2])
        assert not (tmp_path / "x.bin").exists()
    assert not list(tmp_path.iterdir())


def test_a_new_pair_replaces_an_old_one(tmp_path):
    write_documents(tmp_path / "x", [[1], [2]])
    write_documents(tmp_path / "x", [[3, 4]])
    assert read_all(tmp_path / "x") == [[3, 4]]


# --- R16: damage


def cut(path, count):
    os.truncate(path, os.path.getsize(path) - count)


def overwrite(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


DAMAGES = {
    "two bytes off the bin": (lambda p: cut(bin_path(p), 2), ["1918", "1916"]),
    "one byte off the idx": (lambda p: cut(idx_path(p), 1), ["1322", "1321"]),
    "index of another set": (lambda p: shutil.copy(FIXTURES / "d1.idx", idx_path(p)), ["1212", "1918"]),
    "empty bin": (lambda p: cut(bin_path(p), 1918), ["1918", "has 0"]),
    "longer bin": (lambda p: overwrite(bin_path(p), 1918, b"\0\0"), ["1918", "1920"]),
    "wrong magic": (lambda p: overwrite(idx_path(p), 0, b"MMIDIDX\0\1"), ["MMIDIDX"]),
    "wrong version": (lambda p: overwrite(idx_path(p), 9, b"\2"), ["version 2"]),
    "unknown dtype": (lambda p: overwrite(idx_path(p), 17, b"\x63"), ["dtype code 99"]),
    "other dtype": (lambda p: overwrite(idx_path(p), 17, b"\x04"), ["byte"]),
    "header only": (lambda p: os.truncate(idx_path(p), 33), ["33 bytes"]),
    "empty idx": (lambda p: os.truncate(idx_path(p), 0), ["0 bytes"]),
    "huge count": (lambda p: overwrite(idx_path(p), 18, b"\xff" * 8), ["18446744073709551615"]),
    "negative length": (
        lambda p: overwrite(idx_path(p), 34 + 4 * 5, b"\xff\xff\xff\xff"),
        ["negative length -1", "sequence 5"],
    ),
    "missing idx": (lambda p: os.unlink(idx_path(p)), ["missing"]),
    "missing bin": (lambda p: os.unlink(bin_path(p)), ["missing"]),
    "folder as bin": (lambda p: (os.unlink(bin_path(p)), os.mkdir(bin_path(p))), ["not a file"]),
    "falling marks": (lambda p: overwrite(idx_path(p), 34 + 12 * 64 + 8 * 3, b"\x00"), ["document marks"]),
    "last mark": (lambda p: overwrite(idx_path(p), 34 + 12 * 64 + 8 * 64, b"\x3f"), ["document marks 0 ... 63"]),
    "pointer": (lambda p: overwrite(idx_path(p), 34 + 4 * 64 + 8 * 2, b"\x17"), ["sequence 2", "byte 23"]),
}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_pairs_are_refused_with_both_paths_and_the_numbers(tmp_path, damage, mmap):
    prefix = write_d0(tmp_path / "d0")
    act, texts = DAMAGES[damage]
    act(prefix)
    with pytest.raises(DataError) as caught:
        IndexedDataset(prefix, mmap)
    for text in (bin_path(prefix), idx_path(prefix), *texts):
        assert text in str(caught.value)


def test_a_pair_of_no_tokens_is_refused(tmp_path):
    (tmp_path / "x.bin").touch()
    header = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\x08" + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    (tmp_path / "x.idx").write_bytes(header + (0).to_bytes(8, "little"))
    with pytest.raises(DataError, match="no tokens"):
        IndexedDataset(tmp_path / "x")


MARKS = 34 + 12 * 64  # where the document marks of d0.idx begin


def describes_the_same_sequences(index, original):
    """Equal up to the document marks, which still rise from 0 to 64: other documents of the same sequences, a legal index."""
    if len(index) != len(original) or index[:MARKS] != original[:MARKS]:
        return False
    marks = np.frombuffer(index[MARKS:], dtype="<i8")
    return marks[0] == 0 and marks[-1] == 64 and bool((np.diff(marks) >= 0).all())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), mmap=st.booleans())
def test_any_mutation_is_refused_unless_the_format_cannot_tell(tmp_path, data, mmap):
    """Random mutations of either file: a DataError. What a format without checksums cannot tell: other token values of the same
    number, and sequences grouped into other documents, which changes no sequence."""
    prefix = tmp_path / "d0"
    for suffix in (".bin", ".idx"):
        shutil.copy(FIXTURES / f"d0{suffix}", f"{prefix}{suffix}")
    in_index = data.draw(st.booleans())
    path = pathlib.Path((idx_path if in_index else bin_path)(prefix))
    content = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "extend", "insert", "delete", "zero"]))
    at = data.draw(st.integers(0, len(content) - 1))
    some = data.draw(st.binary(min_size=1, max_size=16))
    if kind == "flip":
        content[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del content[at:]
    elif kind == "extend":
        content += some
    elif kind == "insert":
        content[at:at] = some
    elif kind == "delete":
        del content[at : at + len(some)]
    else:
        content[at : at + 8] = b"\xff" * len(content[at : at + 8])
    original = pathlib.Path(str(FIXTURES / "d0") + path.suffix).read_bytes()
    path.write_bytes(content)
    if not in_index and len(content) == len(original):
        assert [len(d) for d in read_all(prefix, mmap)] == [len(d) for d in d0_documents()]
    elif in_index and describes_the_same_sequences(bytes(content), original):
        assert read_all(prefix, mmap) == d0_documents()
    else:
        with pytest.raises(DataError) as caught:
            IndexedDataset(prefix, mmap)
        assert str(prefix) in str(caught.value)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=st.binary(max_size=200), tokens=st.binary(max_size=50), magic=st.booleans())
def test_arbitrary_bytes_are_refused(tmp_path, index, tokens, magic):
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\x08" if magic else b""
    (tmp_path / "x.bin").write_bytes(tokens)
    (tmp_path / "x.idx").write_bytes(head + index)
    with pytest.raises(DataError):
        IndexedDataset(tmp_path / "x")


def test_a_file_that_shrinks_while_in_use_is_named_in_file_reading_mode(tmp_path):
    prefix = write_d0(tmp_path / "d0")
    dataset = IndexedDataset(prefix, mmap=False)
    cut(bin_path(prefix), 100)
    with pytest.raises(DataError, match="became shorter"):
        dataset.get(63)


# --- R34: merging


def shards(folder, count=12):
    folder.mkdir()
    parts = {f"s{k}": [[k, 7], [], [k] * (k + 1)] for k in range(count)}
    for name, documents in parts.items():
        write_documents(folder / name, documents)
    return parts


def test_merging_a_folder_takes_natural_order(tmp_path, capsys):
    parts = shards(tmp_path / "in")
    assert merge_datasets.main(["--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "out")]) == 0
    check_invariants(tmp_path / "out", [d for k in range(12) for d in parts[f"s{k}"]])
    assert "36 documents" in capsys.readouterr().out


def test_merging_given_prefixes_keeps_their_order(tmp_path):
    parts = shards(tmp_path / "in", 4)
    order = ["s2", "s0", "s3"]
    inputs = [str(tmp_path / "in" / name) for name in order]
    assert merge_datasets.main(["--inputs", *inputs, "--output-prefix", str(tmp_path / "out")]) == 0
    check_invariants(tmp_path / "out", [d for name in order for d in parts[name]])


def test_merging_equals_writing_everything_at_once(tmp_path):
    write_documents(tmp_path / "a", d0_documents()[:20])
    write_documents(tmp_path / "b", d0_documents()[20:])
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    for suffix in (".bin", ".idx"):
        assert filecmp.cmp(tmp_path / f"out{suffix}", FIXTURES / f"d0{suffix}", shallow=False)


def test_merges_that_cannot_be_right_are_refused_and_write_nothing(tmp_path, capsys):
    write_documents(tmp_path / "a", [[1]])
    with IndexedDatasetBuilder(bin_path(tmp_path / "wide"), np.int32) as builder:
        builder.add_document([70000])
        builder.finalize(idx_path(tmp_path / "wide"))
    out = ["--output-prefix", str(tmp_path / "out")]
    assert merge_datasets.main(["--inputs", str(tmp_path / "a"), str(tmp_path / "wide"), *out]) == 2
    assert "int32" in capsys.readouterr().err
    assert merge_datasets.main(["--inputs", str(tmp_path / "a"), "--output-prefix", str(tmp_path / "a")]) == 2
    (tmp_path / "half.bin").touch()
    assert merge_datasets.main(["--input", str(tmp_path), *out]) == 2
    assert "half" in capsys.readouterr().err
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("out")]
    assert read_all(tmp_path / "a") == [[1]]


def test_counts_of_a_pair(tmp_path, capsys):
    prefix = write_documents(tmp_path / "x", [[1, 2, 3], [], [4]])
    assert count_tokens.main([prefix, str(FIXTURES / "d0"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["total"] == {"documents": 67, "tokens": 963}
    assert report["datasets"][0]["empty_documents"] == 1
    assert report["datasets"][0]["document_tokens"] == {"min": 0, "median": 1.0, "mean": 4 / 3, "max": 3}
    cut(bin_path(prefix), 1)
    assert count_tokens.main([prefix]) == 2
    assert bin_path(prefix) in capsys.readouterr().err


def test_unigram_entropy_is_that_of_the_token_frequencies(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_tokens, "CHUNK", 3)
    prefix = str(tmp_path / "four")
    write_documents(prefix, [[0, 1, 2, 3], [3, 2, 1, 0], [7] * 8])  # shares 1/8, 1/8, 1/8, 1/8, 1/2
    assert count_tokens.counts(prefix, entropy=True)["unigram_entropy_nats"] == pytest.approx(2.0 * np.log(2))
