"""AttentionBackend: the one protocol behind which attention kernels stand, and what their masks mean.

A query sees a key of the same row iff key position <= query position, and, where asked, within the sliding window and inside the
same document. `prepare` turns that into the kernel's own form once per batch; every layer then calls `attend` with it.
"""

from typing import Any, Protocol

import torch

from megatron.core.transformer.transformer_config import TransformerConfig


class AttentionBackend(Protocol):
    """Causal attention over packed rows. Constructed as `Backend(config)` after `supports` returned None."""

    name: str

    def __init__(self, config: TransformerConfig) -> None: ...

    @staticmethod
    def supports(config: TransformerConfig, device: torch.device) -> str | None:
        """None if this backend can run the model on the device, else the reason why not."""
        ...

    def prepare(self, batch_size: int, sequence_length: int, document_ids: torch.Tensor | None, device: torch.device) -> Any:
        """What `attend` needs to know about the batch. document_ids: int [b, s], equal inside a document, or None."""
        ...

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prepared: Any, dropout: float
    ) -> torch.Tensor:
        """query: [s, b, n, d]; key, value: [s, b, g, d], any strides; dropout: probability, 0 in evaluation. -> [s, b, n x d]."""
        ...


def visible(
    query_positions: torch.Tensor, key_positions: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Boolean mask, True where the key may be seen, broadcast over both index tensors: causal, inside the window."""
    mask = key_positions <= query_positions
    if window is not None:
        mask = mask & (query_positions - key_positions < window)
    return mask


def dense_mask(sequence_length: int, document_ids: torch.Tensor | None, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean [1 or b, 1, s, s], True where the key may be seen."""
    index = torch.arange(sequence_length, device=device)
    mask = visible(index[:, None], index[None, :], window)[None, None]
    if document_ids is not None:
        mask = mask & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return mask
