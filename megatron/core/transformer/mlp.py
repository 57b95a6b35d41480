"""MLP: widen, activate (gated or not), project back."""

from typing import Any

import torch

from megatron.core.param_init import InitRule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.activations import activation
from megatron.core.transformer.transformer_config import TransformerConfig


class MLP(torch.nn.Module):
    """linear_fc1 [f or 2f (gate; up), h], activation, linear_fc2 [h, f]; a tensor-parallel rank has f/tp of the middle.

    ffn_size: f; default: the configuration's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        device: torch.device | None,
        pg_collection: ProcessGroupCollection,
        ffn_size: int | None = None,
    ) -> None:
        super().__init__()
        width = config.ffn_size if ffn_size is None else ffn_size
        common: dict[str, Any] = {"dtype": config.params_dtype, "device": device, "pg_collection": pg_collection}
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            width * (2 if config.gated else 1),
            rule=InitRule(std=config.init_method_std),
            bias=config.add_bias_linear,
            sequence_parallel=config.sequence_parallel,
            blocks=2 if config.gated else 1,
            **common,
        )
        self.activation = activation(config)
        self.linear_fc2 = RowParallelLinear(
            width,
            config.hidden_size,
            rule=InitRule(std=config.output_init_std),
            bias=config.add_bias_linear,
            sequence_parallel=config.sequence_parallel,
            **common,
        )

    def forward(self, widened: torch.Tensor) -> torch.Tensor:
        """widened: [s, b, f or 2f], the output of `linear_fc1` (the layer calls it, with the norm before it) -> [s, b, h]."""
        return self.linear_fc2(self.activation(widened))
