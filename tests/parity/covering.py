"""A few rows of a table of options that contain every pair of values of two options. Pure.

A row gives each axis one of its values. `allowed` says of a row, whole or in part, whether it breaks a rule (of what is given so
far); pairs that no allowed row contains are left out.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]
Pair = frozenset[tuple[str, Any]]


def covering_rows(axes: Axes, allowed: Callable[[Row], bool]) -> list[Row]:
    """Rows that together contain every allowed pair (greedy: each begins with a pair that is missing and takes in what it can)."""
    missing = dict.fromkeys(possible_pairs(axes, allowed))
    rows: list[Row] = []
    while missing:
        row = _grow(dict(next(iter(missing))), axes, allowed, missing)
        for pair in pairs_of(row):
            missing.pop(pair, None)
        rows.append(row)
    return rows


def possible_pairs(axes: Axes, allowed: Callable[[Row], bool]) -> list[Pair]:
    """Every pair of values of two axes that some allowed row contains."""
    found = []
    for first, second in itertools.combinations(axes, 2):
        for one, two in itertools.product(axes[first], axes[second]):
            if complete({first: one, second: two}, axes, allowed) is not None:
                found.append(frozenset([(first, one), (second, two)]))
    return found


def pairs_of(row: Row) -> set[Pair]:
    """Every pair of a row."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def complete(row: Row, axes: Axes, allowed: Callable[[Row], bool]) -> Row | None:
    """The first allowed row that contains this one."""
    if not allowed(row):
        return None
    axis = next((name for name in axes if name not in row), None)
    if axis is None:
        return row
    for value in axes[axis]:
        whole = complete({**row, axis: value}, axes, allowed)
        if whole is not None:
            return whole
    return None


def _grow(row: Row, axes: Axes, allowed: Callable[[Row], bool], missing: Mapping[Pair, None]) -> Row:
    """Give each free axis the value with the most missing pairs that can still be completed."""
    for axis in (name for name in axes if name not in row):

        gains = {value: sum(frozenset([(axis, value), item]) in missing for item in row.items()) for value in axes[axis]}
        for value in sorted(axes[axis], key=gains.__getitem__, reverse=True):
            if complete({**row, axis: value}, axes, allowed) is not None:
                row = {**row, axis: value}
                break
    return row
