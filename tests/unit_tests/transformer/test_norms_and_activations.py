"""Norms and activations equal torch's own, with gradients, in every dtype; statistics are at least fp32."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.transformer.activations import ACTIVATIONS, swiglu
from megatron.core.transformer.norms import build_norm
from tests.harness.t0 import t0_transformer_config


def test_rmsnorm_equals_torch_with_gradients() -> None:
    norm = build_norm(6, t0_transformer_config(), device=None)
    weight = torch.rand(6, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)

    def ours(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(norm, {"weight": w}, (x,))

    torch.testing.assert_close(ours(hidden, weight), F.rms_norm(hidden, (6,), weight, 1e-5), rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(ours, (hidden, weight))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_bf16_norm_takes_its_statistics_in_fp32(kind: str) -> None:
    norm = build_norm(512, t0_transformer_config(normalization=kind), device=None)
    with torch.no_grad():
        norm.weight.fill_(1.0)
        if kind == "LayerNorm":
            norm.bias.zero_()
    hidden = torch.randn(4, 512).mul(100).bfloat16()
    exact = norm.double()(hidden.double())
    rounded = norm.bfloat16()(hidden)
    assert rounded.dtype == torch.bfloat16
    # one rounding to bf16 (half a unit in the last place, 2^-9) is all that is lost
    torch.testing.assert_close(rounded.double(), exact, rtol=2**-8, atol=1e-6)


def test_norm_of_a_strided_input_has_the_right_gradient() -> None:
    norm = build_norm(4, t0_transformer_config(), device=None).double()
    mixed = torch.randn(3, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    assert torch.autograd.gradcheck(lambda x: norm(x[:, :, 1:3]), (mixed,))


def test_swiglu_equals_its_definition_with_gradients() -> None:
    gate_up = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(gate_up), gate / (1 + torch.exp(-gate)) * up, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(swiglu, (gate_up,))


def test_every_configurable_activation_exists() -> None:
    for name in ACTIVATIONS:
        config = t0_transformer_config(activation_func=name)
        width = 8 if config.gated else 4
        assert ACTIVATIONS[name](torch.randn(2, width)).shape == (2, 4)
