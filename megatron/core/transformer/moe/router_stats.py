"""RouterStats: what one router's choices of a step amount to on one rank."""

from collections.abc import Mapping

import torch

SUMS = ("weight", "balancing", "z", "dropped")


class RouterStats:
    """One router's sums since `reset`: counts [E] of chosen tokens before any drop, and `SUMS`, the losses times their weights."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self.counts: torch.Tensor | None = None
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, weight: torch.Tensor | float, figures: Mapping[str, torch.Tensor]) -> None:
        """One microbatch. figures: counts, and those of balancing, z, dropped that there are."""
        counts = figures["counts"]
        self.counts = counts if self.counts is None else self.counts + counts
        wide = torch.as_tensor(weight, dtype=torch.float64, device=counts.device)
        found = {"weight": wide, **{name: figures[name].double() * wide for name in ("balancing", "z") if name in figures}}
        if "dropped" in figures:
            found["dropped"] = figures["dropped"].double()
        for name, value in found.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
