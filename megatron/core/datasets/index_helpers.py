"""Sample order as pure arithmetic: splits, document order, sample boundaries, shuffles, blends. NumPy only, vectorised.

    documents of the split   d3 d0 d2 ...            (document index: shuffled, once per epoch)
    token stream             |--d3--|-d0-|---d2---|...
    samples                  [0 .. s][s .. 2s] ...   (sample index: sample k starts at token k*s and holds s + 1 ids, the last
                                                      of which is the first of sample k + 1)
    order of the run         sample shuffle[0], shuffle[1], ...

Two orders are offered. `megatron_order` is the order of Megatron-LM's GPTDataset: the documents of all epochs (but the last,
when only a small part of it is needed) are shuffled together before they are cut into samples. `epoch_order` cuts one epoch
into samples once, and goes through a fresh permutation of them in every epoch; asking for more samples never changes the
order of the first ones.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.errors import ConfigError, DataError

IntArray = npt.NDArray[Any]  # of some integer type

# Megatron-LM's margin on the samples that are prepared per data set of a blend, and its limit for keeping the last epoch apart.
BLEND_SURPLUS = 0.005
SEPARATE_EPOCH_THRESHOLD = 0.80
_DOCUMENTS_AT_ONCE = 1 << 14


@dataclasses.dataclass(frozen=True)
class GPTIndex:
    """The order of one data set's samples.

    document_index: int32 [documents x epochs], position in the stream -> document of the file.
    sample_index: int32 or int64 [samples cut + 1, 2], where a sample starts: (position in document_index, token in it).
    shuffle_index: uint32 or int64 [samples], sample of the run -> row of sample_index.
    """

    document_index: IntArray
    sample_index: IntArray
    shuffle_index: IntArray

    @property
    def num_samples(self) -> int:
        """How many samples the order holds (at least as many as were asked for)."""
        return len(self.shuffle_index)


def parse_split(text: str) -> list[tuple[float, float] | None]:
    """Shares "969,30,1" of train, validation, test as three consecutive parts of [0, 1); None where the share is 0.

    Raises ConfigError unless the text is one to three numbers >= 0, not all of them 0.
    """
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(math.isfinite(s) and s >= 0 for s in shares) or sum(shares) == 0:
        raise ConfigError(f"split={text!r} is not a split; give up to three shares >= 0, not all 0, like 969,30,1")
    shares = normalize_weights([*shares, *[0.0] * (3 - len(shares))])
    ends = [0.0]
    for share in shares:
        ends.append(ends[-1] + share)
    return [(start, stop) if stop > start else None for start, stop in itertools.pairwise(ends)]


def split_range(part: tuple[float, float], count: int) -> tuple[int, int]:
    """The half-open range of `count` documents that a part of [0, 1) covers, rounded as Megatron-LM rounds."""
    return round(part[0] * float(count)), round(part[1] * float(count))


def normalize_weights(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum. Raises ConfigError for negative, infinite, NaN or all-zero weights."""
    array = np.asarray(weights, dtype=np.float64)
    if not len(array) or not np.isfinite(array).all() or (array < 0).any() or array.sum() == 0:
        raise ConfigError(f"blend weights {list(weights)} are not usable; give finite numbers >= 0, at least one of them > 0")
    return [float(w) for w in array / array.sum()]


def samples_per_epoch(num_tokens: int, seq_length: int) -> int:
    """Whole samples in a stream of `num_tokens` tokens; each needs seq_length + 1 ids and shares one with the next."""
    return max(0, (num_tokens - 1) // seq_length)


def epochs_needed(num_tokens: int, seq_length: int, num_samples: int | None) -> int:
    """Passes over `num_tokens` tokens until `num_samples` samples fit into the stream; None = one pass."""
    return 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // num_tokens))


def build_sample_index(lengths: IntArray, document_index: IntArray, seq_length: int, num_samples: int) -> IntArray:
    """Where each of `num_samples` samples starts, and where the last one ends: [num_samples + 1, 2] (position, offset).

    lengths: int [documents of the file]; document_index: int [positions of the stream].
    Sample k starts at token k * seq_length of the stream. A document that ends at token e of the stream holds the starts below
    e that earlier ones do not hold, so the starts per document are a difference of two ceilings: no search.
    The documents are taken a cache's worth at a time.
    """
    index = np.empty((num_samples + 1, 2), dtype=np.int32 if len(document_index) < 2**31 else np.int64)
    filled = tokens = 0
    for low in range(0, len(document_index), _DOCUMENTS_AT_ONCE):
        sizes = lengths[document_index[low : low + _DOCUMENTS_AT_ONCE]]
        ends = np.cumsum(sizes, dtype=np.int64)
        ends += tokens
        tokens = int(ends[-1])
        starts_below = ends + (seq_length - 1)
        starts_below //= seq_length
        if low + len(sizes) == len(document_index):
            starts_below[-1] = num_samples + 1
        np.minimum(starts_below, num_samples + 1, out=starts_below)
        ends -= sizes  # now where each document begins
        position = np.repeat(np.arange(len(sizes)), np.diff(starts_below, prepend=filled))
        rows = slice(filled, filled + len(position))
        index[rows, 0] = position + low
        index[rows, 1] = np.arange(filled, rows.stop, dtype=np.int64) * seq_length - ends[position]
        filled = rows.stop
    return index


def _shuffled_documents(documents: IntArray, epochs: int, random: np.random.RandomState) -> IntArray:
    index = np.tile(documents.astype(np.int64), epochs)  # NumPy shuffles 8-byte items faster than 4-byte ones, in the same order
    random.shuffle(index)
    return index.astype(np.int32)


def _shuffled_range(start: int, stop: int, random: np.random.RandomState) -> IntArray:
    index = np.arange(start, stop, dtype=np.int64)
    random.shuffle(index)
    return index.astype(np.uint32) if stop < 2**32 - 2 else index


def megatron_order(lengths: IntArray, documents: IntArray, *, seq_length: int, num_samples: int | None, seed: int) -> GPTIndex:
    """Megatron-LM's order: the same samples in the same order for the same seed, documents and number of samples.

    lengths: int [documents of the file], tokens per document; documents: the documents of the split.
    num_samples: samples asked for; None = what one pass holds. More documents than needed are never repeated: the epochs are
    as many as `num_samples` takes. The order depends on `num_samples` (through the number of epochs).
    """
    tokens = int(lengths[documents].sum(dtype=np.int64))
    epochs = epochs_needed(tokens, seq_length, num_samples)
    total = (epochs * tokens - 1) // seq_length
    before_last = ((epochs - 1) * tokens - 1) // seq_length if epochs > 1 else 0
    needed_of_last = (num_samples or 0) - before_last
    apart = epochs > 1 and needed_of_last < int(SEPARATE_EPOCH_THRESHOLD * ((tokens - 1) // seq_length))
    random = np.random.RandomState(seed)
    if apart:
        document_index = np.concatenate([_shuffled_documents(documents, e, random) for e in (epochs - 1, 1)])
    else:
        document_index = _shuffled_documents(documents, epochs, random)
    sample_index = build_sample_index(lengths, document_index, seq_length, total)
    if apart:
        ranges = ((0, before_last), (before_last, total))
        shuffle_index = np.concatenate([_shuffled_range(start, stop, random) for start, stop in ranges])
    else:
        shuffle_index = _shuffled_range(0, total, random)
    return GPTIndex(document_index, sample_index, shuffle_index)


def epoch_order(lengths: IntArray, documents: IntArray, *, seq_length: int, num_samples: int | None, seed: int) -> GPTIndex:
    """Whole passes: the documents are shuffled and cut into samples once; every epoch is a permutation of those samples.

    The last (tokens - 1) % seq_length tokens of the shuffled stream are in no sample. A stream that is shorter than one sample
    gives one sample, which the data set pads. Arguments as in `megatron_order`; the order does not depend on `num_samples`.
    """
    tokens = int(lengths[documents].sum(dtype=np.int64))
    if tokens < 2:
        raise DataError(f"{len(documents)} documents with {tokens} tokens in all hold no sample; at least 2 tokens are needed")
    random = np.random.RandomState(seed)
    document_index = _shuffled_documents(documents, 1, random)
    size = samples_per_epoch(tokens, seq_length)
    if size:
        sample_index = build_sample_index(lengths, document_index, seq_length, size)
    else:
        last = int(np.flatnonzero(lengths[document_index])[-1])
        sample_index = np.array([[0, 0], [last, lengths[document_index[last]] - 1]], dtype=np.int32)
        size = 1
    wanted = size if num_samples is None else num_samples
    passes = [_shuffled_range(0, size, random) for _ in range(max(1, -(-wanted // size)))]
    return GPTIndex(document_index, sample_index, np.concatenate(passes))


def blend_request(size: int, weight: float) -> int:
    """Samples that Megatron-LM prepares of a data set with this normalised weight in a blend of `size` samples."""
    return math.ceil(math.ceil(size * weight) * (1 + BLEND_SURPLUS))


def blending_indices(weights: Sequence[float], size: int, limits: Sequence[int] | None = None) -> tuple[IntArray, IntArray]:
    """Which data set, and which sample of it, is sample i of the blend: (dataset int16 or int32 [size], sample int64 [size]).

    Each sample goes to the set that is furthest behind its share, weight * max(i, 1) - samples so far (the first of equals):
    Megatron-LM's greedy rule. A set of weight 0 is never drawn. limits: draw at most so many samples of each set.
    The rule is sequential; `_greedy_blocks` makes it fast by running all stretches of the sequence at once.
    """
    shares = np.asarray(normalize_weights(normalize_weights(weights)))
    caps = np.full(len(shares), np.iinfo(np.int64).max) if limits is None else np.asarray(limits, dtype=np.int64)
    drawn = np.flatnonzero(shares > 0)
    caps = caps[drawn]
    if limits is not None and int(caps.sum()) < size:
        raise DataError(f"a blend of {size} samples was asked of data sets that hold {int(caps.sum())}")
    dtype = np.int16 if len(shares) < 2**15 else np.int32
    if len(drawn) == 1:
        return np.full(size, drawn[0], dtype=dtype), np.arange(size, dtype=np.int64)
    choice = _greedy_blocks(shares[drawn], size, None if limits is None else caps)
    order = np.argsort(choice, kind="stable")
    counts = np.bincount(choice, minlength=len(drawn))
    sample = np.empty(size, dtype=np.int64)
    sample[order] = np.arange(size) - np.repeat(np.cumsum(counts) - counts, counts)
    return drawn.astype(dtype)[choice], sample


def _greedy_blocks(shares: npt.NDArray[np.float64], size: int, caps: IntArray | None) -> IntArray:
    """The greedy choice for i in [0, size), block by block in parallel.

    A block needs the counts at its start, which only its predecessor's end gives. They are guessed (each set its rounded-down
    share, the rest to the sets of largest weight, which wait it off soonest), all blocks run, and blocks whose guess was not
    their predecessor's end run again from there, until all agree. The chain starts from the true counts 0, so agreement
    is proof, not approximation; the greedy rule forgets a wrong start within a few draws, so two or three rounds suffice.
    """
    sets = len(shares)
    blocks = max(1, min(size // 512, 2_000_000 // sets, 4096))
    length = -(-size // blocks) if size else 0
    blocks = -(-size // length) if length else 0
    first = np.arange(blocks, dtype=np.int64) * length
    start = np.floor(shares * first[:, None])
    if caps is not None:
        start = np.minimum(start, caps)
    missing = (first - start.sum(axis=1)).astype(np.int64)
    rank = np.empty(sets, dtype=np.int64)
    rank[np.argsort(-shares, kind="stable")] = np.arange(sets)
    start += (missing[:, None] - rank - 1) // sets + 1
    choice = np.empty((length, blocks), dtype=np.int32)
    ends = np.empty_like(start)
    stale = np.arange(blocks)
    while len(stale):
        choice[:, stale], ends[stale] = _greedy_run(shares, first[stale], start[stale], length, caps)
        wrong = (start[1:] != ends[:-1]).any(axis=1)
        stale = np.flatnonzero(wrong) + 1
        start[stale] = ends[stale - 1]
    return choice.T.reshape(-1)[:size]


def _greedy_run(
    shares: npt.NDArray[np.float64], first: IntArray, start: npt.NDArray[np.float64], length: int, caps: IntArray | None
) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """`length` greedy draws of every block at once: (choice [length, blocks], counts at the end [blocks, sets])."""
    counts = start.copy()
    rows = np.arange(len(first))
    choice = np.empty((length, len(first)), dtype=np.int32)
    deficit = np.empty_like(counts)
    for step in range(length):
        scale = np.maximum(first + step, 1).astype(np.float64)
        np.multiply(shares, scale[:, None], out=deficit)
        deficit -= counts
        if caps is not None:
            deficit[counts >= caps] = -np.inf
        picked = deficit.argmax(axis=1)
        choice[step] = picked
        counts[rows, picked] += 1.0
    return choice, counts
