"""Teams of rank processes, one team per engine, of which one works at a time.

Engines with global state (DeepSpeed, megatron-core) can't share a process, so each has processes of its own. All teams are alive
together; the driver lets them take turns in rotated order, while the others block in a read:

    driver --"turn"--> team A: rank 0, rank 1      team B: blocked      team C: blocked
    driver --"turn"--> team B: rank 0, rank 1      team A: blocked ...
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parent))  # engine_worker.py imports its neighbours by their bare names

from engines import KINDS, PHASES, Setup
from plain_gpt import TINY, Job

from scripts.bench.peer_environment import python_of, reason_against

WORKER = pathlib.Path(__file__).resolve().parent / "engine_worker.py"
MIB = 2**20
START_LIMIT_S = 240.0
ANSWER_LIMIT_S = 240.0
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "VIRTUAL_ENV")


def job_of(tiny: bool, layers: int) -> Job:
    """R, or what was asked for instead."""
    return TINY if tiny else Job(layers=layers)


class TeamFailed(Exception):
    """An engine could not be started, or broke off; the message says why."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where ranks run: command before each rank's (empty: as it is), address of rank 0, further environment."""

    prefixes: tuple[tuple[str, ...], ...]
    address: str = "127.0.0.1"
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @staticmethod
    def here(ranks: int) -> "Placement":
        """On this machine, over the loopback."""
        return Placement(((),) * ranks)


class Team:
    """The processes of one engine."""

    def __init__(self, key: str, setup: Setup, placement: Placement, environment: pathlib.Path, logs: pathlib.Path) -> None:
        self.kind, self.ranks = KINDS[key], len(placement.prefixes)
        self.idle_loads: list[float] = []
        self.processes: list[subprocess.Popen[str]] = []
        self.logs = [logs / f"rank{rank}.log" for rank in range(self.ranks)]
        python = sys.executable
        if self.kind.package is not None:
            reason = reason_against(environment, self.kind.package)
            if reason:
                raise TeamFailed(reason)
            python = str(python_of(environment))
        port = free_port()
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        for rank, prefix in enumerate(placement.prefixes):
            variables = {"RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": self.ranks}
            variables |= {"MASTER_ADDR": placement.address, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            kept = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
            self.processes.append(
                subprocess.Popen(
                    [*prefix, python, str(WORKER)],
                    env=kept | {name: str(value) for name, value in variables.items()} | dict(placement.environment),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.logs[rank].open("w"),
                    text=True,
                    start_new_session=True,
                )
            )
            core = cores[rank % len(cores)] if cores else None
            self._send(rank, {"engine": key, "setup": dataclasses.asdict(setup), "core": core})

    def wait_until_ready(self) -> None:
        """The engine is built on every rank."""
        self._answers(START_LIMIT_S)

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        """Have every rank do something; their answers in rank order."""
        for rank in range(self.ranks):
            self._send(rank, request)
        answers = self._answers(ANSWER_LIMIT_S)
        self.idle_loads += [answer["idle_load"] for answer in answers]
        return answers

    def end(self) -> None:
        """Stop the processes."""
        for process in self.processes:
            with contextlib.suppress(OSError, ValueError):
                assert process.stdin is not None
                process.stdin.close()  # a worker that reads nothing more ends
        deadline = time.monotonic() + 5
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _send(self, rank: int, request: dict[str, Any]) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except OSError:
            raise TeamFailed(self._reason(rank)) from None

    def _answers(self, limit_s: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.ranks:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TeamFailed(f"no answer within {limit_s:.0f} s")
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        raise TeamFailed(self._reason(key.data))
                    answers[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.ranks)]

    def _reason(self, rank: int) -> str:
        """Why a rank ended: a signal to any of the team first, since the others then lose their connection; else its last error."""
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        for index, process in enumerate(self.processes):
            if process.returncode is not None and process.returncode < 0:
                number = -process.returncode
                return f"rank {index} was ended by signal {number}{' (out of memory?)' if number == signal.SIGKILL else ''}"
        lines = [line.strip() for line in self.logs[rank].read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)]
        return f"rank {rank} ended: {(errors or lines or ['without a message'])[-1]}"


def heats(keys: Sequence[str], always: Sequence[str], setup: Setup, ranks: int, limit: int | None = None) -> list[list[str]]:
    """The engines in as many groups as memory asks for; those of `always` take part in each.

    limit: engines that are alive together; None = as many as wait in 70 % of the memory available now, the rest being for the one
        that works.
    """
    if limit is None:
        limit = int(0.7 * available_memory() / waiting_bytes(setup, ranks))
    common = [key for key in always if key in keys]
    others = [key for key in keys if key not in common]
    room = max(1, limit - len(common))
    number = max(1, -(-len(others) // room))
    size = max(1, -(-len(others) // number))
    parts = [others[index * size : (index + 1) * size] for index in range(number)]
    return [sorted(common + part, key=list(KINDS).index) for part in parts if part or number == 1]


def waiting_bytes(setup: Setup, ranks: int) -> int:
    """What a team holds while it waits, at most: state and buffers, and what a process with torch keeps for itself."""
    return ranks * (20 * parameters(setup.job) + 150 * MIB)


def check_memory(needed: int) -> None:
    """Ends the benchmark before the kernel ends one of its processes."""
    available = available_memory()
    if needed > 0.8 * available:
        raise SystemExit(
            f"this needs about {needed / 2**30:.0f} GiB of memory, {available / 2**30:.0f} are available; ask for less at once"
        )


def parameters(job: Job) -> int:
    """Elements of the plain model in job R's kind of layers."""
    layer = 4 * job.hidden**2 + 3 * job.hidden * job.ffn + 2 * job.hidden
    return 2 * job.vocab * job.hidden + job.layers * layer + job.hidden


def available_memory() -> int:
    """Bytes; without /proc/meminfo a guess."""
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return 8 << 30


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclasses.dataclass
class Turn:
    """One turn of one engine: seconds per step of the slowest rank, phases (means over steps and ranks), bytes sent.

    sent: per step by the rank that sent most; counted around the turn, so its share of start and end is in it.
    """

    seconds: float
    phases: dict[str, float]
    sent: float


class Contest:
    """The teams of one line of results, and what they gave. `failures`: engine -> why it is out."""

    def __init__(self, setup: Setup, teams: dict[str, Team], failures: dict[str, str]) -> None:
        self.setup, self.teams, self.failures = setup, teams, failures
        self.turns: dict[str, list[Turn]] = {key: [] for key in teams}

    def check_losses(self, steps: int, allowed: float) -> dict[str, list[float]]:
        """First losses on one batch: equal at the start, and after `steps` - 1 updates fallen equally far.

        allowed: relative, of the first loss; a hundred times that of the fall, which in bf16 is compared among engines with the
        same kind of update.
        """
        losses: dict[str, list[float]] = {}
        for key in list(self.teams):
            answers = self._ask(key, do="losses", steps=steps)
            if answers is not None:
                losses[key] = [statistics.fmean(values) for values in zip(*(a["losses"] for a in answers), strict=True)]
        check_close("first loss", {key: values[0] for key, values in losses.items()}, allowed)
        trained = [key for key in losses if KINDS[key].updates != "none"]
        for kind in sorted({KINDS[key].updates for key in trained}) if self.setup.dtype == "bf16" else [""]:
            members = [key for key in trained if kind in ("", KINDS[key].updates)]
            check_close("fall of the loss", {key: losses[key][0] - losses[key][-1] for key in members}, 100 * allowed)
        return losses

    def warm_up(self) -> None:
        """A step of each."""
        for key in list(self.teams):
            self._ask(key, do="losses", steps=1)

    def run(self, turns: int, steps: int, sent: Callable[[], list[int]] | None = None) -> None:
        """`turns` turns in rotated order. `check_losses` or `warm_up` came before. sent: bytes that each rank has sent so far."""
        for turn in range(turns):
            keys = list(self.teams)
            start = turn % len(keys) if keys else 0
            for key in keys[start:] + keys[:start]:
                before = sent() if sent is not None else [0]
                answers = self._ask(key, do="turn", steps=steps)
                after = sent() if sent is not None else [0]
                if answers is not None:
                    most = max(end - begin for begin, end in zip(before, after, strict=True))
                    self.turns[key].append(_turn(answers, most / (steps + 1)))

    def reports(self) -> dict[str, list[dict[str, Any]]]:
        """Memory and model state of each engine's ranks."""
        found = {}
        for key in list(self.teams):
            answers = self._ask(key, do="report")
            if answers is not None:
                found[key] = answers
        return found

    def seconds(self) -> dict[str, list[float]]:
        """Per engine that is still in: seconds per step, turn by turn."""
        return {key: [turn.seconds for turn in self.turns[key]] for key in self.teams}

    def _ask(self, key: str, **request: Any) -> list[dict[str, Any]] | None:
        try:
            return self.teams[key].ask(**request)
        except TeamFailed as failed:
            self.failures[key] = str(failed)
            self.teams.pop(key).end()
            return None


def check_close(what: str, values: Mapping[str, float], allowed: float) -> None:
    """Ends the benchmark where an engine's value is not the median one."""
    finite = [value for value in values.values() if math.isfinite(value)]
    middle = statistics.median(finite) if finite else math.nan
    for key, value in values.items():
        if not abs(value - middle) <= allowed * abs(middle):
            raise SystemExit(f"{key}: {what} {value:.6g} is not the others' {middle:.6g}: the engines don't train the same")


def _turn(answers: Sequence[dict[str, Any]], sent: float) -> Turn:
    phases = {phase: statistics.fmean(answer["phases"][phase] for answer in answers) for phase in PHASES}
    return Turn(max(statistics.fmean(answer["seconds"]) for answer in answers), phases, sent)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A contestant: engine, job and batch, ranks."""

    key: str
    setup: Setup
    placement: Placement


@contextlib.contextmanager
def teams_of(entries: Mapping[str, Entry], environment: pathlib.Path) -> Iterator[tuple[dict[str, Team], dict[str, str]]]:
    """Start a team per entry; afterwards they are gone, whatever happened. Gives the teams, and why others could not start."""
    teams: dict[str, Team] = {}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bench-teams-") as folder:
        try:
            for index, (name, entry) in enumerate(entries.items()):
                logs = pathlib.Path(folder, str(index))
                logs.mkdir()
                try:
                    teams[name] = Team(entry.key, entry.setup, entry.placement, environment, logs)
                except TeamFailed as failed:
                    failures[name] = str(failed)
            for name in list(teams):
                try:
                    teams[name].wait_until_ready()
                except TeamFailed as failed:
                    failures[name] = str(failed)
                    teams.pop(name).end()
            yield teams, failures
        finally:
            for team in teams.values():
                team.end()


@contextlib.contextmanager
def contest(keys: Sequence[str], setup: Setup, placement: Placement, environment: pathlib.Path) -> Iterator[Contest]:
    """Engines on one job. What can't start is in `failures`."""
    with teams_of({key: Entry(key, setup, placement) for key in keys}, environment) as (teams, failures):
        yield Contest(setup, teams, failures)
