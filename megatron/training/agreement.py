"""Agreement: one rank's trouble becomes every rank's error, said once, so that nobody hangs in a collective."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed

from megatron.core.errors import MegatronError

T = TypeVar("T")
E = TypeVar("E", bound=MegatronError)


def gather_texts(text: str | None) -> list[str | None]:
    """Every rank's text, in rank order; a collective over all ranks."""
    if not torch.distributed.is_initialized():
        return [text]
    texts: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(texts, text)
    return texts


def own_rank() -> int:
    """This process's global rank; 0 without torch.distributed."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def print_rank_0(*values: Any) -> None:
    """Print on rank 0 only, at once."""
    if own_rank() == 0:
        print(*values, flush=True)


def known_to_all(error: E) -> E:
    """An error that every rank raises alike: the first one reports it."""
    error.reported = own_rank() == 0
    return error


def on_all_ranks(work: Callable[[], T]) -> T:
    """Run `work` (which must not communicate); if it fails with a MegatronError or OSError on any rank, raise on every rank.

    The first failed rank's error is raised everywhere, with its class's exit code; only that rank reports it.
    """
    error: MegatronError | None = None
    result: T | None = None
    try:
        result = work()
    except MegatronError as caught:
        error = caught
    except OSError as caught:
        error = MegatronError(str(caught))
    texts = gather_texts(None if error is None else f"{type(error).__name__}\0{error.exit_code}\0{error}")
    failed = [(rank, text) for rank, text in enumerate(texts) if text is not None]
    if not failed:
        return result  # type: ignore[return-value]
    culprit, text = failed[0]
    name, code, message = text.split("\0", 2)
    if error is None or own_rank() != culprit:
        error = MegatronError(f"rank {culprit} failed: {name}: {message}")
        error.exit_code = int(code)
    error.reported = own_rank() == culprit
    raise error


def fail_together(error_class: type[MegatronError], reports: list[str | None], summary: str) -> None:
    """Raise `error_class` on every rank with the texts of all ranks that had one; the first such rank reports it."""
    known = [(rank, text) for rank, text in enumerate(reports) if text]
    error = error_class("; ".join([summary, *(f"rank {rank}: {text}" for rank, text in known)]))
    error.reported = own_rank() == (known[0][0] if known else 0)
    raise error
