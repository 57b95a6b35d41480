"""MockGPTDataset: synthetic samples without files. Learnable, so that the loss falls; the same for the same seed everywhere."""

import dataclasses

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.packed_sample import Sample, SampleFormat
from megatron.core.errors import ConfigError
from megatron.core.seeding import derive_seed

# Ids in use at most; a larger vocabulary would only be learned more slowly.
_ALPHABET = 512
_STRIDES = np.array([1, 2, 3, 5, 7, 11, 13, 17])
_NOISE = 0.05


@dataclasses.dataclass(frozen=True)
class MockGPTDataset:
    """`num_samples` samples of packed documents; each document counts in one of 8 strides, 5 % of its tokens are noise.

    split: "train", "valid" or "test", which differ in their samples. vocab_size: ids are below it. Documents end with EOD if
    the format has one. Sample k depends on (seed, split, k) alone.
    """

    format: SampleFormat
    vocab_size: int
    seed: int
    split: str
    num_samples: int

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or (self.vocab_size == 1 and self.format.eod == 0):
            raise ConfigError(
                f"mock data needs a vocabulary of at least one token beside EOD, got vocab_size={self.vocab_size}"
            )

    def __len__(self) -> int:
        return self.num_samples

    def ids(self, index: int) -> npt.NDArray[np.int64]:
        """The seq_length + 1 token ids of a sample, int64."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        count, eod = self.format.seq_length + 1, self.format.eod
        random = np.random.default_rng(derive_seed(self.seed, "mock", self.split, index))
        alphabet = min(self.vocab_size, _ALPHABET)
        alphabet -= eod is not None and eod < alphabet
        ends = random.random(count) < min(0.25, 4.0 / count)
        document: npt.NDArray[np.int64] = np.cumsum(ends, dtype=np.int64) - ends
        strides = _STRIDES[random.integers(0, len(_STRIDES), count)][document]
        ids = (random.integers(0, alphabet, count)[document] + strides * np.arange(count)) % alphabet
        noisy = random.random(count) < _NOISE
        ids = np.where(noisy, random.integers(0, alphabet, count), ids)
        if eod is not None:
            ids += ids >= eod
            ids[ends] = eod
        return ids.astype(np.int64)

    def __getitem__(self, index: int) -> Sample:
        """The sample, as `SampleFormat.sample` gives it."""
        return self.format.sample(self.ids(index), index)
