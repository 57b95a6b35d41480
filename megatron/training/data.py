"""TrainingData: the microbatches of a step on this rank, from files to tensors; its position is the consumed samples alone.

    consumed samples -> sampler (this rank's ids) -> GPT data set -> batch tensors    (loader processes run ahead in this order)

Loader processes leave signals to the trainer, and end with it. Which samples a step holds does not depend on them.
"""

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
import torch.utils.data

from megatron.core.datasets.gpt_dataset import SPLITS, AnyGPTDataset, Blend, GPTDatasetConfig, build_gpt_datasets
from megatron.core.datasets.packed_sample import Sample
from megatron.core.datasets.sampler import microbatch_sample_ids
from megatron.training.agreement import gather_texts, on_all_ranks, own_rank
from megatron.training.config.run_config import RunConfig

T = TypeVar("T")
Batch = dict[str, torch.Tensor]

_LEFT_TO_TRAINER = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


class TokenizerFacts(Protocol):
    """What data sets need to know of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Highest id + 1."""

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token, if there is one."""


class BatchCalculator(Protocol):
    """What the position in the data needs: see `megatron.core.num_microbatches_calculator.NumMicroBatches`."""

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples of the step that starts after `consumed_samples`."""


class RankCoordinator:
    """Data sets built by all ranks of the run together: the first rank of each machine builds, nobody is left waiting."""

    @property
    def is_builder(self) -> bool:
        """Whether this is the first rank of its machine."""
        local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or own_rank()
        return int(local) == 0

    def run(self, work: Callable[[], T]) -> T:
        """Run `work`; a failure on any rank is raised on every rank."""
        return on_all_ranks(work)

    def gather(self, text: str) -> list[str | None]:
        """Every rank's text."""
        return gather_texts(text)


def dataset_config(config: RunConfig, tokenizer: TokenizerFacts) -> GPTDatasetConfig:
    """The data sets that the `data` section describes. Raises ConfigError."""
    data = config.data
    per_split = tuple(Blend.parse(words) for words in (data.train_data_path, data.valid_data_path, data.test_data_path))
    return GPTDatasetConfig(
        seq_length=data.seq_length,
        seed=config.training.seed,
        split=data.split,
        blend=Blend.parse(data.data_path),
        blend_per_split=(per_split[0], per_split[1], per_split[2]) if any(per_split) else None,
        mock=data.mock_data,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        cache_path=data.data_cache_path,
        shuffle=data.data_shuffle,
        mmap=data.mmap_bin_files,
    )


def build_data(
    config: RunConfig,
    tokenizer: TokenizerFacts,
    *,
    dp_rank: int,
    dp_size: int,
    train_samples: int,
    calculator: BatchCalculator,
) -> "TrainingData":
    """Open and check all data; every rank of the run calls this. Raises ConfigError or DataError on all ranks alike.

    train_samples: samples that the whole run reads, in whole global batches as `calculator` sizes them.
    """
    training = config.training
    evaluation_batch = training.global_batch_size or training.micro_batch_size * dp_size
    evaluated = training.eval_iters * evaluation_batch
    coordinator = RankCoordinator()
    described = coordinator.run(lambda: dataset_config(config, tokenizer))
    datasets = build_gpt_datasets(described, (train_samples, evaluated, evaluated), coordinator)
    return TrainingData(
        dict(zip(SPLITS, datasets, strict=True)),
        micro_batch_size=training.micro_batch_size,
        evaluation_batch_size=evaluation_batch,
        dp_rank=dp_rank,
        dp_size=dp_size,
        calculator=calculator,
        num_workers=config.data.num_workers,
    )


class TrainingData:
    """A run's three data sets as microbatches of one data-parallel rank.

    A microbatch: tokens, labels, position_ids (and document_ids with reset_attention_mask) int64 [b, s], loss_mask float32
    [b, s], sample_ids int64 [b], with b = micro_batch_size, on the CPU.
    num_workers: loader processes that read ahead; 0 = read when asked (also in a daemonic process, which may have no children).
    """

    def __init__(
        self,
        datasets: dict[str, AnyGPTDataset | None],
        *,
        micro_batch_size: int,
        evaluation_batch_size: int,
        dp_rank: int,
        dp_size: int,
        calculator: BatchCalculator,
        num_workers: int = 0,
    ) -> None:
        self.datasets = datasets
        self.micro_batch_size = micro_batch_size
        self.evaluation_batch_size = evaluation_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.calculator = calculator
        self.num_workers = 0 if multiprocessing.current_process().daemon else num_workers
        self._ahead: Iterator[Batch] | None = None
        self._ahead_position: int | None = None

    def has(self, split: str) -> bool:
        """Whether there is data for "train", "valid" or "test"."""
        return self.datasets[split] is not None

    def train_step(self, consumed_samples: int) -> list[Batch]:
        """This rank's microbatches of the step that starts after `consumed_samples` samples."""
        count = self.calculator.global_batch_size(consumed_samples)
        ids = self._ids(consumed_samples, count)
        if not self.num_workers:
            return [_collate([self._split("train")[i] for i in microbatch]) for microbatch in ids]
        if self._ahead is None or self._ahead_position != consumed_samples:
            self._read_ahead(consumed_samples, len(ids))
        assert self._ahead is not None
        batches = [next(self._ahead) for _ in ids]
        self._ahead_position = consumed_samples + count
        return batches

    def evaluation(self, split: str, eval_iters: int) -> Iterator[list[Batch]]:
        """The microbatches of each of the first `eval_iters` global batches of a split; the same at every evaluation."""
        dataset = self._split(split)
        for step in range(eval_iters):
            ids = self._ids(step * self.evaluation_batch_size, self.evaluation_batch_size)
            yield [_collate([dataset[i] for i in microbatch]) for microbatch in ids]

    def close(self) -> None:
        """End the loader processes."""
        self._ahead, self._ahead_position = None, None
        atexit.unregister(self.close)

    def _split(self, name: str) -> AnyGPTDataset:
        dataset = self.datasets[name]
        assert dataset is not None, f"there is no {name} data"
        return dataset

    def _ids(self, consumed: int, count: int) -> list[list[int]]:
        return microbatch_sample_ids(consumed, count, self.micro_batch_size, self.dp_rank, self.dp_size)

    def _read_ahead(self, position: int, microbatches: int) -> None:
        """Start loader processes at a position; they keep at least the next step ready."""
        self.close()
        loader = torch.utils.data.DataLoader(
            _Samples(self._split("train")),
            batch_sampler=_UpcomingIds(self, position),
            num_workers=self.num_workers,
            prefetch_factor=max(2, -(-2 * microbatches // self.num_workers)),
            collate_fn=_collate,
            worker_init_fn=_set_up_worker,
            multiprocessing_context="fork",
            generator=torch.Generator(),  # its own: starting a loader must not advance the run's random numbers
            pin_memory=torch.cuda.is_available(),
        )
        self._ahead = iter(loader)
        atexit.register(self.close)  # before multiprocessing's own exit handler, whose SIGTERM the workers ignore


class _Samples(torch.utils.data.Dataset):
    """A GPT data set as the loader wants it."""

    def __init__(self, dataset: AnyGPTDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Sample:
        return self.dataset[index]


class _UpcomingIds(torch.utils.data.Sampler[list[int]]):
    """Sample ids of one rank's microbatches from a position to the end of the data."""

    def __init__(self, data: TrainingData, position: int) -> None:
        self.data, self.position = data, position

    def __iter__(self) -> Iterator[list[int]]:
        position, end = self.position, len(self.data._split("train"))
        while position < end:
            count = self.data.calculator.global_batch_size(position)
            if position + count > end:
                return
            yield from self.data._ids(position, count)
            position += count


def _collate(samples: Sequence[Sample]) -> Batch:
    """Samples stacked to tensors; `sample_id` becomes `sample_ids` int64 [b]."""
    batch = {
        name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0] if name != "sample_id"
    }
    batch["sample_ids"] = torch.tensor([sample["sample_id"] for sample in samples], dtype=torch.int64)
    return batch


def _set_up_worker(worker: int) -> None:
    """In a loader process: the trainer alone answers signals; if it dies, in whatever way, so does this process."""
    for number in _LEFT_TO_TRAINER:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
