"""Tokens are drawn from the distribution that temperature, top-k and top-p leave, each row from its own stream."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.errors import ConfigError
from megatron.core.inference.sampling import RowStreams, Sampling, choose, kept_probabilities

PROBABILITIES = [0.1, 0.4, 0.2, 0.3]
LOGITS = torch.tensor([PROBABILITIES]).log()


def kept(sampling: Sampling, logits: torch.Tensor = LOGITS) -> dict[int, float]:
    """Normalised probability of each kept token."""
    probabilities, ids = kept_probabilities(logits, sampling)
    total = float(probabilities.sum())
    return {int(i): float(p) / total for p, i in zip(probabilities[0], ids[0], strict=True) if p > 0}


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    assert choose(torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 9.0]]), Sampling(greedy=True)).tolist() == [1, 2]
    assert choose(LOGITS, Sampling(temperature=0.0)).tolist() == [1]


def test_top_k_keeps_the_k_most_probable() -> None:
    assert kept(Sampling(top_k=2)) == pytest.approx({1: 0.4 / 0.7, 3: 0.3 / 0.7})
    assert set(kept(Sampling(top_k=9))) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert kept(Sampling(top_p=0.39)) == {1: 1.0}
    assert set(kept(Sampling(top_p=0.41))) == {1, 3}
    assert set(kept(Sampling(top_p=0.95))) == {0, 1, 2, 3}
    assert kept(Sampling(top_p=1e-9)) == {1: 1.0}


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    assert set(kept(Sampling(top_k=2, top_p=0.56))) == {1}  # 0.4 / 0.7 = 0.571
    assert set(kept(Sampling(top_k=2, top_p=0.58))) == {1, 3}


def test_temperature_divides_the_logits() -> None:
    squares = [p**2 for p in PROBABILITIES]
    assert kept(Sampling(temperature=0.5)) == pytest.approx({i: s / sum(squares) for i, s in enumerate(squares)})


@settings(deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=20),
    top_k=st.integers(0, 21),
    top_p=st.floats(0.01, 1.0),
    temperature=st.floats(0.1, 3.0),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_a_drawn_token_is_always_a_kept_one(
    logits: list[float], top_k: int, top_p: float, temperature: float, uniform: float
) -> None:
    sampling = Sampling(top_k=top_k, top_p=top_p, temperature=temperature)
    row = torch.tensor([logits])
    (token,) = choose(row, sampling, torch.tensor([uniform], dtype=torch.float64)).tolist()
    assert token in kept(sampling, row)
    if top_k:
        assert sum(other > logits[token] for other in row[0].tolist()) < top_k


def test_draws_follow_the_probabilities() -> None:
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    tokens = choose(LOGITS.expand(1000, -1), Sampling(), uniforms)
    assert [int((tokens == i).sum()) for i in range(4)] == [100, 400, 200, 300]


def test_a_forbidden_token_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0]])
    for uniform in (0.0, 0.4999, 0.5001, 1 - 1e-16):
        assert choose(logits, Sampling(), torch.tensor([uniform], dtype=torch.float64)).item() in (1, 3)


def test_a_rows_stream_depends_on_its_id_and_the_seed_alone() -> None:
    together, alone = RowStreams(7, [0, 1, 2]), RowStreams(7, [2])
    for _ in range(3):
        assert together.uniform()[2] == alone.uniform()[0]
    other = RowStreams(8, [0, 1, 2]).uniform()
    assert len({*other.tolist(), *RowStreams(7, [0, 1, 2]).uniform().tolist()}) == 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0 or more, got -1.0"),
        ({"temperature": math.nan}, "temperature must be 0 or more, got nan"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"seed": -2}, "seed must be 0 or more"),
    ],
)
def test_wrong_options_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**fields)
