"""The product's loss and every gradient equal the plain-torch oracle's in fp64, for each feature of the architecture."""

from typing import Any

import pytest
import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.param_meta import param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.t0 import t0_transformer_config
from tests.reference.gpt_reference import reference_logits, reference_loss

VOCAB = 21
LENGTH = 10

GPT2 = dict(
    num_query_groups=None,
    group_query_attention=False,
    position_embedding_type="learned_absolute",
    normalization="LayerNorm",
    activation_func="gelu_tanh",
    add_bias_linear=True,
    untie_embeddings_and_output_weights=False,
)
CASES: dict[str, dict[str, Any]] = {
    "t0": {},
    "gpt2": GPT2,
    "multi head": dict(num_query_groups=4),
    "multi query": dict(num_query_groups=1),
    "no positions": dict(position_embedding_type="none"),
    "grouped, learned positions": dict(position_embedding_type="learned_absolute"),
    "qk norm rms": dict(qk_layernorm=True),
    "qk norm layer": dict(qk_layernorm=True, normalization="LayerNorm"),
    "window": dict(window_size=3),
    "window unfused": dict(window_size=3, attention_backend="unfused"),
    "unfused": dict(attention_backend="unfused"),
    "tied": dict(untie_embeddings_and_output_weights=False),
    "biases": dict(add_bias_linear=True),
    "qkv bias": dict(add_qkv_bias=True),
    "head size": dict(kv_channels=6),
    "odd sizes": dict(hidden_size=36, ffn_hidden_size=68, num_attention_heads=6, num_query_groups=3),
    "default ffn": dict(ffn_hidden_size=None),
    **{f"activation {name}": dict(activation_func=name) for name in ("gelu", "relu", "squared_relu", "silu", "geglu")},
    "rope interleaved": dict(rotary_interleaved=True),
    "rope interleaved and normed": dict(rotary_interleaved=True, qk_layernorm=True, rotary_percent=0.5),
    "rope half": dict(rotary_percent=0.5),
    "rope half interleaved": dict(rotary_percent=0.5, rotary_interleaved=True),
    "rope base": dict(rotary_base=500000.0),
    "rope linear": dict(rope_scaling_type="linear", rope_scaling_factor=4.0),
    "rope llama3": dict(rope_scaling_type="llama3", rope_scaling_factor=4.0, rope_original_max_position_embeddings=64),
    "rope yarn": dict(
        rope_scaling_type="yarn", rope_scaling_factor=4.0, rope_original_max_position_embeddings=64, rope_yarn_beta_fast=8.0
    ),
    "rope yarn factor": dict(
        rope_scaling_type="yarn", rope_original_max_position_embeddings=512, rope_yarn_attention_factor=0.9, kv_channels=16
    ),
}
PACKED = ["t0", "gpt2", "window", "window unfused", "unfused"]


def build(config: TransformerConfig) -> GPTModel:
    """fp64 model in which no two numbers are alike: norms and biases are moved away from one and zero."""
    model = GPTModel(config, vocab_size=VOCAB, max_sequence_length=16, pg_collection=ProcessGroupCollection.single_process())
    model.double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.add_(noise, alpha=0.3 if "embeddings" in name or "output" in name else 0.1)
    return model


def logical(param: torch.Tensor) -> torch.Tensor:
    """Without padding rows."""
    shape = param_meta(param).logical_shape
    return param if shape is None else param[: shape[0]]


def check(model: GPTModel, position_ids: torch.Tensor | None, document_ids: torch.Tensor | None) -> None:
    """Loss, and the gradient of a weighted sum of losses with respect to every parameter, to 1e-10."""
    generator = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(VOCAB, (2, LENGTH), generator=generator) for _ in range(2))
    weights = torch.rand((2, LENGTH), generator=generator, dtype=torch.float64)
    expected_params = {name: logical(p).detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = reference_loss(
        expected_params, model.config, tokens, labels, position_ids, document_ids, vocab_size=VOCAB
    )
    (expected * weights).sum().backward()
    losses = model(tokens, position_ids, labels=labels, document_ids=document_ids)
    (losses * weights).sum().backward()
    assert losses.dtype == torch.float64
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        gradient, oracle = logical_grad(param), expected_params[name].grad
        torch.testing.assert_close(gradient, oracle, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
        assert float(oracle.abs().max()) > 1e-6, f"{name}: the case does not exercise this parameter"
    with torch.no_grad():
        logits = model(tokens, position_ids, document_ids=document_ids)
        oracle = reference_logits(expected_params, model.config, tokens, position_ids, document_ids)
    assert logits.shape == (2, LENGTH, VOCAB)
    torch.testing.assert_close(logits, oracle, rtol=1e-10, atol=1e-10)


def logical_grad(param: torch.Tensor) -> torch.Tensor:
    """Gradient of the true rows; that of padding rows is exactly zero."""
    assert param.grad is not None
    shape = param_meta(param).logical_shape
    if shape is None:
        return param.grad
    assert not param.grad[shape[0] :].any()
    return param.grad[: shape[0]]


@pytest.mark.parametrize("case", CASES)
def test_loss_logits_and_every_gradient_equal_the_oracle(case: str) -> None:
    model = build(t0_transformer_config(**{"num_layers": 2, **CASES[case]}))
    # "no positions" and the like must not look at them; shifted positions show that every other case does
    positions = (torch.arange(LENGTH) + torch.tensor([[0], [3]])).contiguous()
    check(model, None, None)
    model.zero_grad()
    check(model, positions, None)


@pytest.mark.parametrize("case", PACKED)
def test_packed_documents_equal_the_oracle(case: str) -> None:
    model = build(t0_transformer_config(**{"num_layers": 2, **CASES[case]}))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 3, 3], [5, 5, 5, 5, 5, 5, 6, 6, 6, 6]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 0, 1], [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
    check(model, positions, documents)
