"""SelfAttention: packed query/key/value projection, head norms, rotary positions, the attention kernel, output projection.

Rows of `linear_qkv` are grouped by key/value head, as in Megatron, so that a cut over tensor parallelism takes whole groups:

    group 0: q_0 .. q_{r-1}  k_0  v_0 | group 1: q_r .. q_{2r-1}  k_1  v_1 | ...        r = query heads per group
"""

from typing import Any

import torch

from megatron.core.backends.attention_choice import choose_attention_backend
from megatron.core.backends.base import AttentionBackend, visible
from megatron.core.backends.torch_backend import masked_attention
from megatron.core.param_init import InitRule
from megatron.core.param_meta import ParamMeta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, divide
from megatron.core.tensor_parallel.random import rng_fork
from megatron.core.transformer.batch_inputs import BatchInputs
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.recompute import recomputed
from megatron.core.transformer.rope import rotate, split_and_rotate
from megatron.core.transformer.transformer_config import TransformerConfig


class SelfAttention(torch.nn.Module):
    """Causal self-attention with grouped keys and values; a tensor-parallel rank has whole groups, `groups` of them."""

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
        self.config, self.layer_index, self.backend = config, layer_index, backend
        self.groups, self.head_dim = divide(config.num_kv_heads, pg_collection, "num_query_groups"), config.head_dim
        self.heads_per_group = config.num_attention_heads // config.num_kv_heads
        common: dict[str, Any] = {"dtype": config.params_dtype, "device": device, "pg_collection": pg_collection}
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            config.num_kv_heads * (self.heads_per_group + 2) * self.head_dim,
            rule=InitRule(std=config.init_method_std),
            bias=config.add_bias_linear or config.add_qkv_bias,
            sequence_parallel=config.sequence_parallel,
            weight_meta=ParamMeta(tp_dim=0, qkv_rows=(self.heads_per_group * self.head_dim, self.head_dim, self.head_dim)),
            **common,
        )
        if config.qk_layernorm:
            self.q_layernorm = build_norm(self.head_dim, config, device=device, of_heads=True)
            self.k_layernorm = build_norm(self.head_dim, config, device=device, of_heads=True)
        self.linear_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            rule=InitRule(std=config.output_init_std),
            bias=config.add_bias_linear,
            sequence_parallel=config.sequence_parallel,
            **common,
        )

    def forward(self, mixed: torch.Tensor, batch: BatchInputs) -> torch.Tensor:
        """mixed: [s, b, g/tp x (r + 2) x d], the output of `linear_qkv` (the layer calls it, with the norm before it) -> [s, b, h]."""
        query, key, value = self._heads(mixed, batch)
        if batch.inference_context is not None:
            attended = self._attend_to_cache(query, key, value, batch)
        else:
            attended = recomputed(self.config, "core_attn", self._attend, query, key, value, batch)
        return self.linear_proj(attended)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: BatchInputs
    ) -> torch.Tensor:
        """query [s, b, n, d], key and value [s, b, g, d] of this rank's heads -> [s, b, n x d]."""
        dropout = self.config.attention_dropout if self.training else 0.0
        with rng_fork(dropout > 0 and self.config.tensor_model_parallel_size > 1):
            return self.backend.attend(query, key, value, batch.attention, dropout)

    def _heads(self, mixed: torch.Tensor, batch: BatchInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [s, b, n, d], key and value [s, b, g, d], normalised and rotated."""
        s, b = mixed.shape[:2]
        mixed = mixed.view(s, b, self.groups, self.heads_per_group + 2, self.head_dim)
        if batch.rotary is not None and not self.config.qk_layernorm:
            query, key, value = split_and_rotate(mixed, *batch.rotary, self.config.rotary_interleaved)
        else:
            query, key, value = mixed.split((self.heads_per_group, 1, 1), dim=3)
            if self.config.qk_layernorm:
                query, key = self.q_layernorm(query), self.k_layernorm(key)
            if batch.rotary is not None:
                query, key = (rotate(part, *batch.rotary, self.config.rotary_interleaved) for part in (query, key))
        return query.flatten(2, 3), key.squeeze(3), value.squeeze(3)

    def _attend_to_cache(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: BatchInputs
    ) -> torch.Tensor:
        """Attention of the new tokens to everything the cache holds. query [s, b, n, d] -> [s, b, n x d]."""
        assert batch.inference_context is not None
        keys, values, mask = batch.inference_context.update(self.layer_index, key, value)
        if self.config.window_size is not None:
            assert batch.position_ids is not None
            index = torch.arange(keys.size(0), device=keys.device)
            mask = mask & visible(batch.position_ids[:, None, :, None], index, self.config.window_size)
        return masked_attention(query, keys, values, mask)


def attention_backend(config: TransformerConfig, device: torch.device | None) -> AttentionBackend:
    """The backend that all layers of a model share. device None = torch's default device."""
    return choose_attention_backend(config, device or torch.get_default_device())
