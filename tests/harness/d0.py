"""Data D0 of the suite: 64 documents by formula; document i has 3 + (7i mod 23) tokens (31i + 17j) mod 100, then EOD 100."""

import os

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, bin_path, idx_path

EOD = 100
VOCAB_SIZE = 101


def d0_documents(*, documents: int = 64, factor: int = 31) -> list[list[int]]:
    """The documents with their EOD; 959 tokens. (D1 is `documents=40, factor=93`.)"""
    return [[(factor * i + 17 * j) % 100 for j in range(3 + (7 * i) % 23)] + [EOD] for i in range(documents)]


def write_d0(prefix: str | os.PathLike[str], *, documents: int = 64, factor: int = 31) -> str:
    """Write D0 as uint16 `.bin`/`.idx`; returns the prefix."""
    write_documents(prefix, d0_documents(documents=documents, factor=factor))
    return os.fspath(prefix)


def write_documents(prefix: str | os.PathLike[str], documents: list[list[int]]) -> str:
    """Write documents of token ids below 65500 as uint16 `.bin`/`.idx`; returns the prefix."""
    with IndexedDatasetBuilder(bin_path(prefix), np.uint16) as builder:
        for tokens in documents:
            builder.add_document(tokens)
        builder.finalize(idx_path(prefix))
    return os.fspath(prefix)
