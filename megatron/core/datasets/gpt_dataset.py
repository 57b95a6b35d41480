"""GPT data sets: token files, splits and blends turned into numbered samples of seq_length + 1 ids.

`build_gpt_datasets` plans first (opens and checks every file, decides how many samples each file gives), compares the plans of
all ranks, and then builds or loads the indices: one rank per machine builds, the others find its files in the cache.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets import index_helpers
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.coordination import BuildCoordinator, SingleProcess
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.index_helpers import GPTIndex
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.mock import MockGPTDataset
from megatron.core.datasets.packed_sample import Sample, SampleFormat
from megatron.core.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"
# Raised when the arithmetic of an order changes, so that no cache of the old arithmetic is read.
_ORDER_VERSION = 1
_ORDERS: dict[str, Callable[..., GPTIndex]] = {"megatron": index_helpers.megatron_order, "epoch": index_helpers.epoch_order}


@dataclasses.dataclass(frozen=True)
class Blend:
    """Prefixes of .bin/.idx pairs with their weights. weights None: in proportion to their sizes (as Megatron-LM does)."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.prefixes:
            raise ConfigError("a blend needs at least one data set prefix")
        if self.weights is not None:
            if len(self.weights) != len(self.prefixes):
                raise ConfigError(f"{len(self.weights)} blend weights for {len(self.prefixes)} data sets; give one for each")
            index_helpers.normalize_weights(self.weights)

    @staticmethod
    def parse(words: Sequence[str]) -> "Blend | None":
        """PREFIX, or PREFIX PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ...; None for no words. ConfigError for a mixture."""
        if not words:
            return None
        numbers = [_is_number(word) for word in words]
        if not any(numbers):
            return Blend(tuple(words))
        if len(words) % 2 == 0 and all(numbers[::2]) and not any(numbers[1::2]):
            return Blend(tuple(words[1::2]), tuple(float(word) for word in words[::2]))
        raise ConfigError(
            f"data path {' '.join(words)!r} mixes weights and prefixes; give a WEIGHT before every PREFIX, or before none"
        )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTDatasetConfig:
    """What to read and how to cut it.

    blend with split (shares of train, valid, test), or blend_per_split (one Blend or None for each), or mock.
    vocab_size: every id must be below it; None = not checked. cache_path: None = `cache` beside the data.
    shuffle: "megatron" or "epoch", see `index_helpers`.
    """

    seq_length: int
    seed: int = 1234
    split: str | None = None
    blend: Blend | None = None
    blend_per_split: tuple[Blend | None, Blend | None, Blend | None] | None = None
    mock: bool = False
    vocab_size: int | None = None
    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    cache_path: str | None = None
    shuffle: str = "megatron"
    mmap: bool = True

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise ConfigError(f"seq_length={self.seq_length} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed} must be between 0 and 2**32 - 1, the range of the shuffle's generator")
        if self.shuffle not in _ORDERS:
            raise ConfigError(f"shuffle={self.shuffle!r} is not known; use one of {', '.join(_ORDERS)}")
        per_split = self.blend_per_split is not None and any(self.blend_per_split)
        if [self.blend is not None, per_split, self.mock].count(True) != 1:
            raise ConfigError("give exactly one of: data_path, train/valid/test_data_path, mock_data")
        if per_split and self.split is not None:
            raise ConfigError(f"split={self.split!r} divides one data path; with a path per split leave it out")
        if self.split is not None:
            index_helpers.parse_split(self.split)
        if self.mock and self.vocab_size is None:
            raise ConfigError("mock data needs vocab_size")
        self.sample_format()

    def sample_format(self) -> SampleFormat:
        """How a sample is laid out."""
        return SampleFormat(self.seq_length, self.eod, self.reset_position_ids, self.reset_attention_mask, self.eod_mask_loss)

    def sources(self) -> list[tuple[Blend, tuple[float, float]] | None]:
        """(blend, part of each file's documents) for each split, or None."""
        if self.blend_per_split is not None and self.blend is None:
            return [None if blend is None else (blend, (0.0, 1.0)) for blend in self.blend_per_split]
        parts = index_helpers.parse_split(self.split or DEFAULT_SPLIT)
        return [None if part is None or self.blend is None else (self.blend, part) for part in parts]


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of one document of a file."""

    document: int
    start: int
    stop: int


class GPTDataset:
    """Samples of one file's documents in the order of an index.

    tokens: the file. index: see `GPTIndex`; may hold more samples than `num_samples`, which is the length of the data set.
    vocab_size: ids at or above it are a DataError when a sample is read.
    """

    def __init__(
        self,
        tokens: IndexedDataset,
        index: GPTIndex,
        sample_format: SampleFormat,
        num_samples: int,
        vocab_size: int | None = None,
    ) -> None:
        assert num_samples <= index.num_samples
        self.tokens = tokens
        self.index = index
        self.format = sample_format
        self.num_samples = num_samples
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.num_samples

    def spans(self, index: int) -> list[Span]:
        """The pieces of documents that make up a sample, in order; seq_length + 1 tokens in all (fewer in a padded sample)."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        row = int(self.index.shuffle_index[index])
        (first, offset), (last, end) = self.index.sample_index[row : row + 2].tolist()
        documents = self.index.document_index[first : last + 1].tolist()
        stops = [int(n) for n in self.tokens.sequence_lengths[documents[:-1]]] + [end + 1]
        starts = [offset] + [0] * (len(documents) - 1)
        return [Span(d, a, b) for d, a, b in zip(documents, starts, stops, strict=True) if b > a]

    def ids(self, index: int) -> npt.NDArray[np.int64]:
        """The token ids of a sample, int64 [seq_length + 1] (fewer if padded). DataError for ids not in the vocabulary."""
        pieces = [self.tokens.get(span.document, span.start, span.stop - span.start) for span in self.spans(index)]
        ids = np.concatenate(pieces).astype(np.int64, copy=False)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (self.vocab_size is not None and high >= self.vocab_size):
            raise DataError(
                f"data set {self.tokens.prefix}: sample {index} holds token id {low if low < 0 else high}, but the tokenizer's "
                f"vocabulary is 0 to {self.vocab_size}, exclusive; the files were made with another tokenizer"
            )
        return ids

    def __getitem__(self, index: int) -> Sample:
        """The sample, as `SampleFormat.sample` gives it."""
        return self.format.sample(self.ids(index), index)


AnyGPTDataset = GPTDataset | BlendedDataset | MockGPTDataset


@dataclasses.dataclass(frozen=True)
class _Source:
    """One file's contribution to a split: the documents [start, stop) and their tokens."""

    tokens: IndexedDataset
    start: int
    stop: int
    num_tokens: int
    digest: str


@dataclasses.dataclass(frozen=True)
class _SplitPlan:
    """One split: its sources, their weights (None = by size), the samples asked for (None = one pass)."""

    name: str
    sources: tuple[_Source, ...]
    weights: tuple[float, ...] | None
    size: int | None


def build_gpt_datasets(
    config: GPTDatasetConfig, sizes: Sequence[int | None], coordinator: BuildCoordinator | None = None
) -> list[AnyGPTDataset | None]:
    """The train, valid and test data sets with exactly `sizes` samples each (None = one pass over the data).

    None where a split has no share, where no samples were asked for, or (valid and test only, with a warning) where its share
    of the documents holds no tokens. Raises ConfigError or DataError on every rank alike.
    """
    coordinator = coordinator or SingleProcess()
    if config.mock:
        return [_mock(config, name, size) for name, size in zip(SPLITS, sizes, strict=True)]
    plans = coordinator.run(lambda: _plan(config, sizes, coordinator.is_builder))
    prints = coordinator.gather(_fingerprint(plans))
    coordinator.run(lambda: _check_same(prints))

    def build() -> list[AnyGPTDataset | None]:
        return [None if plan is None else _build_split(config, plan, coordinator.is_builder) for plan in plans]

    built = coordinator.run(lambda: build() if coordinator.is_builder else None)
    return coordinator.run(lambda: build() if built is None else built)


def _mock(config: GPTDatasetConfig, name: str, size: int | None) -> MockGPTDataset | None:
    assert config.vocab_size is not None
    if size is None:
        raise ConfigError("mock data has no end; ask for a number of samples")
    return MockGPTDataset(config.sample_format(), config.vocab_size, config.seed, name, size) if size else None


def _plan(config: GPTDatasetConfig, sizes: Sequence[int | None], announce: bool) -> list[_SplitPlan | None]:
    """Open every file, check it, and give each split its documents."""
    sources = config.sources()
    prefixes = {prefix for source in sources if source is not None for prefix in source[0].prefixes}
    files = {prefix: IndexedDataset(prefix, config.mmap) for prefix in sorted(prefixes)}
    for prefix, file in files.items():
        if file.dtype.kind not in "iu":
            raise DataError(f"data set {prefix} holds {file.dtype} values, not token ids")
    plans: list[_SplitPlan | None] = []
    for name, source, size in zip(SPLITS, sources, sizes, strict=True):
        plans.append(None if source is None or size == 0 else _plan_split(name, source, size, files, announce))
    return plans


def _plan_split(
    name: str, source: tuple[Blend, tuple[float, float]], size: int | None, files: dict[str, IndexedDataset], announce: bool
) -> _SplitPlan | None:
    blend, part = source
    chosen = [_source(files[prefix], part) for prefix in blend.prefixes]
    weights = [1.0] * len(chosen) if blend.weights is None else list(blend.weights)
    usable = [weight > 0 and found.num_tokens > 1 for weight, found in zip(weights, chosen, strict=True)]
    for prefix, found, good, weight in zip(blend.prefixes, chosen, usable, weights, strict=True):
        if weight > 0 and not good:
            text = (
                f"data set {prefix}: the {name} split covers {found.stop - found.start} of its {len(found.tokens)} documents "
                f"with {found.num_tokens} tokens, too few for a sample; give that split a larger share or more data"
            )
            if name == "train":
                raise DataError(text)
            if announce:
                logger.warning("%s. It is left out.", text)
    if not any(usable):
        return None
    kept = [i for i, good in enumerate(usable) if good]
    given = None if blend.weights is None else tuple(blend.weights[i] for i in kept)
    if given is not None and size is None:
        raise ConfigError(f"a weighted blend for {name} needs a number of samples")
    return _SplitPlan(name, tuple(chosen[i] for i in kept), given, size)


def _source(file: IndexedDataset, part: tuple[float, float]) -> _Source:
    start, stop = index_helpers.split_range(part, len(file))
    lengths = np.array(file.sequence_lengths[start:stop])
    digest = hashlib.sha256(lengths.data).hexdigest() if len(lengths) else ""
    return _Source(file, start, stop, int(lengths.sum(dtype=np.int64)), digest)


def _fingerprint(plans: Sequence[_SplitPlan | None]) -> str:
    """What every rank must find equal: the documents, in lengths and number, of every split."""
    return json.dumps(
        [None if p is None else [[s.start, s.stop, s.digest, str(s.tokens.dtype)] for s in p.sources] for p in plans]
    )


def _check_same(prints: Sequence[str | None]) -> None:
    for rank, found in enumerate(prints):
        if found != prints[0]:
            raise DataError(
                f"rank {rank} finds other documents under the data paths than rank 0; the copies on the machines differ: "
                "copy the .bin and .idx files again"
            )


def _build_split(config: GPTDatasetConfig, plan: _SplitPlan, announce: bool) -> AnyGPTDataset:
    if len(plan.sources) == 1 and plan.weights is None:
        return _build_source(config, plan.name, plan.sources[0], plan.size, 0 if plan.size is None else plan.size, announce)
    weights, size, wanted, limits = _shares(config, plan)
    description = {"order": "blend", "version": _ORDER_VERSION, "weights": list(weights), "size": size, "limits": limits}

    def build() -> dict[str, npt.NDArray[Any]]:
        return dict(zip(("dataset", "sample"), index_helpers.blending_indices(weights, size, limits), strict=True))

    arrays = _cache(config, plan.sources[0], announce).get(description, build)
    counts = np.bincount(arrays["dataset"], minlength=len(weights)).tolist()
    parts = [
        _build_source(config, plan.name, source, asked, count, announce)
        for source, asked, count in zip(plan.sources, wanted, counts, strict=True)
    ]
    return BlendedDataset(parts, arrays["dataset"], arrays["sample"])


def _shares(
    config: GPTDatasetConfig, plan: _SplitPlan
) -> tuple[Sequence[float], int, Sequence[int | None], Sequence[int] | None]:
    """(weights, samples, samples prepared per source, most samples drawn per source) of a blend, as Megatron-LM chooses them.

    Without weights the sources weigh what they hold, and each is passed through once, as long as that gives enough samples.
    """
    if plan.weights is not None:
        assert plan.size is not None
        weights = index_helpers.normalize_weights(plan.weights)
        return weights, plan.size, [index_helpers.blend_request(plan.size, weight) for weight in weights], None
    least = 1 if config.shuffle == "epoch" else 0  # there, a set shorter than one sample gives one padded sample
    held = [max(least, index_helpers.samples_per_epoch(source.num_tokens, config.seq_length)) for source in plan.sources]
    size = max(1, sum(held)) if plan.size is None else plan.size
    if size <= sum(held):
        return held, size, [None] * len(held), held
    weights = index_helpers.normalize_weights([source.num_tokens for source in plan.sources])
    return weights, size, [index_helpers.blend_request(size, weight) for weight in weights], None


def _build_source(
    config: GPTDatasetConfig, split: str, source: _Source, asked: int | None, drawn: int, announce: bool
) -> GPTDataset:
    """One file's data set: the order for `asked` samples as Megatron-LM makes it; for `drawn`, where that holds fewer."""
    if asked is not None and config.shuffle == "epoch":
        asked = drawn  # this order is the same for any number
    elif asked is not None:
        epochs = index_helpers.epochs_needed(source.num_tokens, config.seq_length, asked)
        if index_helpers.samples_per_epoch(epochs * source.num_tokens, config.seq_length) < drawn:
            asked = drawn
    description = {
        "order": config.shuffle,
        "version": _ORDER_VERSION,
        "seed": config.seed,
        "seq_length": config.seq_length,
        "num_samples": asked,
        "documents": [source.start, source.stop],
        "lengths": source.digest,
    }

    def build() -> dict[str, npt.NDArray[Any]]:
        index = _ORDERS[config.shuffle](
            np.array(source.tokens.sequence_lengths),
            np.arange(source.start, source.stop, dtype=np.int32),
            seq_length=config.seq_length,
            num_samples=asked,
            seed=config.seed,
        )
        return {field.name: getattr(index, field.name) for field in dataclasses.fields(index)}

    index = GPTIndex(**_cache(config, source, announce).get(description, build))
    length = index.num_samples if asked is None and not drawn else drawn
    return GPTDataset(source.tokens, index, config.sample_format(), length, config.vocab_size)


def _cache(config: GPTDatasetConfig, source: _Source, announce: bool) -> IndexCache:
    folder = config.cache_path or os.path.join(os.path.dirname(os.path.abspath(source.tokens.prefix)), "cache")
    return IndexCache(folder, announce)
