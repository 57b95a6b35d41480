"""Timers under Megatron's names: `timers("forward", log_level=1).start()`, `.stop()`, `.elapsed()` in seconds."""

import time

from megatron.core.errors import MegatronError


class Timer:
    """Accumulates wall time between start and stop; may run many times."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._total = 0.0
        self._begun: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Begin an interval."""
        if self._begun is not None:
            raise MegatronError(f"timer {self.name!r} is running already")
        self._begun = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """End the interval."""
        if self._begun is None:
            raise MegatronError(f"timer {self.name!r} was not started")
        self._total += time.perf_counter() - self._begun
        self._begun = None

    def elapsed(self, reset: bool = True) -> float:
        """Seconds so far."""
        running = 0.0 if self._begun is None else time.perf_counter() - self._begun
        total = self._total + running
        if reset:
            self._total = 0.0
            self._begun = None if self._begun is None else time.perf_counter()
        return total


class _SilentTimer(Timer):
    """Stands for a timer above the log level: does nothing."""

    def start(self, barrier: bool = False) -> None:
        """Nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Nothing."""


class Timers:
    """Timers by name; those above `log_level` cost nothing."""

    def __init__(self, log_level: int = 0) -> None:
        self.log_level = log_level
        self._timers: dict[str, Timer] = {}
        self._silent = _SilentTimer("silent")

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        """The timer of this name, made at its first use."""
        if name not in self._timers:
            if log_level > self.log_level:
                return self._silent
            self._timers[name] = Timer(name)
        return self._timers[name]

    def elapsed(self, reset: bool = True) -> dict[str, float]:
        """Seconds by timer."""
        return {name: timer.elapsed(reset) for name, timer in self._timers.items()}
