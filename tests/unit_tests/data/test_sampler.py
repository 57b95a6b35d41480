"""Which samples a step holds: data, seed and global batch size decide, never the layout (R26)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.sampler import microbatch_sample_ids
from megatron.core.errors import ConfigError


def global_ids(consumed, batch, micro, dp_size):
    """Ids of the global batch in order: microbatch by microbatch, rank by rank."""
    per_rank = [microbatch_sample_ids(consumed, batch, micro, rank, dp_size) for rank in range(dp_size)]
    assert {len(microbatches) for microbatches in per_rank} == {batch // (micro * dp_size)}
    return [i for microbatches in zip(*per_rank, strict=True) for microbatch in microbatches for i in microbatch]


@given(consumed=st.integers(0, 10**12), microbatches=st.integers(1, 4), micro=st.integers(1, 4), dp_size=st.integers(1, 6))
def test_the_ranks_read_each_sample_of_the_global_batch_once_in_order(consumed, microbatches, micro, dp_size):
    batch = microbatches * micro * dp_size
    assert global_ids(consumed, batch, micro, dp_size) == list(range(consumed, consumed + batch))


def test_a_rank_reads_the_samples_of_megatrons_sampler():
    assert microbatch_sample_ids(24, 12, 2, 1, 3) == [[26, 27], [32, 33]]


def test_a_change_of_layout_neither_skips_nor_repeats():
    layouts = [(1, 2), (2, 2), (3, 1), (4, 1), (2, 1), (3, 2)]  # (dp, micro batch) of steps 0..5, global batch 12
    seen = [i for step, (dp, micro) in enumerate(layouts) for i in global_ids(12 * step, 12, micro, dp)]
    assert seen == list(range(72))


def test_three_ranks_on_ten_samples_have_equal_steps_and_counters():
    """10 samples per epoch, micro batch 2, 3 ranks: one microbatch each, 6 samples consumed, the same epoch on every rank."""
    epochs = [{i // 10 for i in microbatch_sample_ids(0, 6, 2, rank, 3)[0]} for rank in range(3)]
    assert [len(microbatch_sample_ids(0, 6, 2, rank, 3)) for rank in range(3)] == [1, 1, 1]
    assert epochs == [{0}] * 3
    first_epoch = [i for step in range(2) for i in global_ids(6 * step, 6, 2, 3) if i < 10]
    assert sorted(first_epoch) == list(range(10))


@pytest.mark.parametrize(("batch", "micro", "dp"), [(8, 3, 1), (8, 2, 3), (7, 2, 1)])
def test_batches_that_do_not_divide_are_refused(batch, micro, dp):
    with pytest.raises(ConfigError, match="not a multiple"):
        microbatch_sample_ids(0, batch, micro, 0, dp)
