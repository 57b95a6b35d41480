"""Timers: named stopwatches with Megatron's call form, `timers("forward", log_level=1).start()`."""

import time
from collections.abc import Sequence

import torch

from megatron.core.errors import ConfigError

MAX_LOG_LEVEL = 2


class Timer:
    """A stopwatch. On a GPU it waits for the device, so that the time covers the work that was started."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._total = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """Begin an interval. Raises ConfigError if one is running."""
        if self._started is not None:
            raise ConfigError(f"timer {self.name!r} is running already; stop() it before start()")
        self._started = _now()

    def stop(self) -> None:
        """End the interval. Raises ConfigError if none is running."""
        if self._started is None:
            raise ConfigError(f"timer {self.name!r} is not running; start() it before stop()")
        self._total += _now() - self._started
        self._started = None

    def reset(self) -> None:
        """Forget all intervals."""
        self._total = 0.0
        self._started = None

    def elapsed(self, reset: bool = True) -> float:
        """Seconds of all intervals, a running one included, which goes on; with `reset` the sum starts anew."""
        now = _now() if self._started is not None else 0.0
        running = 0.0 if self._started is None else now - self._started
        total = self._total + running
        if reset:
            self._total = 0.0
            self._started = None if self._started is None else now
        else:
            self._total, self._started = total, None if self._started is None else now
        return total


class _SilentTimer(Timer):
    """A timer above the log level: costs nothing, shows nothing."""

    def start(self) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class Timers:
    """Stopwatches by name. log_level: 0 shows timers of level 0 only, 2 all; others are not measured."""

    def __init__(self, log_level: int = 0) -> None:
        if not 0 <= log_level <= MAX_LOG_LEVEL:
            raise ConfigError(f"timing log level must be 0 to {MAX_LOG_LEVEL}, got {log_level}")
        self.log_level = log_level
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        """The timer `name`, made at the first call with the level it belongs to."""
        if not 0 <= log_level <= MAX_LOG_LEVEL:
            raise ConfigError(f"timer {name!r}: log level must be 0 to {MAX_LOG_LEVEL}, got {log_level}")
        if name not in self._timers:
            self._timers[name] = Timer(name) if log_level <= self.log_level else _SilentTimer(name)
        return self._timers[name]

    def names(self) -> list[str]:
        """Timers that are measured."""
        return [name for name, timer in self._timers.items() if not isinstance(timer, _SilentTimer)]

    def text(self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True) -> str:
        """`name: milliseconds` of the measured timers among `names` (default all), divided by `normalizer`."""
        chosen = [name for name in (self.names() if names is None else names) if name in self.names()]
        return " | ".join(f"{name}: {self._timers[name].elapsed(reset) * 1000.0 / normalizer:.2f}" for name in chosen)

    def log(self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True) -> None:
        """Print `text` with its unit, when there is something to print."""
        text = self.text(names, normalizer, reset)
        if text:
            print(f"time (ms) | {text}", flush=True)


def _now() -> float:
    """Seconds of the monotonic clock, after the device is done."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
