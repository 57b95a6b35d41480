"""Preprocessing against the tokenizer alone: how much of a worker's time is not the tokenizer's own. Target: ratio <= 1.2.

Each pair encodes the same documents twice, in one process each, in alternating order: the bare library on ready strings
(`encode` of SentencePiece, `encode_batch_fast` of tokenizers), and `preprocess` from JSONL file to finished .bin/.idx. With
`--workers N` a third time with N processes is shown (throughput per worker falls once N exceeds the free cores).

    python scripts/bench/bench_preprocess.py [--input corpus.jsonl] [--pairs 5] [--workers 2]
"""

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tools import make_corpus, preprocess_data, train_tokenizer

VOCAB_SIZE = 4000
BATCH_DOCUMENTS = 100


def train_sentencepiece(corpus: Path, folder: Path) -> tuple[list[str], Callable[[list[str]], object]]:
    """Arguments of preprocess_data, and the bare library's batch encode."""
    arguments = ["--input", str(corpus), "--output-prefix", str(folder / "sp"), "--vocab-size", str(VOCAB_SIZE)]
    with contextlib.redirect_stdout(io.StringIO()):
        assert train_tokenizer.main(arguments) == 0
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sp.model"))
    options = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(folder / "sp.model")]
    return options, lambda texts: [processor.encode(text) for text in texts]


def train_byte_level_bpe(texts: Sequence[str], folder: Path) -> tuple[list[str], Callable[[list[str]], object]]:
    """The same for a byte-level BPE of the `tokenizers` library."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import tokenizers

    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    library.save(str(folder / "tokenizer.json"))
    options = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer.json")]
    return options, lambda batch: [e.ids for e in library.encode_batch_fast(batch, add_special_tokens=False)]


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(name: str, texts: list[str], corpus: Path, options: list[str], encode: Callable[[list[str]], object],
            folder: Path, pairs: int, workers: int) -> None:  # fmt: skip
    """Print the ratio of one tokenizer."""
    size = sum(len(text.encode()) for text in texts)
    batches = [texts[start : start + BATCH_DOCUMENTS] for start in range(0, len(texts), BATCH_DOCUMENTS)]

    def alone() -> None:
        for batch in batches:
            encode(batch)

    def whole(processes: int) -> None:
        arguments = [
            "--input",
            str(corpus),
            "--output-prefix",
            str(folder / "out"),
            "--append-eod",
            "--workers",
            str(processes),
        ]
        parsed = preprocess_data.parse_arguments([*arguments, *options])
        preprocess_data.preprocess(parsed, preprocess_data.tokenizer_of(parsed))

    ratios, alone_times, many_times = [], [], []
    for number in range(pairs + 1):
        actions: list[tuple[str, Callable[[], object]]] = [("alone", alone), ("whole", lambda: whole(1))]
        times = {label: seconds(action) for label, action in (actions if number % 2 else reversed(actions))}
        if workers > 1:
            times["many"] = seconds(lambda: whole(workers))
        if number:  # the first round warms up
            ratios.append(times["whole"] / times["alone"])
            alone_times.append(times["alone"])
            many_times.append(times.get("many", 0.0))
    line = f"{name}: tokenizer alone {size / statistics.median(alone_times) / 1e6:.2f} MB/s; whole / alone = "
    line += f"{statistics.median(ratios):.3f} (range {min(ratios):.3f}-{max(ratios):.3f}, {pairs} pairs)"
    if workers > 1:
        line += f"; {workers} workers {size / statistics.median(many_times) / 1e6:.2f} MB/s, process start included"
    print(line, flush=True)


def main(argv: Sequence[str]) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input", type=Path, help="JSONL corpus (default: Python's own documentation)")
    parser.add_argument("--pairs", type=int, default=5, help="measured pairs (default: 5)")
    parser.add_argument("--workers", type=int, default=1, help="also show this many processes (default: 1 = do not)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = options.input or folder / "corpus.jsonl"
        if options.input is None:
            make_corpus.write_corpus(make_corpus.python_docs_documents(), corpus, None)
        texts = [json.loads(line)["text"] for line in corpus.read_text("utf-8").splitlines()]
        versions = ", ".join(
            f"{package} {importlib.metadata.version(package)}" for package in ("sentencepiece", "tokenizers", "numpy")
        )
        print(
            f"{sum(len(t.encode()) for t in texts) / 1e6:.2f} MB in {len(texts)} documents; "
            f"Python {platform.python_version()}, {versions}"
        )
        for title, (arguments, encode) in (
            ("SentencePieceTokenizer", train_sentencepiece(corpus, folder)),
            ("HuggingFaceTokenizer", train_byte_level_bpe(texts, folder)),
        ):
            measure(title, texts, corpus, arguments, encode, folder, options.pairs, options.workers)


if __name__ == "__main__":
    main(sys.argv[1:])
