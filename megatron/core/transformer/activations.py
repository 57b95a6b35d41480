"""Activations of the MLP by name. Gated ones take [..., 2f] laid out as [gate; up] and give [..., f]."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.transformer.transformer_config import TransformerConfig


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (Shazeer 2020). gate_up: [..., 2f] -> [..., f]."""
    if torch.compiler.is_compiling():
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    return _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up. gate_up: [..., 2f] -> [..., f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up


class _SwiGLU(torch.autograd.Function):
    """Saves its input only, and writes both halves of the gradient into one tensor (autograd would concatenate them)."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=grad_up)
        grad_up.mul_(grads[0])
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "squared_relu": _squared_relu,
    "silu": F.silu,
    "swiglu": swiglu,
    "geglu": geglu,
}


def activation(config: TransformerConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function named by config.activation_func."""
    return ACTIVATIONS[config.activation_func]
