"""Attention in plain torch: SDPA (the reference backend), FlexAttention, and the unfused form that spells the formula out."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.backends.base import dense_mask
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchAttention:
    """torch.nn.functional.scaled_dot_product_attention; its causal fast path when there is neither window nor document mask."""

    name = "torch"

    def __init__(self, config: TransformerConfig) -> None:
        self._window = config.window_size

    @staticmethod
    def supports(config: TransformerConfig, device: torch.device) -> str | None:
        """Everything, everywhere."""
        return None

    def prepare(
        self, batch_size: int, sequence_length: int, document_ids: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor | None:
        """A boolean mask [1 or b, 1, s, s], or None for plain causal attention."""
        if document_ids is None and (self._window is None or self._window >= sequence_length):
            return None
        return dense_mask(sequence_length, document_ids, self._window, device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prepared: torch.Tensor | None, dropout: float
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        return masked_attention(query, key, value, prepared, dropout)


class UnfusedAttention:
    """softmax(Q K^T / sqrt(d)) V with the scores in memory; softmax in at least fp32. For checks and for compilers."""

    name = "unfused"

    def __init__(self, config: TransformerConfig) -> None:
        self._window = config.window_size

    @staticmethod
    def supports(config: TransformerConfig, device: torch.device) -> str | None:
        """Everything, everywhere; memory grows with the square of the sequence."""
        return None

    def prepare(
        self, batch_size: int, sequence_length: int, document_ids: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        """A boolean mask [1 or b, 1, s, s], True where the key is hidden."""
        return ~dense_mask(sequence_length, document_ids, self._window, device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prepared: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        query, key, value = (part.contiguous() for part in _heads_first(query, key, value))  # compilers fuse this copy
        scores = query @ key.transpose(-1, -2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * query.size(-1) ** -0.5
        scores = scores.masked_fill(prepared, float("-inf"))
        weights = F.dropout(torch.softmax(scores, dim=-1), dropout, training=dropout > 0).to(value.dtype)
        return _merge_heads(weights @ value)


class FlexAttention:
    """torch's FlexAttention, compiled: document and window masks as block masks, so hidden blocks cost nothing."""

    name = "flex"

    def __init__(self, config: TransformerConfig) -> None:
        self._window = config.window_size
        self._grouped = config.num_kv_heads != config.num_attention_heads

    @staticmethod
    def supports(config: TransformerConfig, device: torch.device) -> str | None:
        """CUDA, no attention dropout, heads of at least 16."""
        if device.type != "cuda":
            return f"FlexAttention has a backward on CUDA only, the model is on {device.type}"
        if config.attention_dropout > 0:
            return f"FlexAttention has no dropout, attention_dropout={config.attention_dropout:g}"
        if config.head_dim < 16:
            return f"FlexAttention needs heads of at least 16, the model's are {config.head_dim}"
        return None

    def prepare(self, batch_size: int, sequence_length: int, document_ids: torch.Tensor | None, device: torch.device) -> Any:
        """A BlockMask for the batch; for plain causal or windowed attention it is made once per sequence length."""
        if document_ids is None:
            return _causal_block_mask(sequence_length, self._window, device)
        window = self._window

        def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            same = document_ids[b, q] == document_ids[b, k]
            return same & (k <= q) if window is None else same & (k <= q) & (q - k < window)

        return _block_mask(sees, batch_size, sequence_length, device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prepared: Any, dropout: float
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = _flex_kernel(query.is_cuda)(query, key, value, block_mask=prepared, enable_gqa=self._grouped)
        return _merge_heads(out)


@functools.lru_cache(maxsize=8)
def _causal_block_mask(sequence_length: int, window: int | None, device: torch.device) -> Any:
    def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return k <= q if window is None else (k <= q) & (q - k < window)

    return _block_mask(sees, None, sequence_length, device)


def _block_mask(sees: Callable[..., torch.Tensor], batch_size: int | None, sequence_length: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(sees, batch_size, None, sequence_length, sequence_length, device=str(device))


@functools.cache
def _flex_kernel(compiled: bool) -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention  # type: ignore[return-value]


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float = 0.0
) -> torch.Tensor:
    """SDPA. query: [s_q, b, n, d]; key, value: [s_k, b, g, d]; mask: boolean [1 or b, 1, s_q, s_k], True = may be seen,
    or None = causal (s_q == s_k). On CPU 16-bit inputs are computed in fp32: torch's 16-bit kernel is many times slower
    there on processors without bf16 instructions, and no faster on others. Returns [s_q, b, n x d]."""
    dtype = query.dtype
    if query.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        query, key, value = query.float(), key.float(), value.float()
    query, key, value = _heads_first(query, key, value)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)
    return _merge_heads(out).to(dtype)


def _heads_first(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[b, n, s, d] views, with key and value heads repeated for their group of query heads."""
    query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    repeats = query.size(1) // key.size(1)
    if repeats > 1:
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    return query, key, value


def _merge_heads(out: torch.Tensor) -> torch.Tensor:
    """[b, n, s, d] -> [s, b, n x d]."""
    return out.permute(2, 0, 1, 3).flatten(2)
