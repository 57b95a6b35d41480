"""StopSignals: remembers that the process was asked to stop; the trainer looks at it at points where all ranks can agree."""

import signal
import threading
from types import FrameType
from typing import Any

GRACEFUL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignals:
    """Context manager that turns SIGTERM, SIGUSR1 and the first SIGINT into a flag.

    A second SIGINT (an impatient Ctrl-C) raises KeyboardInterrupt; repeated SIGTERM and SIGUSR1 change nothing, so a scheduler
    that signals twice does not tear a save apart. Off the main thread, or when `enabled` is False, nothing is installed.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.received: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if self.enabled and threading.current_thread() is threading.main_thread():
            for number in GRACEFUL:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
