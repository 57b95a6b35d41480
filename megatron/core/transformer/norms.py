"""LayerNorm and RMSNorm over the last dimension, statistics in at least fp32 whatever the dtype of the input.

    LayerNorm: y = (x - mean) / sqrt(var + eps) w + b           RMSNorm: y = x / sqrt(mean(x^2) + eps) w
"""

from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.param_init import ONES, ZEROS, new_parameter
from megatron.core.param_meta import ParamMeta
from megatron.core.transformer.transformer_config import TransformerConfig


class LayerNorm(torch.nn.Module):
    """Mean and variance norm with weight and bias, [size] each."""

    def __init__(self, size: int, config: TransformerConfig, *, device: torch.device | None, partial_grad: bool) -> None:
        super().__init__()
        meta = ParamMeta(tp_partial_grad=partial_grad)
        self.epsilon = config.norm_epsilon
        self.weight = new_parameter((size,), rule=ONES, meta=meta, dtype=config.params_dtype, device=device)
        self.bias = new_parameter((size,), rule=ZEROS, meta=meta, dtype=config.params_dtype, device=device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [..., size] -> same shape and dtype."""
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.epsilon)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm with weight [size] (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, config: TransformerConfig, *, device: torch.device | None, partial_grad: bool) -> None:
        super().__init__()
        meta = ParamMeta(tp_partial_grad=partial_grad)
        self.epsilon = config.norm_epsilon
        self.weight = new_parameter((size,), rule=ONES, meta=meta, dtype=config.params_dtype, device=device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [..., size] -> same shape and dtype."""
        if hidden.device.type != "cpu" or torch.compiler.is_compiling():
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)
        return _RMSNormOnCPU.apply(hidden, self.weight, self.epsilon)  # type: ignore[no-untyped-call]


class _RMSNormOnCPU(torch.autograd.Function):
    """RMSNorm in few passes over memory: torch has no fused CPU kernel, its composite takes twice as long."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = _widen(hidden)
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(wide.size(-1))
        inverse_rms = mean_square.add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden, weight, inverse_rms)
        return (wide * inverse_rms).mul_(_widen(weight)).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # With r = inverse_rms, g = dL/dy, n = size:  dL/dw = sum g x r,   dL/dx = r w g - x r^3 sum(w g x) / n
        hidden, weight, inverse_rms = ctx.saved_tensors
        wide, grad, wide_weight = _widen(hidden), _widen(grads[0]), _widen(weight)
        size = wide.size(-1)
        product = (grad * wide).view(-1, size)
        grad_weight = (inverse_rms.reshape(1, -1) @ product).view(-1)
        coefficient = (product @ wide_weight).view(inverse_rms.shape).mul_(inverse_rms.pow(3)).div_(size)
        grad_hidden = (grad * wide_weight).mul_(inverse_rms).addcmul_(wide, coefficient, value=-1.0)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    """At least fp32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def build_norm(
    size: int, config: TransformerConfig, *, device: torch.device | None, of_heads: bool = False
) -> LayerNorm | RMSNorm:
    """The norm named by config.normalization. of_heads: it is applied to each attention head, of which a tp rank has a part."""
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return kind(size, config, device=device, partial_grad=of_heads or config.sequence_parallel)
