"""BlendedDataset: several data sets as one, each contributing its share, in an order that the blend's index fixes."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.packed_sample import Sample


class SampleDataset(Protocol):
    """A sized sequence of samples."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`, as `SampleFormat.sample` gives it."""

    def ids(self, index: int) -> npt.NDArray[np.int64]:
        """Its token ids, int64 [<= seq_length + 1]."""


class BlendedDataset:
    """Sample i is sample `sample_index[i]` of data set `dataset_index[i]`; inside one set samples come in its own order.

    dataset_index: int16 or int32 [samples]; sample_index: int64 [samples]; see `index_helpers.blending_indices`.
    """

    def __init__(
        self, datasets: Sequence[SampleDataset], dataset_index: npt.NDArray[Any], sample_index: npt.NDArray[Any]
    ) -> None:
        assert len(dataset_index) == len(sample_index)
        self.datasets = list(datasets)
        self.dataset_index = dataset_index
        self.sample_index = sample_index

    def __len__(self) -> int:
        return len(self.dataset_index)

    def locate(self, index: int) -> tuple[SampleDataset, int]:
        """The contributing data set and the number of the sample in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.datasets[int(self.dataset_index[index])], int(self.sample_index[index])

    def ids(self, index: int) -> npt.NDArray[np.int64]:
        """The token ids of a sample, int64 [<= seq_length + 1]."""
        dataset, sample = self.locate(index)
        return dataset.ids(sample)

    def __getitem__(self, index: int) -> Sample:
        """The sample; its `sample_id` is `index`, the number in the blend."""
        dataset, sample = self.locate(index)
        return {**dataset[sample], "sample_id": index}
