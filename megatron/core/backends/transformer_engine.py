"""Attention by Transformer Engine's DotProductAttention (it picks cuDNN, flash or unfused kernels itself)."""

from typing import Any

import torch

from megatron.core.backends.flash_attention import PackedLengths, packed_lengths
from megatron.core.backends.optional import probe
from megatron.core.transformer.transformer_config import TransformerConfig

_MODULE = "transformer_engine.pytorch"


class TransformerEngineAttention:
    """transformer_engine.pytorch.DotProductAttention, `sbhd` layout; `thd` for packed documents."""

    name = "te"

    def __init__(self, config: TransformerConfig) -> None:
        self._config = config
        self._window = None if config.window_size is None else (config.window_size - 1, 0)
        self._modules: dict[float, Any] = {}

    @staticmethod
    def supports(config: TransformerConfig, device: torch.device) -> str | None:
        """CUDA, 16-bit, package installed."""
        if device.type != "cuda":
            return f"Transformer Engine needs a CUDA device, the model is on {device.type}"
        if config.params_dtype not in (torch.bfloat16, torch.float16):
            return "Transformer Engine's attention computes in bf16 or fp16 only, the model is fp32"
        found = probe(_MODULE)
        return None if found.usable else f"{_MODULE}: {found.reason}"

    def prepare(
        self, batch_size: int, sequence_length: int, document_ids: torch.Tensor | None, device: torch.device
    ) -> PackedLengths | None:
        """Document boundaries, or None when each row is one sequence."""
        return None if document_ids is None else packed_lengths(document_ids)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prepared: PackedLengths | None, dropout: float
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        kernel = self._kernel(dropout)
        if prepared is None:
            out = kernel(query, key, value, qkv_format="sbhd", attn_mask_type="causal", window_size=self._window)
            return out.view(*query.shape[:2], -1)
        packed = (part.transpose(0, 1).reshape(-1, *part.shape[2:]) for part in (query, key, value))
        out = kernel(
            *packed,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            window_size=self._window,
            cu_seqlens_q=prepared.boundaries,
            cu_seqlens_kv=prepared.boundaries,
            max_seqlen_q=prepared.longest,
            max_seqlen_kv=prepared.longest,
        )
        return out.view(query.size(1), query.size(0), -1).transpose(0, 1)

    def _kernel(self, dropout: float) -> Any:
        """One module per dropout probability (training and evaluation); it has no parameters."""
        if dropout not in self._modules:
            engine = probe(_MODULE).module
            assert engine is not None, "constructed although supports() gave a reason"
            self._modules[dropout] = engine.DotProductAttention(
                self._config.num_attention_heads,
                self._config.head_dim,
                num_gqa_groups=self._config.num_kv_heads,
                attention_dropout=dropout,
            )
        return self._modules[dropout]
