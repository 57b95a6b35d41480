"""The spread of the parity matrix contains every value of every axis and every allowed pair; so does that of any small table."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parity.covering import Row, complete, covering_rows, pairs_of, possible_pairs
from tests.parity.matrix import AXES, Case, allowed, spread


def test_the_spread_covers_every_value_and_every_allowed_pair() -> None:
    rows = spread()
    assert all(allowed(row) and row.keys() == AXES.keys() for row in rows)
    covered = set().union(*map(pairs_of, rows))
    wanted = set(possible_pairs(AXES, allowed))
    assert wanted <= covered
    for axis, values in AXES.items():
        assert {row[axis] for row in rows} == set(values)
    assert len(rows) < 60 and len({Case(row).key for row in rows}) == len(rows)


def test_only_pairs_that_break_a_rule_are_left_out() -> None:
    left_out = {
        frozenset([(first, one), (second, two)])
        for first, second in itertools.combinations(AXES, 2)
        for one, two in itertools.product(AXES[first], AXES[second])
    } - set(possible_pairs(AXES, allowed))
    assert left_out == {frozenset([("tp", 1), ("sequence_parallel", True)]), frozenset([("pipeline", "zb_v"), ("tied", True)])}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.data())
def test_any_table_is_covered(sizes: list[int], data: st.DataObject) -> None:
    axes = {f"axis {index}": tuple(range(size)) for index, size in enumerate(sizes)}
    everything = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    forbidden = data.draw(st.lists(st.sampled_from(everything), max_size=4))

    def legal(row: Row) -> bool:
        return not any(all(row.get(axis) == value for axis, value in bad.items()) for bad in forbidden)

    wanted = set().union(*[pairs_of(row) for row in everything if legal(row)])
    rows = covering_rows(axes, legal)
    assert all(legal(row) for row in rows)
    assert set().union(*map(pairs_of, rows)) == wanted


def test_a_row_that_cannot_be_completed_is_none() -> None:
    assert complete({"a": 1}, {"a": (1,), "b": (1, 2)}, lambda row: "b" not in row) is None


@pytest.mark.parametrize("rows", [spread()])
def test_each_number_of_ranks_has_cases(rows: list[Row]) -> None:
    assert {Case(row).ranks for row in rows} == {1, 2, 4}
