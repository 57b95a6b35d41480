"""Losses, gradient norm, every gradient and every updated weight of a spread of layouts and features equal plain torch's."""

import pytest

from tests.parity.matrix import Case, spread
from tests.parity.run import run_cases

CASES = [Case(row) for row in spread()]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_pair_of_options_equals_the_reference(world_size: int) -> None:
    """Two steps of AdamW with clipping; fp64 to 1e-10, fp32 to its rounding bound."""
    found = run_cases([case for case in CASES if case.ranks == world_size])
    bad = {key: deviation for key, deviations in found.items() for deviation in deviations if not deviation.good}
    assert not bad, "\n".join(f"{key}: {deviation}" for key, deviation in bad.items())
