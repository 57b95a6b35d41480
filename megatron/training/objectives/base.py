"""Objective: what is learned, as a transformation of the batch and a reduction of the per-token loss; never a fork of the model."""

import dataclasses
from typing import Protocol

import torch


@dataclasses.dataclass(frozen=True)
class ModelBatch:
    """One microbatch as the model takes it.

    tokens, labels, position_ids: int64 [b, s]. loss_weights: float32 [b, s], 0 where nothing is learned.
    document_ids: int64 [b, s] when attention must stay inside documents, else None.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_weights: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor | None


class Objective(Protocol):
    """Prepares a microbatch and reduces the loss. Noise, if any, is keyed by (seed, sample id), so that it agrees over layouts."""

    name: str

    def prepare(self, batch: dict[str, torch.Tensor], *, seed: int) -> ModelBatch:
        """The model's inputs for a batch of the data set (see `megatron.training.data`)."""
        ...

    def reduce(self, token_losses: torch.Tensor, batch: ModelBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of weighted losses, fp32 scalar; number of counted tokens, int64 scalar) from token_losses [b, s]."""
        ...


def weighted_sum(token_losses: torch.Tensor, batch: ModelBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of loss x weight in at least fp32, and the number of tokens with a weight."""
    weights = batch.loss_weights
    losses = token_losses if token_losses.dtype == torch.float64 else token_losses.float()
    return (losses * weights).sum(), weights.count_nonzero()
