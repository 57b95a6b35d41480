"""RowPlan: rows of any routing cover it once, come back to their tokens, and their gradients are those of the plain formula."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from megatron.core.transformer.moe.row_plan import combine_rows, plan_rows, take_rows, take_weights


@st.composite
def routings(draw: st.DrawFn) -> torch.Tensor:
    """bool [n, E]: any routing, also of no token, and with experts and tokens that have nothing."""
    n, experts = draw(st.integers(0, 7)), draw(st.integers(1, 5))
    return torch.tensor([[draw(st.booleans()) for _ in range(experts)] for _ in range(n)], dtype=torch.bool).view(n, experts)


@settings(max_examples=60, deadline=None)
@given(chosen=routings(), spare=st.integers(-1, 2), known=st.booleans())
def test_rows_cover_any_routing_once_and_sums_come_home(chosen: torch.Tensor, spare: int, known: bool) -> None:
    n, experts = chosen.shape
    most = int(chosen.sum(1).max()) if n else 0
    largest = int(chosen.sum(0).max()) if n else 0
    pad_to = None if spare < 0 else min(largest + spare, n)
    plan = plan_rows(chosen, most=most if known else None, pad_to=pad_to)
    real = [(int(t), int(e)) for t, e in zip(plan.tokens, plan.experts, strict=True) if t < n]
    assert sorted(real) == [tuple(pair) for pair in chosen.nonzero().tolist()]
    assert plan.experts.tolist() == sorted(plan.experts.tolist())
    assert plan.counts.tolist() == ([pad_to] * experts if pad_to is not None else chosen.sum(0).tolist())

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, 3, dtype=torch.float64, generator=generator).requires_grad_()
    probs = (torch.rand(n, experts, dtype=torch.float64, generator=generator) * chosen).requires_grad_()
    factor = torch.randn(experts, 3, dtype=torch.float64, generator=generator)  # a toy expert: x -> factor * x
    out = combine_rows(take_rows(hidden, plan) * factor[plan.experts], take_weights(probs, plan), plan)
    expected = hidden * ((probs * chosen) @ factor)
    torch.testing.assert_close(out, expected)
    seed = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    for got, wanted in zip(
        torch.autograd.grad((out * seed).sum(), (hidden, probs)), torch.autograd.grad((expected * seed).sum(), (hidden, probs)), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_a_complete_routing_needs_no_zero_row() -> None:
    chosen = torch.tensor([[True, False, True], [False, True, True]])
    plan = plan_rows(chosen, most=2, complete=True)
    assert plan.tokens.tolist() == [0, 1, 0, 1] and plan.slots.tolist() == [[0, 2], [1, 3]] and plan.complete
