"""Linear layers cut over tensor parallelism, and the vocabulary-parallel embedding (Shoeybi et al. 2019, section 3).

    Y = X A        column-parallel: A = [A_0 | A_1], rank i holds A_i and makes Y_i      weight [out/tp, in],  tp_dim 0
                   row-parallel:    A = [A_0 ; A_1], rank i holds A_i, Y = sum X_i A_i   weight [out, in/tp],  tp_dim 1
    embedding      rows of the vocabulary                                                weight [V/tp, h],     tp_dim 0

With sequence parallelism a column-parallel layer takes [s/tp, b, in] and gathers it, and a row-parallel layer gives [s/tp, b, out].
Sizes in constructors are those of the whole layer.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron.core.collectives import Group, group_rank, group_size
from megatron.core.errors import ConfigError
from megatron.core.param_init import ZEROS, InitRule, new_parameter
from megatron.core.param_meta import ParamMeta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.deferred_grads import active_deferral
from megatron.core.tensor_parallel.mappings import (
    Started,
    finished,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    start_all_reduce,
    start_gather_sequence,
    start_reduce_scatter_sequence,
)


def divide(size: int, pg_collection: ProcessGroupCollection, what: str) -> int:
    """One rank's part of a size. Raises ConfigError if it can't be divided."""
    ranks = pg_collection.size("tp")
    if size % ranks:
        raise ConfigError(f"tensor_model_parallel_size={ranks} does not divide {what}={size}; use a divisor of it")
    return size // ranks


def linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    copied_over: Group = None,
    sequence_parallel: bool = False,
    fuse_accumulation: bool = True,
) -> torch.Tensor:
    """y = x W^T + b: [..., in] -> [..., out].

    copied_over: the tp group when `hidden` is the same on all its ranks and W is a rank's part (column-parallel): then the
        gradient of `hidden` is summed over it, under the computation of the weight's gradient.
    sequence_parallel: `hidden` is [s/tp, b, in], a part of what is used; it is gathered here, and again in the backward.
    fuse_accumulation: put the weight's gradient straight into `weight.main_grad` where that is possible.
    """
    fused = fuse_accumulation and writes_main_grad(weight, hidden)
    if fused or group_size(copied_over) > 1 or (fuse_accumulation and hasattr(weight, "main_grad_done")):
        return _Linear.apply(hidden, weight, bias, copied_over, sequence_parallel, fused)  # type: ignore[no-untyped-call]
    return F.linear(hidden, weight, bias)


class _Linear(torch.autograd.Function):
    """`linear`, with the collectives of its backward under the matrix products. The same products and sums as autograd's."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: Group,
        sequence_parallel: bool,
        fused: bool,
    ) -> torch.Tensor:
        """[..., out]."""
        ctx.save_for_backward(hidden, weight)
        ctx.parameter = weight  # with recomputation the saved weight is another tensor object, which knows no main_grad
        ctx.group, ctx.sequence_parallel, ctx.fused = group, sequence_parallel, fused
        whole = finished(start_gather_sequence(hidden, group)) if sequence_parallel else hidden
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """grad: [..., out] -> gradients of `hidden`, `weight` (None where `main_grad` has it) and `bias`."""
        hidden, weight = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        deferral = active_deferral() if needs_weight and hasattr(ctx.parameter, "main_grad_done") else None
        if deferral is not None:
            needs_weight = False
            gathered_over = ctx.group if ctx.sequence_parallel else None
            arguments = (grad.flatten(0, -2), hidden, ctx.parameter, ctx.fused, gathered_over)
            deferral.add(ctx.parameter, functools.partial(_later_weight_grad, *arguments))
        gathering: Started = (hidden, None)
        if ctx.sequence_parallel and needs_weight:
            gathering = start_gather_sequence(hidden, ctx.group)
        rows = grad.flatten(0, -2)
        reducing = None
        if needs_hidden:
            product = (rows @ weight).view(*grad.shape[:-1], weight.size(1))
            if ctx.sequence_parallel:
                reducing = start_reduce_scatter_sequence(product, ctx.group)
            else:
                reducing = start_all_reduce(product, ctx.group)
        grad_weight = weight_grad(rows, finished(gathering).flatten(0, -2), ctx.parameter, ctx.fused) if needs_weight else None
        grad_bias = rows.sum(0) if needs_bias else None
        return None if reducing is None else finished(reducing), grad_weight, grad_bias, None, None, None


def weight_grad(rows: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, fused: bool) -> torch.Tensor | None:
    """rows^T inputs: returned, or put into `weight.main_grad` without a tensor and a pass of its own in between."""
    if not fused:
        return rows.t() @ inputs
    if weight.begin_main_grad():  # type: ignore[attr-defined]
        weight.main_grad.add_(rows.t() @ inputs)  # type: ignore[attr-defined]
    else:
        torch.mm(rows.t(), inputs, out=weight.main_grad)  # type: ignore[attr-defined]
    return None


def add_weight_grad(product: torch.Tensor, weight: torch.Tensor, fused: bool) -> torch.Tensor | None:
    """`weight_grad` where the product is there already."""
    if not fused:
        return product
    if weight.begin_main_grad():  # type: ignore[attr-defined]
        weight.main_grad.add_(product)  # type: ignore[attr-defined]
    else:
        weight.main_grad.copy_(product)  # type: ignore[attr-defined]
    return None


def _later_weight_grad(
    rows: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, fused: bool, gathered_over: Group
) -> None:
    """`weight_grad` as work for later. hidden: what is to be gathered over the tp group, or all of it (group None)."""
    inputs = finished(start_gather_sequence(hidden, gathered_over)) if gathered_over is not None else hidden
    grad = weight_grad(rows, inputs.flatten(0, -2), weight, fused)
    if grad is not None:
        weight.grad = grad if weight.grad is None else weight.grad + grad


def writes_main_grad(weight: torch.Tensor, hidden: torch.Tensor) -> bool:
    """Whether the weight is to be trained into a buffer of the computation's dtype. Compiled layers leave it to autograd."""
    return (
        weight.requires_grad
        and hasattr(weight, "begin_main_grad")
        and weight.main_grad.dtype == hidden.dtype == weight.dtype  # type: ignore[attr-defined]
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


class _ParallelLinear(torch.nn.Module):
    """Parameters of a linear layer: weight [output_size, input_size] of this rank, and bias [output_size]."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        rule: InitRule,
        bias: bool,
        weight_meta: ParamMeta,
        bias_meta: ParamMeta,
        dtype: torch.dtype,
        device: torch.device | None,
        group: Group,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = new_parameter((output_size, input_size), rule=rule, meta=weight_meta, dtype=dtype, device=device)
        if bias:
            self.bias = new_parameter((output_size,), rule=ZEROS, meta=bias_meta, dtype=dtype, device=device)
        else:
            self.register_parameter("bias", None)

    def extra_repr(self) -> str:
        """Sizes, for printing the model."""
        return f"in={self.weight.shape[1]}, out={self.weight.shape[0]}, bias={self.bias is not None}"


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer whose output features are cut over tensor parallelism: [..., in] -> [..., out/tp].

    blocks: equal parts of the output that are each cut for themselves (2 for [gate; up]).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        rule: InitRule,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | None,
        pg_collection: ProcessGroupCollection,
        sequence_parallel: bool = False,
        blocks: int = 1,
        weight_meta: ParamMeta | None = None,
    ) -> None:
        super().__init__(
            input_size,
            divide(output_size // blocks, pg_collection, "output features") * blocks,
            rule=rule,
            bias=bias,
            weight_meta=weight_meta or ParamMeta(tp_dim=0, tp_blocks=blocks),
            bias_meta=ParamMeta(tp_dim=0, tp_blocks=blocks),
            dtype=dtype,
            device=device,
            group=pg_collection.tp,
            sequence_parallel=sequence_parallel,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [s, b, in], [s/tp, b, in] with sequence parallelism -> [s, b, out/tp]."""
        return linear(
            hidden, self.weight, self.bias, copied_over=self.group, sequence_parallel=self.sequence_parallel
        )


class RowParallelLinear(_ParallelLinear):
    """Linear layer whose input features are cut over tensor parallelism: [..., in/tp] -> [..., out], bias added once."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        rule: InitRule,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | None,
        pg_collection: ProcessGroupCollection,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(
            divide(input_size, pg_collection, "input features"),
            output_size,
            rule=rule,
            bias=bias,
            weight_meta=ParamMeta(tp_dim=1),
            bias_meta=ParamMeta(tp_partial_grad=sequence_parallel),
            dtype=dtype,
            device=device,
            group=pg_collection.tp,
            sequence_parallel=sequence_parallel,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [s, b, in/tp] -> [s, b, out], [s/tp, b, out] with sequence parallelism."""
        if group_size(self.group) == 1:
            return linear(hidden, self.weight, self.bias)
        part = linear(hidden, self.weight)
        if self.sequence_parallel:
            total = reduce_scatter_to_sequence_parallel_region(part, self.group)
        else:
            total = reduce_from_tensor_model_parallel_region(part, self.group)
        return total if self.bias is None else total + self.bias


class VocabParallelEmbedding(torch.nn.Module):
    """Word embedding, padded to `padded_size` rows, of which the first `vocab_size` are the true vocabulary.

    shared: the first and the last pipeline stage hold copies of it.
    """

    def __init__(
        self,
        vocab_size: int,
        padded_size: int,
        hidden_size: int,
        *,
        rule: InitRule,
        dtype: torch.dtype,
        device: torch.device | None,
        pg_collection: ProcessGroupCollection,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.group = pg_collection.tp
        rows = divide(padded_size, pg_collection, "padded vocabulary size")
        meta = ParamMeta(
            tp_dim=0, is_embedding_or_output=True, shared_embedding=shared, logical_shape=(vocab_size, hidden_size)
        )
        self.weight = new_parameter((rows, hidden_size), rule=rule, meta=meta, dtype=dtype, device=device)

    def forward(self, ids: torch.Tensor, reduce_scatter: bool = False) -> torch.Tensor:
        """ids: int64 [s, b] below vocab_size -> [s, b, h], same dtype as the weight; own [s/tp, b, h] with `reduce_scatter`."""
        if group_size(self.group) == 1:
            return F.embedding(ids, self.weight)
        local = ids - group_rank(self.group) * self.weight.size(0)
        elsewhere = (local < 0) | (local >= self.weight.size(0))
        part = F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[..., None], 0)
        if reduce_scatter:
            return reduce_scatter_to_sequence_parallel_region(part, self.group)
        return reduce_from_tensor_model_parallel_region(part, self.group)
