"""A model with experts against tests/reference in float64: losses and every gradient, auxiliary losses among them."""

from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.batch_inputs import AuxLossWeight
from megatron.core.transformer.moe.balance import balance_metrics, routers_of
from tests.harness.t0 import t0_transformer_config
from tests.reference import gpt_reference
from tests.reference.gpt_reference import balancing_loss_reference, moe_output, reference_loss, z_loss_reference

SMALL: dict[str, Any] = {"num_layers": 2, "num_experts": 4, "moe_ffn_hidden_size": 24}
GROUPED = {"num_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "top-2": {},
    "top-2, losses": {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01},
    "losses by sequence": {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01, "moe_router_load_balancing_type": "seq_aux_loss"},
    "losses, recomputed": {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01, "moe_layer_recompute": True},
    "top-1, softmax first, biases": {"moe_router_topk": 1, "moe_router_pre_softmax": True, "add_bias_linear": True},
    "groups": GROUPED,
    "sigmoid, groups, bias, factor, shared, losses": {
        **GROUPED, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 40, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01,
    },
    "one dense layer, gelu": {"moe_layer_freq": "[0,1]", "activation_func": "gelu", "moe_ffn_hidden_size": None},
    "capacity that drops nothing, padded": {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True},
}  # fmt: skip


def build(options: dict[str, Any]) -> GPTModel:
    """float64; biases and expert biases not at their initial zero."""
    config = t0_transformer_config(**{**SMALL, **options})
    groups = ProcessGroupCollection.single_process()
    model = GPTModel(config, vocab_size=101, max_sequence_length=16, pg_collection=groups, seed=5).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.1)
            if name.endswith("router.weight"):
                tensor.mul_(30.0)  # routings with a clear choice, and losses that matter
    return model


@pytest.mark.parametrize("name", list(VARIANTS))
def test_loss_and_every_gradient_equal_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(VARIANTS[name])
    config = model.config
    tokens = torch.randint(101, (3, 17), generator=torch.Generator().manual_seed(2))
    losses = model(tokens[:, :-1], labels=tokens[:, 1:], aux_loss=AuxLossWeight(48.0, 48.0))
    losses.sum().backward()

    params = {key: value.detach().clone().requires_grad_() for key, value in model.named_parameters()}
    by_layer: dict[str, list[tuple[torch.Tensor, list[list[int]]]]] = {}

    def record(prefix: str, logits: torch.Tensor, experts: list[list[int]]) -> None:
        by_layer.setdefault(prefix, []).append((logits, experts))

    monkeypatch.setattr(gpt_reference, "moe_output", lambda *args: moe_output(*args, record=record))
    expected = reference_loss({**params, **dict(model.named_buffers())}, config, tokens[:, :-1], tokens[:, 1:], vocab_size=101)
    total, per_sequence = expected.sum(), config.moe_router_load_balancing_type == "seq_aux_loss"
    figures: dict[str, list[float]] = {"load_balancing_loss": [], "z_loss": []}
    for rows in by_layer.values():
        whole = (torch.cat([logits for logits, _ in rows]), [chosen for _, experts in rows for chosen in experts])
        parts = rows if per_sequence else [whole]
        balancing = torch.stack([balancing_loss_reference(config, *part) for part in parts]).mean()
        z = z_loss_reference(whole[0])
        total = total + 48.0 * (config.moe_aux_loss_coeff * balancing + (config.moe_z_loss_coeff or 0.0) * z)
        figures["load_balancing_loss"].append(float(balancing))
        figures["z_loss"].append(float(z))
    total.backward()

    torch.testing.assert_close(losses.detach(), expected.detach(), rtol=1e-12, atol=1e-12)
    for key, param in model.named_parameters():
        assert param.grad is not None, key
        wanted = params[key].grad
        if wanted is None:  # an expert without tokens
            wanted = torch.zeros_like(param)
        error = float((param.grad - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-300)
        assert error <= 1e-10, (key, error)

    metrics = balance_metrics(config, [model], ProcessGroupCollection.single_process(), torch.device("cpu"))
    if config.moe_aux_loss_coeff:
        tag = "seq_load_balancing_loss" if per_sequence else "load_balancing_loss"
        assert metrics[tag] == pytest.approx(sum(figures["load_balancing_loss"]) / len(by_layer), rel=1e-10)
        assert metrics["z_loss"] == pytest.approx(sum(figures["z_loss"]) / len(by_layer), rel=1e-10)
    loads = [[sum(e in chosen for _, experts in rows for chosen in experts) for e in range(config.num_experts)] for rows in by_layer.values()]
    assert metrics["max_over_mean_tokens_per_expert"] == pytest.approx(max(max(own) / (sum(own) / len(own)) for own in loads))
    assert [routers_of([model])[index].stats.counts.tolist() for index in sorted(routers_of([model]))] == loads


def test_coefficients_of_zero_are_the_bits_of_no_losses() -> None:
    """R02, last line; and evaluation counts nothing."""
    results = []
    for options in ({}, {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0}):
        model = build(options)
        tokens = torch.randint(101, (2, 16), generator=torch.Generator().manual_seed(4))
        model(tokens, labels=tokens).sum().backward()
        results.append({name: param.grad for name, param in model.named_parameters()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    model.eval()
    before = routers_of([model])[0].stats.counts.clone()
    model(tokens)
    assert torch.equal(routers_of([model])[0].stats.counts, before)
