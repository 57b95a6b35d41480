"""Next-token prediction."""

import torch

from megatron.training.objectives.base import ModelBatch, weighted_sum


class CausalLM:
    """Every unmasked token of the global batch weighs the same."""

    name = "causal_lm"

    def prepare(self, batch: dict[str, torch.Tensor], *, seed: int) -> ModelBatch:
        """Tokens and labels as the data set gives them; no noise."""
        return ModelBatch(
            tokens=batch["tokens"],
            labels=batch["labels"],
            loss_weights=batch["loss_mask"],
            position_ids=batch["position_ids"],
            document_ids=batch.get("document_ids"),
        )

    def reduce(self, token_losses: torch.Tensor, batch: ModelBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Objective.reduce`."""
        return weighted_sum(token_losses, batch)
