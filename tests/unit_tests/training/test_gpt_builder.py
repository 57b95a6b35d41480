"""The builder: sizes and seed from the configuration, frozen parameters, compiled layers."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.config import RunConfig, load_run_config
from megatron.training.gpt_builder import build_gpt_model, compile_model, model_provider
from tests.harness.t0 import TRUE_VOCAB_SIZE, t0_flags, t0_transformer_config

ARGUMENTS: dict[str, Any] = {
    "vocab_size": TRUE_VOCAB_SIZE,
    "device": torch.device("cpu"),
    "pg_collection": ProcessGroupCollection.single_process(),
}


def run_config(**training: Any) -> RunConfig:
    """T0, with fields of its training section replaced."""
    config = load_run_config(t0_flags("data")).config
    seed = {name: value for name, value in training.items() if name == "seed"}  # one value, carried by two sections
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, **training),
        optimizer=dataclasses.replace(config.optimizer, **seed),
    )


def test_model_has_the_configured_sizes_and_the_run_seed() -> None:
    model = build_gpt_model(run_config(seed=7), **ARGUMENTS)
    expected = GPTModel(
        t0_transformer_config(), vocab_size=TRUE_VOCAB_SIZE, max_sequence_length=16, seed=7, pg_collection=ARGUMENTS["pg_collection"]
    )
    assert model.max_sequence_length == 16
    built = dict(model.named_parameters())
    for name, param in expected.named_parameters():
        assert torch.equal(built[name], param), name


def test_provider_builds_the_same_model() -> None:
    config = run_config()
    provided = dict(model_provider(config, **ARGUMENTS)(True, True).named_parameters())
    for name, param in build_gpt_model(config, **ARGUMENTS).named_parameters():
        assert torch.equal(provided[name], param), name


def test_frozen_patterns_stop_exactly_the_named_parameters() -> None:
    model = build_gpt_model(run_config(freeze=("embedding.*", "decoder.layers.[12].mlp.*")), **ARGUMENTS)
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    assert frozen == {
        "embedding.word_embeddings.weight",
        *(f"decoder.layers.{i}.mlp.linear_fc{n}.weight" for i in (1, 2) for n in (1, 2)),
    }
    tokens = torch.randint(100, (1, 8))
    model(tokens, labels=tokens).sum().backward()
    assert {name for name, param in model.named_parameters() if param.grad is None} == frozen


def test_a_pattern_without_a_match_names_the_nearest_parameter() -> None:
    with pytest.raises(ConfigError, match=r"freeze='output_layer.wieght' matches no parameter; .* output_layer.weight"):
        build_gpt_model(run_config(freeze=("output_layer.wieght",)), **ARGUMENTS)


UNFUSED = {"attention_backend": "unfused", "qk_layernorm": True, "rotary_interleaved": True}
WHOLE = {"attention_backend": "unfused", "torch_compile_scope": "model"}


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("aot_eager", {}),
        ("aot_eager", UNFUSED),
        ("aot_eager", WHOLE),
        ("aot_eager", WHOLE | {"num_query_groups": 4, "untie_embeddings_and_output_weights": False}),
        pytest.param("inductor", {}, marks=pytest.mark.slow),  # a C++ compiler at work for a minute or more
        pytest.param("inductor", UNFUSED, marks=pytest.mark.slow),
        pytest.param("inductor", WHOLE, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_computes_the_same_numbers_from_one_graph(backend: str, changes: dict[str, Any]) -> None:
    results = []
    for compiled in (False, True):
        model = GPTModel(
            t0_transformer_config(num_layers=3, **changes),
            vocab_size=TRUE_VOCAB_SIZE,
            max_sequence_length=16,
            pg_collection=ARGUMENTS["pg_collection"],
        )
        if compiled:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            compile_model(model, backend)
        tokens = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(0))
        losses = model(tokens, tokens.new_tensor(range(16)).expand(2, -1), labels=tokens)
        losses.mean().backward()
        results.append((losses.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    (expected, expected_gradients), (losses, gradients) = results
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
