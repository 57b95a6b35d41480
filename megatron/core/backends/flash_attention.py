"""Attention by the flash-attn package: causal and sliding window directly, packed documents as sequences of varying length."""

import dataclasses

import torch

from megatron.core.backends.optional import probe
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class PackedLengths:
    """Documents of a batch laid end to end. boundaries: int32 [documents + 1] offsets into the b x s tokens."""

    boundaries: torch.Tensor
    longest: int


def packed_lengths(document_ids: torch.Tensor) -> PackedLengths:
    """Where documents start in the flattened [b, s] batch; a row always starts a new one."""
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    offsets = starts.flatten().nonzero().squeeze(1)
    end = torch.tensor([document_ids.numel()], device=offsets.device)
    boundaries = torch.cat((offsets, end)).to(torch.int32)
    return PackedLengths(boundaries, int(boundaries.diff().max()))


class FlashAttention:
    """flash_attn_func and flash_attn_varlen_func."""

    name = "flash"

    def __init__(self, config: TransformerConfig) -> None:
        self._window = (-1, -1) if config.window_size is None else (config.window_size - 1, 0)

    @staticmethod
    def supports(config: TransformerConfig, device: torch.device) -> str | None:
        """CUDA, 16-bit, heads up to 256, package installed."""
        if device.type != "cuda":
            return f"flash-attn needs a CUDA device, the model is on {device.type}"
        if config.params_dtype not in (torch.bfloat16, torch.float16):
            return "flash-attn computes in bf16 or fp16 only, the model is fp32"
        if config.head_dim > 256:
            return f"flash-attn takes heads up to 256, the model's are {config.head_dim}"
        found = probe("flash_attn")
        return None if found.usable else f"flash_attn: {found.reason}"

    def prepare(
        self, batch_size: int, sequence_length: int, document_ids: torch.Tensor | None, device: torch.device
    ) -> PackedLengths | None:
        """Document boundaries, or None when each row is one sequence."""
        return None if document_ids is None else packed_lengths(document_ids)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prepared: PackedLengths | None, dropout: float
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        flash_attn = probe("flash_attn").module
        assert flash_attn is not None, "constructed although supports() gave a reason"
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        options = {"dropout_p": dropout, "causal": True, "window_size": self._window}
        if prepared is None:
            out = flash_attn.flash_attn_func(query, key, value, **options)
        else:
            packed = (part.reshape(-1, *part.shape[2:]) for part in (query, key, value))
            out = flash_attn.flash_attn_varlen_func(
                *packed,
                cu_seqlens_q=prepared.boundaries,
                cu_seqlens_k=prepared.boundaries,
                max_seqlen_q=prepared.longest,
                max_seqlen_k=prepared.longest,
                **options,
            ).view(query.shape)
        return out.transpose(0, 1).flatten(2)
