"""A slow network on one machine: two network namespaces joined by a veth pair whose both ends send at a limited rate.

    namespace 0                    namespace 1
    rank 0 -- link0 10.0.0.1 ====== link0 10.0.0.2 -- rank 1        ==== token bucket filter, 1 Gbit/s each way

Nothing of it exists outside the two namespaces, whose names hold this process's number: removing them removes all, and what a
killed benchmark left behind is told apart from what a running one uses. Needs root and iproute2.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

DEVICE = "link0"
PREFIX = "megadlms-bench-"
NAMESPACES = pathlib.Path("/run/netns")


class LinkError(Exception):
    """No slow link can be made here; the message says why and what to do."""


def missing() -> str | None:
    """What this machine lacks for a slow link; None = nothing that can be told beforehand."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "a slow link needs root (network namespaces and traffic control); run this script as root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"a slow link needs the command {tool}; install iproute2 (on Debian or Ubuntu: apt-get install iproute2)"
    return None


class SlowLink:
    """Context manager: the two namespaces and the link between them.

    rate: as `tc` reads it, for example 1gbit.
    """

    def __init__(self, rate: str) -> None:
        self.rate = rate
        self.names = tuple(f"{PREFIX}{os.getpid()}-{index}" for index in range(2))
        self.addresses = ("10.0.0.1", "10.0.0.2")

    def __enter__(self) -> "SlowLink":
        reason = missing()
        if reason:
            raise LinkError(reason)
        try:
            self._build()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *unused: Any) -> None:
        self.remove()

    def _build(self) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
        first, second = self.names
        _run("ip", "link", "add", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second)
        for name, address in zip(self.names, self.addresses, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _run("ip", "-n", name, "link", "set", device, "up")
            _run("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *self._shaper())

    def _shaper(self) -> list[str]:
        return ["tbf", "rate", self.rate, "burst", "256kb", "latency", "50ms"]

    def prefixes(self) -> tuple[tuple[str, ...], ...]:
        """The command that runs another one inside each namespace."""
        return tuple(("ip", "netns", "exec", name) for name in self.names)

    def sent(self) -> list[int]:
        """Bytes that each end has sent, headers included, as the kernel counts them."""
        counts = []
        for name in self.names:
            (link,) = json.loads(_run("ip", "-n", name, "-s", "-j", "link", "show", "dev", DEVICE))
            counts.append(int(link["stats64"]["tx"]["bytes"]))
        return counts

    def remove(self) -> None:
        """Remove what there is of it, interrupted by nothing."""
        with signals_ignored():
            remove_namespaces(self.names)


def remove_namespaces(names: tuple[str, ...]) -> None:
    """End what runs in them, then remove them; those that don't exist are left out."""
    for name in names:
        if not (NAMESPACES / name).exists():
            continue
        with contextlib.suppress(LinkError):
            for pid in _run("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(LinkError):
            _run("ip", "netns", "delete", name)


def left_behind() -> tuple[str, ...]:
    """Namespaces of benchmarks whose process is gone."""
    if not NAMESPACES.is_dir():
        return ()
    names = (path.name for path in NAMESPACES.iterdir() if path.name.startswith(PREFIX))
    return tuple(sorted(name for name in names if not _alive(name.removeprefix(PREFIX).split("-")[0])))


def _alive(pid: str) -> bool:
    return pid.isdigit() and pathlib.Path("/proc", pid).exists()


@contextlib.contextmanager
def signals_end_the_run() -> Iterator[None]:
    """SIGTERM, SIGHUP and SIGINT leave through all `finally` blocks, with the exit code a shell gives them."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    with _handlers(leave):
        yield


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """For cleaning up: a second Ctrl-C doesn't cut it short."""
    with _handlers(signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _handlers(handler: Any) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise LinkError(f"'{' '.join(command)}' failed: {said or f'exit code {done.returncode}'}")
    return done.stdout
