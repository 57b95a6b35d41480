"""Linear layers of several experts over one tensor of rows: rows [m, in] in the order of experts -> [m, out].

    loop       one matrix product per expert, on its run of rows; any device and dtype
    grouped    all experts in one kernel (torch's grouped matrix product), bf16 on CUDA

Weights stay parameters of their own. DistributedDataParallel puts those of neighbouring experts at equal distances into its buffer,
so the grouped product reads them there; only where they lie elsewhere are they copied together.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron.core.tensor_parallel.deferred_grads import active_deferral
from megatron.core.tensor_parallel.layers import add_weight_grad, weight_grad, writes_main_grad

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def grouped_problem(device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> str | None:
    """Why the grouped product cannot be used for matrices of these sizes; None if it can."""
    if device.type != "cuda":
        return f"the grouped matrix product needs CUDA, the experts are on {device.type}"
    if dtype != torch.bfloat16:
        return f"the grouped matrix product is for bf16, the experts are {dtype}"
    if _grouped_mm is None or torch.cuda.get_device_capability(device) < (8, 0):
        return "the device or this torch has no grouped matrix product"
    if any(size % 8 for size in sizes):
        return f"the grouped matrix product needs sizes that are multiples of 8, got {', '.join(map(str, sizes))}"
    return None


def grouped_linear(rows: torch.Tensor, counts: Sequence[int], weights: Sequence[torch.Tensor], *, grouped: bool) -> torch.Tensor:
    """rows: [m, in], counts[e] of them for expert e, whose weight is [out, in] -> [m, out]."""
    fused = tuple(writes_main_grad(weight, rows) for weight in weights)
    return _GroupedLinear.apply(rows, tuple(counts), fused, grouped, *weights)  # type: ignore[no-untyped-call]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, counts: tuple[int, ...], fused: tuple[bool, ...], grouped: bool, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, *weights)
        ctx.parameters = weights  # with recomputation the saved weights are other tensor objects, which know no main_grad
        ctx.counts, ctx.fused, ctx.grouped = counts, fused, grouped
        if grouped:
            return _grouped_mm(rows, stacked(weights).transpose(1, 2), offs=_ends(counts, rows.device))
        out = rows.new_empty((rows.size(0), weights[0].size(0)))
        for run, weight in zip(_runs(counts), weights, strict=True):
            torch.mm(rows[run], weight.t(), out=out[run])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = None
        if ctx.needs_input_grad[0]:
            if ctx.grouped:
                grad_rows = _grouped_mm(grad, stacked(weights), offs=_ends(ctx.counts, grad.device))
            else:
                grad_rows = torch.empty_like(rows)
                for run, weight in zip(_runs(ctx.counts), weights, strict=True):
                    torch.mm(grad[run], weight, out=grad_rows[run])
        return grad_rows, None, None, None, *_weight_grads(ctx, grad, rows)


def _weight_grads(ctx: Any, grad: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor | None]:
    """Of each expert: its gradient; None where `main_grad` has it, or will have, or the expert had no rows (it is zero then)."""
    needed = ctx.needs_input_grad[4:]
    deferral = active_deferral()
    products: Any = None
    if ctx.grouped and any(needed) and deferral is None:
        products = _grouped_mm(grad.t(), rows, offs=_ends(ctx.counts, grad.device))
    grads: list[torch.Tensor | None] = [None] * len(needed)
    for index, (run, param) in enumerate(zip(_runs(ctx.counts), ctx.parameters, strict=True)):
        if not needed[index]:
            continue
        if deferral is not None and hasattr(param, "main_grad_done"):
            deferral.add(param, functools.partial(_later, grad[run], rows[run], param, ctx.fused[index]))
        elif run.start == run.stop:
            grads[index] = None if hasattr(param, "main_grad") else torch.zeros_like(param)
        elif products is not None:
            grads[index] = add_weight_grad(products[index], param, ctx.fused[index])
        else:
            grads[index] = weight_grad(grad[run], rows[run], param, ctx.fused[index])
    return grads


def _later(grad: torch.Tensor, rows: torch.Tensor, param: torch.Tensor, fused: bool) -> None:
    found = weight_grad(grad, rows, param, fused) if rows.size(0) else None
    if found is not None:
        param.grad = found if param.grad is None else param.grad + found


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """[E, out, in]: a view where the weights lie at equal distances in one piece of memory, else a copy."""
    first = weights[0]
    gaps = {after.data_ptr() - before.data_ptr() for before, after in itertools.pairwise(weights)}
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    gap = next(iter(gaps), first.nbytes)
    if len(gaps) > 1 or len(storages) > 1 or gap < first.nbytes or gap % 16 or not first.is_contiguous():
        return torch.stack(list(weights))
    return first.detach().as_strided((len(weights), *first.shape), (gap // first.itemsize, first.size(1), 1))


def _runs(counts: Sequence[int]) -> list[slice]:
    ends = list(itertools.accumulate(counts))
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _ends(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=device)
