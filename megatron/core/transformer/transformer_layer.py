"""TransformerLayer: the pre-norm block, attention then MLP (or experts), each added to the residual stream.

    x = x + dropout(attention(norm(x)))
    x = x + dropout(mlp(norm(x)))
"""

import torch
import torch.nn.functional as F

from megatron.core.backends.base import AttentionBackend
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import rng_fork
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.batch_inputs import BatchInputs
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.recompute import recomputed
from megatron.core.transformer.transformer_config import TransformerConfig


class TransformerLayer(torch.nn.Module):
    """One decoder layer. layer_index: global number from 0."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_index: int,
        *,
        backend: AttentionBackend,
        device: torch.device | None,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = build_norm(config.hidden_size, config, device=device)
        self.self_attention = SelfAttention(
            config, layer_index, backend=backend, device=device, pg_collection=pg_collection
        )
        self.pre_mlp_layernorm = build_norm(config.hidden_size, config, device=device)
        self.mlp: MLP | MoELayer
        if config.is_moe_layer(layer_index):
            self.mlp = MoELayer(config, layer_index, device=device, pg_collection=pg_collection)
        else:
            self.mlp = MLP(config, device=device, pg_collection=pg_collection)

    def forward(self, hidden: torch.Tensor, batch: BatchInputs) -> torch.Tensor:
        """hidden: [s, b, h], [s/tp, b, h] with sequence parallelism -> the same."""
        mixed = recomputed(self.config, "layernorm", self._norm_and_qkv, hidden)
        hidden = hidden + self._dropout(self.self_attention(mixed, batch))
        if isinstance(self.mlp, MoELayer):
            return hidden + self._dropout(recomputed(self.config, "moe", self._norm_and_experts, hidden, batch))
        return hidden + self._dropout(recomputed(self.config, "mlp", self._norm_and_mlp, hidden))

    def _norm_and_qkv(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.self_attention.linear_qkv(self.input_layernorm(hidden))

    def _norm_and_experts(self, hidden: torch.Tensor, batch: BatchInputs) -> torch.Tensor:
        output: torch.Tensor = self.mlp(self.pre_mlp_layernorm(hidden), batch)
        return output

    def _norm_and_fc1(self, hidden: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.mlp, MLP)
        return self.mlp.linear_fc1(self.pre_mlp_layernorm(hidden))

    def _norm_and_mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        if "mlp" in self.config.recompute_modules:
            return self.mlp(self._norm_and_fc1(hidden))
        return self.mlp(recomputed(self.config, "layernorm", self._norm_and_fc1, hidden))

    def _dropout(self, branch: torch.Tensor) -> torch.Tensor:
        probability = self.config.hidden_dropout
        if not probability:
            return branch
        with rng_fork(self.config.sequence_parallel and self.training):
            return F.dropout(branch, probability, self.training)
