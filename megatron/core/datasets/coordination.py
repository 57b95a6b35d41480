"""How ranks that build data sets together agree, without the data sets knowing what joins them."""

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class BuildCoordinator(Protocol):
    """The other ranks, as data sets see them. `run` and `gather` are called by all ranks in the same order.

    is_builder: this rank builds indices first, and the others find them in the cache (one such rank per machine).
    """

    @property
    def is_builder(self) -> bool:
        """Whether this rank builds first."""

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` on this rank and wait for the others; if it fails on any rank, raise on every rank."""

    def gather(self, text: str) -> list[str | None]:
        """Every rank's text, in rank order."""


class SingleProcess:
    """Coordination of one process with itself."""

    @property
    def is_builder(self) -> bool:
        """Always."""
        return True

    def run(self, work: Callable[[], T]) -> T:
        """Run it."""
        return work()

    def gather(self, text: str) -> list[str | None]:
        """The one text."""
        return [text]
