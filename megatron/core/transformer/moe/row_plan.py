"""RowPlan: from a routing to the rows that experts compute, and back. Pure.

    chosen [n, E]      token 0: experts 1 2      token 1: experts 0 1
    rows               expert 0: token 1 | expert 1: token 0, token 1 | expert 2: token 0      tokens [1 0 1 0]
    slots [n, k]       token 0: rows 1 3         token 1: rows 0 2

A token's rows are added up in the order of its experts, so that the sum depends on no layout, and no sum needs atomic operations.
"""

import dataclasses
from typing import Any

import torch
from torch.autograd.function import once_differentiable


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Rows in the order of experts, inside an expert in that of tokens.

    tokens: int64 [m], the token of each row; n for a row that is padding. experts: int64 [m], its expert.
    slots: int64 [n, most rows of a token], the rows of each token, ascending; m where there is none.
    counts: int64 [E], rows of each expert. padded: some rows are padding. complete: every slot is a row.
    """

    tokens: torch.Tensor
    experts: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor
    padded: bool
    complete: bool


def plan_rows(chosen: torch.Tensor, *, most: int | None, pad_to: int | None = None, complete: bool = False) -> RowPlan:
    """The plan of a routing.

    chosen: bool [n, E]. most: bound on the experts of a token; None = found here. pad_to: give each expert this many rows, at
    least as many as it was chosen for. complete: every token has `most` experts.
    """
    (n, experts), device = chosen.shape, chosen.device
    if pad_to is None:
        expert_of, token_of = chosen.t().nonzero(as_tuple=True)
        counts, rows = chosen.sum(0), token_of.numel()
        row_number = torch.arange(rows, device=device)
        real_tokens, real_experts = token_of, expert_of
    else:
        first = torch.argsort((~chosen).to(torch.uint8), dim=0, stable=True)[:pad_to].t()
        real = torch.arange(pad_to, device=device) < chosen.sum(0)[:, None]
        token_of, rows = torch.where(real, first, n).flatten(), experts * pad_to
        expert_of = torch.arange(experts, device=device).repeat_interleave(pad_to)
        counts = torch.full((experts,), pad_to, device=device)
        row_number = real.flatten().nonzero()[:, 0]
        real_tokens, real_experts = token_of[row_number], expert_of[row_number]
    number = torch.full((n, experts), rows, dtype=torch.int64, device=device)
    number[real_tokens, real_experts] = row_number
    width = most if most is not None else int(chosen.sum(1).max()) if n else 0
    slots = number.sort(dim=1).values[:, : min(width, experts)].contiguous()
    return RowPlan(token_of, expert_of, slots, counts, pad_to is not None, complete and pad_to is None)


def take_rows(hidden: torch.Tensor, plan: RowPlan) -> torch.Tensor:
    """hidden: [n, h] -> [m, h], zeros where a row is padding."""
    return _TakeRows.apply(hidden, plan)  # type: ignore[no-untyped-call]


def take_weights(probs: torch.Tensor, plan: RowPlan) -> torch.Tensor:
    """probs: [n, E] -> the weight of each row, [m], zero where it is padding."""
    if not plan.padded:
        return probs[plan.tokens, plan.experts]
    return _with_zero_row(probs)[plan.tokens, plan.experts]


def combine_rows(rows: torch.Tensor, weights: torch.Tensor, plan: RowPlan) -> torch.Tensor:
    """rows: [m, h], weights: [m] -> [n, h], the weighted sum of each token's rows; computed in the wider of both dtypes."""
    return _CombineRows.apply(rows, weights, plan)  # type: ignore[no-untyped-call]


def _with_zero_row(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros((1, *tensor.shape[1:]))])


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        ctx.plan = plan
        return (_with_zero_row(hidden) if plan.padded else hidden)[plan.tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        plan: RowPlan = ctx.plan
        whole = grad if plan.complete else _with_zero_row(grad)
        return whole[plan.slots].sum(1), None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.plan = plan
        dtype = torch.promote_types(rows.dtype, weights.dtype)
        total = rows.new_zeros((plan.slots.size(0), rows.size(1)), dtype=dtype)
        if not plan.complete:
            rows, weights = _with_zero_row(rows), _with_zero_row(weights)
        for slot in plan.slots.unbind(1):
            total.addcmul_(rows[slot].to(dtype), weights[slot][:, None].to(dtype))
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weights = ctx.saved_tensors
        plan: RowPlan = ctx.plan
        wide = torch.promote_types(rows.dtype, weights.dtype)
        of_rows = (_with_zero_row(grad) if plan.padded else grad)[plan.tokens].to(wide)
        return (of_rows * weights[:, None]).to(rows.dtype), (of_rows * rows).sum(1).to(weights.dtype), None
