"""Attention over the cache sees what attention over the whole row sees, for rows of any length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.inference.kv_cache import KVCache

HEADS, SIZE = 2, 3


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[s_q, b, h, d] from float64 of the same layout; mask: bool [b, 1, s_q, s_k]."""
    scores = torch.einsum("qbhd,kbhd->bhqk", query, keys).masked_fill(~mask, float("-inf"))
    return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), values)


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), steps=st.integers(0, 4), data=st.data())
def test_cached_attention_equals_attention_over_the_whole_row(lengths: list[int], steps: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    batch, longest = len(lengths), max(lengths)
    full = torch.randn(3, longest + steps, batch, HEADS, SIZE, generator=generator, dtype=torch.float64)  # q, k, v by position
    causal = torch.ones(longest + steps, longest + steps, dtype=torch.bool).tril()
    expected = attend(*full, causal.expand(batch, 1, -1, -1))
    cache = KVCache(longest + steps)
    garbage = torch.full((3, longest, batch, HEADS, SIZE), 1e3, dtype=torch.float64)  # what a padded prompt holds behind its end
    for row, length in enumerate(lengths):
        garbage[:, :length, row] = full[:, :length, row]
    cache.begin(torch.arange(longest).expand(batch, -1))
    out = attend(garbage[0], *cache.update(0, garbage[1], garbage[2]))
    for row, length in enumerate(lengths):
        torch.testing.assert_close(out[:length, row], expected[:length, row], rtol=1e-12, atol=1e-12)
    rows = torch.arange(batch)
    for step in range(steps):
        at = torch.tensor(lengths) + step
        cache.begin(at.unsqueeze(-1))
        new = full[:, at, rows].unsqueeze(1)
        out = attend(new[0], *cache.update(0, new[1], new[2]))
        torch.testing.assert_close(out[0], expected[at, rows], rtol=1e-12, atol=1e-12)


def test_layers_are_kept_apart() -> None:
    cache = KVCache(2)
    cache.begin(torch.zeros(1, 1, dtype=torch.int64))
    one, two = torch.full((1, 1, 1, 1), 1.0), torch.full((1, 1, 1, 1), 2.0)
    assert cache.update(0, one, one)[0].item() == 1.0
    assert cache.update(1, two, two)[0].item() == 2.0
    cache.begin(torch.ones(1, 1, dtype=torch.int64))
    assert cache.update(0, two, two)[0].flatten().tolist() == [1.0, 2.0]


def test_a_position_beyond_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="position 4 is outside of the cache, which has 4 slots per row"):
        KVCache(4).begin(torch.tensor([[4]]))
