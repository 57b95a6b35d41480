"""Layers that tensor parallelism will cut: column- and row-parallel linear, vocabulary-parallel embedding.

    Y = X A        column-parallel: A = [A_0 | A_1], rank i holds A_i and makes Y_i      weight [out/tp, in],  tp_dim 0
                   row-parallel:    A = [A_0 ; A_1], rank i holds A_i, Y = sum X_i A_i   weight [out, in/tp],  tp_dim 1
    embedding      rows of the vocabulary                                                weight [V/tp, h],     tp_dim 0

The matrices already carry the dimension that is cut (`ParamMeta.tp_dim`). This version computes with one tensor-parallel rank;
more are refused at construction.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron.core.errors import ConfigError
from megatron.core.param_init import ZEROS, InitRule, new_parameter
from megatron.core.param_meta import ParamMeta
from megatron.core.process_groups_config import ProcessGroupCollection


def require_single_tensor_rank(pg_collection: ProcessGroupCollection) -> None:
    """Raise ConfigError when the layer would have to be cut over several tensor-parallel ranks."""
    size = pg_collection.size("tp")
    if size > 1:
        raise ConfigError(f"tensor_model_parallel_size={size} is not supported in this version; set it to 1")


class _LinearIntoMainGrad(torch.autograd.Function):
    """y = x W^T + b whose backward puts the gradient of W into `W.main_grad`, without a tensor and a pass of its own in between.

    hidden: [..., in]; weight: [out, in], a parameter of DistributedDataParallel. The same products and sums as autograd's.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[..., out]."""
        ctx.save_for_backward(hidden, weight)
        ctx.parameter = weight  # with recomputation the saved weight is another tensor object, which knows no main_grad
        return F.linear(hidden, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
        """grad: [..., out] -> gradients of `hidden` and `bias`; none of `weight`."""
        hidden, weight = ctx.saved_tensors
        rows, inputs = grad.flatten(0, -2), hidden.flatten(0, -2)
        grad_hidden = (rows @ weight).view(hidden.shape) if ctx.needs_input_grad[0] else None
        if ctx.parameter.begin_main_grad():
            ctx.parameter.main_grad.add_(rows.t() @ inputs)
        else:
            torch.mm(rows.t(), inputs, out=ctx.parameter.main_grad)
        return grad_hidden, None, rows.sum(0) if ctx.needs_input_grad[2] else None


def _writes_main_grad(weight: torch.nn.Parameter, hidden: torch.Tensor) -> bool:
    """Whether the weight is to be trained into a buffer of the computation's dtype. Compiled layers leave it to autograd."""
    return (
        weight.requires_grad
        and hasattr(weight, "begin_main_grad")
        and weight.main_grad.dtype == hidden.dtype == weight.dtype  # type: ignore[attr-defined]
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


class _Linear(torch.nn.Module):
    """y = x W^T + b with W [out, in]."""

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
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        require_single_tensor_rank(pg_collection)
        self.weight = new_parameter((output_size, input_size), rule=rule, meta=weight_meta, dtype=dtype, device=device)
        if bias:
            self.bias = new_parameter((output_size,), rule=ZEROS, meta=bias_meta, dtype=dtype, device=device)
        else:
            self.register_parameter("bias", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [..., in] -> [..., out], same dtype."""
        if _writes_main_grad(self.weight, hidden):
            return _LinearIntoMainGrad.apply(hidden, self.weight, self.bias)
        return F.linear(hidden, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Sizes, for printing the model."""
        return f"in={self.weight.shape[1]}, out={self.weight.shape[0]}, bias={self.bias is not None}"


class ColumnParallelLinear(_Linear):
    """Linear layer whose output features are cut over tensor parallelism: [..., in] -> [..., out/tp]."""

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
        weight_meta: ParamMeta | None = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            rule=rule,
            bias=bias,
            weight_meta=weight_meta or ParamMeta(tp_dim=0),
            bias_meta=ParamMeta(tp_dim=0),
            dtype=dtype,
            device=device,
            pg_collection=pg_collection,
        )


class RowParallelLinear(_Linear):
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
            input_size,
            output_size,
            rule=rule,
            bias=bias,
            weight_meta=ParamMeta(tp_dim=1),
            bias_meta=ParamMeta(sequence_parallel=sequence_parallel),
            dtype=dtype,
            device=device,
            pg_collection=pg_collection,
        )


class VocabParallelEmbedding(torch.nn.Module):
    """Word embedding, padded to `padded_size` rows, of which the first `vocab_size` are the true vocabulary."""

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
    ) -> None:
        super().__init__()
        require_single_tensor_rank(pg_collection)
        meta = ParamMeta(tp_dim=0, is_embedding_or_output=True, logical_shape=(vocab_size, hidden_size))
        self.weight = new_parameter((padded_size, hidden_size), rule=rule, meta=meta, dtype=dtype, device=device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 [...] below vocab_size -> [..., h]."""
        return F.embedding(ids, self.weight)
