"""Gradients of weights as work for later: what splits a backward into B (gradient of the input) and W (of the weights).

Inside `DeferredGrads.recording()` the backward of a linear layer leaves its weight's gradient, a matrix product, to `run`. Sums
and their order are those of an undivided backward (Qi et al. 2023, section 2).
"""

import contextlib
from collections.abc import Callable, Iterator

import torch

_active: "DeferredGrads | None" = None


class DeferredGrads:
    """The postponed gradients of one microbatch in one model chunk."""

    def __init__(self) -> None:
        self._work: list[tuple[torch.Tensor, Callable[[], None]]] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Backwards inside hand over their weights' gradients."""
        global _active
        before, _active = _active, self
        try:
            yield
        finally:
            _active = before

    def add(self, weight: torch.Tensor, work: Callable[[], None]) -> None:
        """`work` puts a gradient into `weight.main_grad`; until it has run, the parameter's gradient is not complete."""
        weight.deferred_main_grads = getattr(weight, "deferred_main_grads", 0) + 1  # type: ignore[attr-defined]
        self._work.append((weight, work))

    @torch.no_grad()
    def run(self) -> None:
        """Form the gradients, in the order of the backward, and tell each parameter's buffer when its last one is there."""
        work, self._work = self._work, []
        for index, (weight, form) in enumerate(work):
            form()
            work[index] = (weight, _nothing)  # frees the activations
            weight.deferred_main_grads -= 1  # type: ignore[attr-defined]
            if all(weight is not later for later, _ in work[index + 1 :]):
                weight.main_grad_done()  # type: ignore[attr-defined]


def active_deferral() -> DeferredGrads | None:
    """Where the running backward leaves its weights' gradients; None = it forms them itself."""
    return _active


def _nothing() -> None:
    return
