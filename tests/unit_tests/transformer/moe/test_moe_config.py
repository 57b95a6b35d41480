"""Options of layers with experts: which layers, and which settings are refused with which rule."""

from typing import Any

import pytest

from megatron.core.errors import ConfigError
from megatron.core.transformer.moe.moe_config import moe_layers
from tests.harness.t0 import t0_transformer_config


@pytest.mark.parametrize(
    ("freq", "layers"),
    [("1", [0, 1, 2, 3]), ("2", [0, 2]), ("3", [0, 3]), ("[0,1,1,0]", [1, 2]), ("([0]*3+[1]*1)", [3]), ("2*[0,1]", [1, 3])],
)
def test_layers_with_experts_follow_number_or_pattern(freq: str, layers: list[int]) -> None:
    assert [index for index, experts in enumerate(moe_layers(freq, 4)) if experts] == layers


@pytest.mark.parametrize("freq", ["0", "-1", "two", "[0,2,1,1]", "[0,1]", "[0]*10**9", "__import__('os')", "[0,1,1,1"])
def test_anything_else_is_refused_by_name(freq: str) -> None:
    with pytest.raises(ConfigError, match="moe_layer_freq"):
        moe_layers(freq, 4)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"moe_router_topk": 1}, "moe_router_topk is only used with num_experts"),
    ({"expert_model_parallel_size": 2}, "expert_model_parallel_size=2 needs num_experts"),
    ({"num_experts": 4, "expert_model_parallel_size": 3}, "expert_model_parallel_size=3 does not divide num_experts=4; use 1, 2, 4"),
    ({"num_experts": 4, "moe_router_topk": 5}, "moe_router_topk=5 is above num_experts=4"),
    ({"num_experts": 4, "moe_router_topk": 1}, "moe_router_topk=1 with softmax needs moe_router_pre_softmax"),
    ({"num_experts": 4, "moe_router_enable_expert_bias": True}, "needs moe_router_score_function=sigmoid"),
    ({"num_experts": 4, "moe_router_num_groups": 2}, "belong together"),
    ({"num_experts": 4, "moe_router_num_groups": 3, "moe_router_group_topk": 1}, "does not divide num_experts=4"),
    ({"num_experts": 4, "moe_router_num_groups": 2, "moe_router_group_topk": 3}, "is above moe_router_num_groups=2"),
    ({"num_experts": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 1}, "must be a multiple of moe_router_group_topk"),
    ({"num_experts": 4, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1}, "needs moe_router_load_balancing_type"),
    ({"num_experts": 4, "moe_pad_expert_input_to_capacity": True}, "needs moe_expert_capacity_factor"),
    ({"num_experts": 4, "moe_ffn_hidden_size": 33, "expert_tensor_parallel_size": 2}, "does not divide moe_ffn_hidden_size=33"),
    ({"num_experts": 4, "torch_compile": True}, "torch_compile=True does not go with num_experts"),
    ({"num_experts": 4, "moe_layer_freq": "[1]"}, "pattern of 1 layers, num_layers=4"),
    ({"recompute_modules": ("moe",)}, "names moe, which needs num_experts"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_impossible_settings_are_refused_with_the_rule(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        t0_transformer_config(**options)
    assert text in str(error.value)
