"""Sampling: from logits to a token, by greedy choice or by temperature, top-k and top-p. Each row has its own random stream."""

import dataclasses
from collections.abc import Sequence

import torch

from megatron.core.errors import ConfigError
from megatron.core.seeding import derive_seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen. Order: temperature, then the top_k most probable, of these the nucleus top_p.

    greedy: the most probable token (the smallest id of equals); the other fields do not matter. temperature 0 means the same.
    top_k: 0 = all. top_p: the smallest set of most probable tokens whose probability reaches it; 1 = all.
    seed: of the random streams; row i draws from the stream (seed, its sample id).

    Raises ConfigError, naming every wrong field.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.temperature < float("inf"):
            problems.append(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k < 0:
            problems.append(f"top_k must be 0 (all tokens) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.seed < 0:
            problems.append(f"seed must be 0 or more, got {self.seed}")
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def takes_best(self) -> bool:
        """Whether no random number is needed."""
        return self.greedy or self.temperature == 0


class RowStreams:
    """One random stream per row, keyed by (seed, sample id), so that a row's draws do not depend on the other rows."""

    def __init__(self, seed: int, sample_ids: Sequence[int]) -> None:
        self._generators = []
        for sample_id in sample_ids:
            generator = torch.Generator()
            generator.manual_seed(derive_seed(seed, "sample", sample_id))
            self._generators.append(generator)

    def uniform(self) -> torch.Tensor:
        """The next number of each row: float64 [b] in [0, 1), on CPU."""
        return torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in self._generators])


def choose(logits: torch.Tensor, sampling: Sampling, uniform: torch.Tensor | None = None) -> torch.Tensor:
    """One token per row, int64 [b].

    Args:
        logits: [b, V], any float dtype; -inf forbids a token.
        uniform: float64 [b] in [0, 1); needed unless `sampling.takes_best`.
    """
    if sampling.takes_best:
        return logits.argmax(dim=-1)
    assert uniform is not None, "sampling without random numbers"
    probabilities, ids = kept_probabilities(logits, sampling)
    cumulative = probabilities.cumsum(dim=-1)
    target = uniform.to(logits.device).unsqueeze(-1) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True)
    last = (probabilities > 0).sum(dim=-1, keepdim=True) - 1
    return ids.gather(-1, torch.minimum(place, last)).squeeze(-1)


def kept_probabilities(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities float64 [b, V] in descending order, 0 for the tokens that are not kept; their ids int64 [b, V]).

    They are normalised over the top_k tokens; with top_p < 1 they sum to what the nucleus holds of that.
    """
    ordered, ids = (logits.double() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered[:, sampling.top_k :] = float("-inf")
    probabilities = torch.softmax(ordered, dim=-1)
    if sampling.top_p < 1:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = torch.where(before < sampling.top_p, probabilities, 0.0)
    return probabilities, ids
