"""Overlap changes no bit in any combination of its options; plain, distributed and single-process optimizers agree."""

import pytest

from tests.harness.distributed import run_distributed
from tests.harness.dp_matrix import ALL, BUCKET_SIZES, compare_combinations, compare_engines, covering_pairs, pairs

FEW = covering_pairs()


def assert_no_difference(size, combinations, bucket_size):
    for found in run_distributed(compare_combinations, size, combinations, bucket_size, timeout=600):
        assert {combination: texts for combination, texts in found.items() if texts} == {}


def test_the_few_hold_every_pair_of_values():
    assert set().union(*map(pairs, FEW)) == set().union(*map(pairs, ALL))
    assert len(FEW) < len(ALL) / 4


def test_pairs_of_overlap_options_are_bit_equal_to_no_overlap_on_two_ranks():
    assert_no_difference(2, FEW, 150)


@pytest.mark.slow
@pytest.mark.parametrize("bucket_size", BUCKET_SIZES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_combination_is_bit_equal_to_no_overlap(size, bucket_size):
    assert_no_difference(size, ALL, bucket_size)


def assert_agree(size, bucket_size, accumulate):
    for rank in run_distributed(compare_engines, size, bucket_size, accumulate):
        assert rank.plain_differs == []
        assert rank.worst < 1e-12, rank


@pytest.mark.parametrize(("size", "bucket_size", "accumulate"), [(1, 150, 4), (2, 1, 1), (2, None, 4), (3, 150, 1)])
def test_plain_and_distributed_optimizers_agree_with_plain_torch(size, bucket_size, accumulate):
    assert_agree(size, bucket_size, accumulate)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("bucket_size", BUCKET_SIZES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_optimizers_agree_on_every_size(size, bucket_size, accumulate):
    assert_agree(size, bucket_size, accumulate)
