"""Megatron's process-wide variables: arguments, timers, tokenizer. For entry points, facades and tests; library code is passed
what it needs."""

from typing import TypeVar

from megatron.core.errors import ParallelStateError
from megatron.core.timers import Timers
from megatron.core.tokenizers import Tokenizer
from megatron.training.arguments import Arguments

_T = TypeVar("_T")

_args: Arguments | None = None
_timers: Timers | None = None
_tokenizer: Tokenizer | None = None


def get_args() -> Arguments:
    """The run's arguments. Raises ParallelStateError before `set_args`."""
    return _present(_args, "arguments", "set_args(args) or initialize_megatron()")


def get_timers() -> Timers:
    """The run's timers. Raises ParallelStateError before `set_timers`."""
    return _present(_timers, "timers", "set_timers(timers) or initialize_megatron()")


def get_tokenizer() -> Tokenizer:
    """The run's tokenizer. Raises ParallelStateError before `set_tokenizer`."""
    return _present(_tokenizer, "tokenizer", "set_tokenizer(tokenizer) or initialize_megatron()")


def set_args(args: Arguments) -> None:
    """Install the arguments."""
    global _args
    _args = args


def set_timers(timers: Timers) -> None:
    """Install the timers."""
    global _timers
    _timers = timers


def set_tokenizer(tokenizer: Tokenizer) -> None:
    """Install the tokenizer."""
    global _tokenizer
    _tokenizer = tokenizer


def set_global_variables(args: Arguments, *, timers: Timers | None = None, tokenizer: Tokenizer | None = None) -> None:
    """Install the arguments, and timers (new ones by default) and tokenizer with them."""
    set_args(args)
    set_timers(timers if timers is not None else Timers(args.timing_log_level))
    if tokenizer is not None:
        set_tokenizer(tokenizer)


def unset_global_variables() -> None:
    """Forget everything that was installed."""
    global _args, _timers, _tokenizer
    _args, _timers, _tokenizer = None, None, None


def _present(value: _T | None, what: str, how: str) -> _T:
    if value is None:
        raise ParallelStateError(f"the {what} of this process are not set; call {how} first")
    return value
