"""Sample order: equal to plain sequential oracles, whatever the documents, weights and sizes."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.index_helpers import (
    blending_indices,
    build_sample_index,
    epoch_order,
    megatron_order,
    normalize_weights,
    parse_split,
    split_range,
)
from megatron.core.errors import ConfigError, DataError


def greedy(weights, size, limits=None):
    """The blending rule, one sample at a time: the set furthest behind its share is next, the first of equals."""
    weights = normalize_weights(normalize_weights(weights))
    counts = [0] * len(weights)
    drawn = []
    for i in range(size):
        open_sets = [d for d, w in enumerate(weights) if w > 0 and (limits is None or counts[d] < limits[d])]
        best = max(open_sets, key=lambda d: (weights[d] * max(i, 1) - counts[d], -d))
        drawn.append((best, counts[best]))
        counts[best] += 1
    return drawn


def pairs(indices):
    return list(zip(indices[0].tolist(), indices[1].tolist(), strict=True))


def stream_of(lengths, index):
    """The token stream as (document, offset) pairs."""
    return [(int(d), k) for d in index.document_index for k in range(lengths[d])]


def sample_tokens(lengths, index, row):
    """Sample `row` as (document, offset) pairs, walked document by document."""
    (position, offset), (last, end) = index.sample_index[row : row + 2].tolist()
    tokens = []
    while (position, offset) != (last, end):
        document = int(index.document_index[position])
        if offset < lengths[document]:
            tokens.append((document, offset))
            offset += 1
        else:
            position, offset = position + 1, 0
    return [*tokens, (int(index.document_index[last]), end)]


weight_lists = st.lists(
    st.one_of(st.integers(0, 20).map(float), st.floats(1e-6, 1.0, allow_nan=False)), min_size=1, max_size=8
).filter(lambda w: sum(w) > 0)


@settings(max_examples=200, deadline=None)
@given(weights=weight_lists, size=st.integers(1, 1500))
def test_blend_equals_the_sequential_rule_and_keeps_each_set_in_order(weights, size):
    drawn = pairs(blending_indices(weights, size))
    assert drawn == greedy(weights, size)
    counts = np.bincount([d for d, _ in drawn], minlength=len(weights))
    assert counts.sum() == size
    for d in range(len(weights)):
        assert [k for dataset, k in drawn if dataset == d] == list(range(counts[d]))


@pytest.mark.parametrize(
    "weights",
    [[0.7, 0.3], [1 / 3] * 3, [1e-5, 0.4, 0.6 - 1e-5], [1e-6, 1.0], [1.0 / k for k in range(1, 30)], [0.0, 5, 0.0, 3, 1e-4]],
)
def test_blends_computed_in_blocks_equal_the_sequential_rule(weights):
    size = 20_000  # 39 blocks
    assert pairs(blending_indices(weights, size)) == greedy(weights, size)


@settings(max_examples=50, deadline=None)
@given(limits=st.lists(st.integers(0, 300), min_size=1, max_size=6).filter(lambda c: sum(c) > 0), data=st.data())
def test_limits_are_never_exceeded_and_everything_is_drawn(limits, data):
    size = data.draw(st.integers(1, sum(limits)))
    drawn = pairs(blending_indices([float(c) for c in limits], size, limits))
    assert drawn == greedy([float(c) for c in limits], size, limits)
    assert all(k < limits[d] for d, k in drawn)


@pytest.mark.parametrize(
    ("weights", "size", "counts"),
    [
        ([0.0005, 0.9995], 100, [1, 99]),
        ([0.5, 0.3, 0.2], 7, [3, 2, 2]),
        ([1 / 3, 1 / 3, 1 / 3], 100, [34, 33, 33]),
        ([0.0, 1.0], 50, [0, 50]),
        ([1.0, 0.0], 50, [50, 0]),
        ([2, 6], 100, [25, 75]),
    ],
)
def test_blend_counts(weights, size, counts):
    assert np.bincount(blending_indices(weights, size)[0], minlength=len(weights)).tolist() == counts


def test_integer_weights_are_their_shares():
    assert pairs(blending_indices([2, 6], 1000)) == pairs(blending_indices([0.25, 0.75], 1000))


@pytest.mark.parametrize("weights", [[-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0], [0.0, 0.0], []])
def test_unusable_weights_are_refused(weights):
    with pytest.raises(ConfigError, match="weights"):
        blending_indices(weights, 10)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(lambda x: sum(x) > 1),
    seq_length=st.integers(1, 40),
    num_samples=st.one_of(st.none(), st.integers(1, 100)),
    seed=st.integers(0, 2**32 - 1),
)
def test_megatron_order_cuts_the_stream_at_multiples_of_the_sequence_length(lengths, seq_length, num_samples, seed):
    lengths = np.array(lengths, dtype=np.int32)
    documents = np.arange(len(lengths))
    index = megatron_order(lengths, documents, seq_length=seq_length, num_samples=num_samples, seed=seed)
    stream = stream_of(lengths, index)
    assert len(index.sample_index) - 1 == (len(stream) - 1) // seq_length == index.num_samples >= (num_samples or 0)
    for row in range(index.num_samples):
        assert sample_tokens(lengths, index, row) == stream[row * seq_length : (row + 1) * seq_length + 1]
    assert sorted(index.shuffle_index.tolist()) == list(range(index.num_samples))
    epochs, rest = divmod(len(index.document_index), len(documents))
    assert rest == 0
    assert np.bincount(index.document_index, minlength=len(lengths)).tolist() == [epochs] * len(lengths)
    if num_samples is not None and epochs > 1:
        assert ((epochs - 1) * int(lengths.sum()) - 1) // seq_length < num_samples


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(lambda x: sum(x) > 1),
    seq_length=st.integers(1, 40),
    num_samples=st.integers(1, 200),
)
def test_epoch_order_is_a_permutation_per_epoch_and_does_not_depend_on_the_number_asked_for(lengths, seq_length, num_samples):
    lengths = np.array(lengths, dtype=np.int32)
    documents = np.arange(len(lengths))
    index = epoch_order(lengths, documents, seq_length=seq_length, num_samples=num_samples, seed=7)
    per_epoch = len(index.sample_index) - 1
    assert per_epoch == max(1, (int(lengths.sum()) - 1) // seq_length)
    assert index.num_samples >= num_samples
    for start in range(0, index.num_samples, per_epoch):
        assert sorted(index.shuffle_index[start : start + per_epoch].tolist()) == list(range(per_epoch))
    longer = epoch_order(lengths, documents, seq_length=seq_length, num_samples=num_samples + 50, seed=7)
    assert longer.shuffle_index[: index.num_samples].tolist() == index.shuffle_index.tolist()
    assert longer.document_index.tolist() == index.document_index.tolist()


def test_only_the_documents_of_the_split_are_used():
    lengths = np.array([5, 6, 7, 8, 9, 10], dtype=np.int32)
    for order in (megatron_order, epoch_order):
        index = order(lengths, np.arange(2, 4), seq_length=3, num_samples=12, seed=1)
        assert set(index.document_index.tolist()) == {2, 3}


def test_sample_index_crosses_32_bit_token_positions():
    lengths = np.full(3, 2**30, dtype=np.int32)
    index = build_sample_index(lengths, np.array([0, 1, 2, 0, 1]), 2**29, 9)
    assert index.tolist() == [[k // 2, k % 2 * 2**29] for k in range(10)]


def test_a_stream_without_two_tokens_is_refused():
    with pytest.raises(DataError, match="at least 2 tokens"):
        epoch_order(np.array([1, 0]), np.arange(2), seq_length=4, num_samples=1, seed=1)


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("969,30,1", [(0, 62), (62, 64), (64, 64)]),
        ("100,0,0", [(0, 64), None, None]),
        ("1", [(0, 64), None, None]),
        ("1,1", [(0, 32), (32, 64), None]),
        ("0, 0, 1", [None, None, (0, 64)]),
        ("0.5,0.25,0.25", [(0, 32), (32, 48), (48, 64)]),
    ],
)
def test_split_ranges_of_64_documents(text, ranges):
    assert [None if part is None else split_range(part, 64) for part in parse_split(text)] == ranges


@given(shares=st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), count=st.integers(0, 10_000))
def test_splits_cover_all_documents_once(shares, count):
    ranges = [split_range(part, count) for part in parse_split(",".join(map(str, shares))) if part is not None]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1", "inf", "1;2"])
def test_splits_that_mean_nothing_are_refused(text):
    with pytest.raises(ConfigError, match="split"):
        parse_split(text)
