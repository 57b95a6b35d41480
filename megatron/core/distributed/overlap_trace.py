"""Trace of one step: which collectives were in flight under which compute, and where the training thread waited for them.

    training thread      | forward layer 0 |wait| forward layer 1 | ... | backward layer 1 | backward layer 0 |wait| update |
    parameter gather     ===== bucket 1 =======|
    gradient reduction                                                    ======== bucket 0 ==================|

`OverlapTrace` listens on one rank, `clock_reference` finds an instant that all ranks know, `chrome_trace` merges what the ranks
have seen into one Chrome trace (JSON; opens in Perfetto and chrome://tracing). Hooks and observers exist for that step only and
change no number.

Times are the host's. The wait slices are what `exposed_comm_time_s` sums up, neither more nor less. A collective ends where its
arrival was first seen: at the next boundary of a slice where the backend can be asked, else in the wait.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron.core import collectives
from megatron.core.collectives import Group, Work
from megatron.core.distributed.param_and_grad_buffer import BucketEvent, ReduceState, _ParamAndGradBucketGroup

THREAD, REDUCE, SECOND_REDUCE, GATHER = range(4)
ROWS = ("training thread", "gradient reduction", "reduction between instances", "parameter gather")
LANES = 100  # thread ids of a row: row x LANES and up, since collectives of one kind overlap

_CLOCK_ROUNDS = 5
_NOT_NESTED = ("backward", "optimizer")  # what ends where the next begins


@dataclasses.dataclass(frozen=True)
class Slice:
    """A stretch of time on one row.

    kind: phase, forward, recompute, backward, optimizer, wait or collective. begin, end: seconds of this rank's clock.
    """

    row: int
    kind: str
    name: str
    begin: float
    end: float
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RankRecord:
    """What one rank saw. reference: its clock at the instant that all ranks share. begin, end: of the step."""

    rank: int
    label: str
    reference: float
    begin: float
    end: float
    slices: tuple[Slice, ...]


@dataclasses.dataclass
class _Open:
    kind: str
    name: str
    begin: float


@dataclasses.dataclass
class _Flight:
    """A collective in flight. arrived: when it was first seen to be complete, asked or waited for."""

    row: int
    name: str
    begin: float
    work: Work
    args: dict[str, Any]
    arrived: float | None = None


def compute_units(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The parts of a module that a trace shows one by one, by name: embedding, each layer, final norm, head.

    The module itself, lists (or dicts) of modules, and modules that hold one are opened; everything else is one part, and so is a
    compiled module.
    """
    found = dict(_opened("", module))
    return found or {type(module).__name__: module}


def _opened(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    if _is_compiled(module):
        return
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        opens = any(isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)) for module in (child, *child.children()))
        inner = list(_opened(f"{path}.", child)) if opens else []
        if inner:
            yield from inner
        elif any(True for _ in child.parameters()):
            yield path, child


def _is_compiled(module: torch.nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


class OverlapTrace:
    """Listens to the bucket groups and parts of a rank's model.

        watch()             one step early, so that gathers that are in flight when the step begins have a beginning
        begin() ... end()   the step; between them `phase` marks what the training loop does

    Args:
        groups: all bucket groups, in backward order.
        units: the parts whose forward and backward are shown (while they are in training mode).
    """

    def __init__(self, groups: Sequence[_ParamAndGradBucketGroup], units: Mapping[str, torch.nn.Module]) -> None:
        self.groups, self.units = list(groups), dict(units)
        self._names = {group: f"bucket {index}" for index, group in enumerate(self.groups)}
        self._slices: list[Slice] = []
        self._stack: list[_Open] = []
        self._flights: dict[tuple[_ParamAndGradBucketGroup, int], _Flight] = {}
        self._exposed_before = 0.0
        self._watching = self._recording = False
        self._begun = self._ended = 0.0
        self._undo: list[Callable[[], None]] = []
        self._handlers: dict[BucketEvent, Callable[[_ParamAndGradBucketGroup, float], None]] = {
            BucketEvent.REDUCE_STARTED: lambda group, now: self._fly(group, REDUCE, group.grad_reduce_handle, now),
            BucketEvent.SECOND_REDUCE_STARTED: lambda group, now: self._fly(group, SECOND_REDUCE, group.grad_reduce_handle, now),
            BucketEvent.GATHER_STARTED: lambda group, now: self._fly(group, GATHER, group.param_gather_handle, now),
            BucketEvent.REDUCE_WAITING: self._waiting,
            BucketEvent.GATHER_WAITING: self._waiting,
            BucketEvent.REDUCE_WAITED: lambda group, now: self._waited(group, _reduce_row(group), now),
            BucketEvent.GATHERED: lambda group, now: self._waited(group, GATHER, now),
            BucketEvent.GRADS_READING: self._grads_reading,
            BucketEvent.PARAMS_WRITING: self._params_writing,
            BucketEvent.PARAMS_WRITTEN: lambda group, now: self._end_running(now),
        }

    def watch(self) -> None:
        """Listen to the collectives. Calling it again changes nothing."""
        if self._watching:
            return
        self._watching = True
        for group in self.groups:
            group.observers += (self._on_event,)

    def begin(self) -> None:
        """The step begins: what has ended before is forgotten."""
        self.watch()
        self._slices.clear()
        for name, unit in self.units.items():
            self._undo.append(self._hook_up(name, unit))
        self._recording, self._begun = True, time.perf_counter()

    def end(self) -> None:
        """The step is over; nothing is hooked any more. Collectives in flight are cut off here."""
        now = self._ended = time.perf_counter()
        self._poll(now)
        while self._stack:
            self._close(now)
        for flight in self._flights.values():
            self._land(flight, now, "still in flight at the end of the step")
        self._flights.clear()
        self._watching = self._recording = False
        for group in self.groups:
            group.observers = tuple(observer for observer in group.observers if observer != self._on_event)
        for undo in self._undo:
            undo()
        self._undo.clear()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark what the training loop does within."""
        if not self._recording:
            yield
            return
        self._open("phase", name)
        try:
            yield
        finally:
            self._end_running(time.perf_counter())
            if self._stack:
                self._close(time.perf_counter())

    def record(self, rank: int, label: str, reference: float) -> RankRecord:
        """What was seen between `begin` and `end`."""
        return RankRecord(rank, label, reference, self._begun, self._ended, tuple(self._slices))

    # Collectives

    def _on_event(self, event: BucketEvent, group: _ParamAndGradBucketGroup, param: torch.nn.Parameter | None) -> None:
        handler = self._handlers.get(event)
        if handler is not None:
            now = time.perf_counter()
            self._poll(now)
            handler(group, now)

    def _fly(self, group: _ParamAndGradBucketGroup, row: int, work: Work | None, now: float) -> None:
        size = collectives.group_size(group.reduction.replica_group) if row == SECOND_REDUCE else group.size
        if work is None or size == 1:  # nothing is sent
            return
        tensors = [bucket.param_data if row == GATHER else bucket.grad_data for bucket in group.buckets]
        nbytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        args = {"buckets": group.name, "ranks": size, "bytes": nbytes // group.size if row == SECOND_REDUCE else nbytes}
        self._flights[group, row] = _Flight(row, f"{_collective(group, row)} {self._names[group]}", now, work, args)

    def _waiting(self, group: _ParamAndGradBucketGroup, now: float) -> None:
        self._exposed_before = group.exposed_time_s

    def _waited(self, group: _ParamAndGradBucketGroup, row: int, now: float) -> None:
        exposed = group.exposed_time_s - self._exposed_before
        name = f"{_collective(group, row)} {self._names[group]}"
        self._slices.append(Slice(THREAD, "wait", f"wait for {name}", now - exposed, now))
        flight = self._flights.pop((group, row), None)
        if flight is not None:
            flight.args |= {"waited_ms": exposed * 1e3}
            asked = flight.arrived is not None
            self._land(flight, now, "seen at a boundary before the wait" if asked else "seen in the wait")

    def _land(self, flight: _Flight, now: float, arrival: str) -> None:
        end = now if flight.arrived is None else flight.arrived
        self._slices.append(Slice(flight.row, "collective", flight.name, flight.begin, end, {**flight.args, "arrival": arrival}))

    def _poll(self, now: float) -> None:
        for flight in self._flights.values():
            if flight.arrived is None and flight.work.arrived():
                flight.arrived = now

    # Compute

    def _hook_up(self, name: str, unit: torch.nn.Module) -> Callable[[], None]:
        """Time a part's forward, backward and recomputation; returns what takes the hooks off again."""
        if _is_compiled(unit):  # a hook inside would break the compiled graph
            return self._wrap_compiled(name, unit)
        before = unit.register_forward_pre_hook(lambda module, args: self._forward_begins(name, module), prepend=True)
        after = unit.register_forward_hook(lambda module, args, out: self._forward_ends(name, module, out), always_call=True)

        def undo() -> None:
            before.remove()
            after.remove()

        return undo

    def _wrap_compiled(self, name: str, unit: torch.nn.Module) -> Callable[[], None]:
        compiled: Any = unit._compiled_call_impl

        @functools.wraps(compiled)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._forward_begins(name, unit)
            output = compiled(*args, **kwargs)
            self._forward_ends(name, unit, output)
            return output

        unit._compiled_call_impl = timed  # type: ignore[assignment]
        return functools.partial(setattr, unit, "_compiled_call_impl", compiled)

    def _forward_begins(self, name: str, unit: torch.nn.Module) -> None:
        if unit.training:
            inside_backward = torch._C._current_graph_task_id() != -1
            self._open("recompute" if inside_backward else "forward", name)

    def _forward_ends(self, name: str, unit: torch.nn.Module, output: Any) -> None:
        if not unit.training or not self._stack:
            return
        recomputed = self._stack[-1].kind == "recompute"
        self._close(time.perf_counter())
        for tensor in () if recomputed else tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda grads: self._backward_begins(name))
                return

    def _backward_begins(self, name: str) -> None:
        if self._recording:
            self._open("backward", name)

    def _grads_reading(self, group: _ParamAndGradBucketGroup, now: float) -> None:
        if self._recording and not (self._stack and self._stack[-1].kind == "optimizer"):
            self._open("optimizer", "gradient norm")

    def _params_writing(self, group: _ParamAndGradBucketGroup, now: float) -> None:
        if not self._recording:
            return
        name = f"update {self._names[group]}" if group.ddp_config.use_distributed_optimizer else "update all"
        if not (self._stack and self._stack[-1].name == name):
            self._open("optimizer", name)

    # Slices of the training thread

    def _open(self, kind: str, name: str) -> None:
        now = time.perf_counter()
        if kind != "recompute":
            self._end_running(now)
        self._poll(now)
        self._stack.append(_Open(kind, name, now))

    def _close(self, now: float) -> None:
        self._poll(now)
        top = self._stack.pop()
        name = top.name if top.kind in ("phase", "optimizer") else f"{top.kind} {top.name}"
        self._slices.append(Slice(THREAD, top.kind, name, top.begin, now))

    def _end_running(self, now: float) -> None:
        while self._stack and self._stack[-1].kind in _NOT_NESTED:
            self._close(now)


def _reduce_row(group: _ParamAndGradBucketGroup) -> int:
    return SECOND_REDUCE if group.reduce_state is ReduceState.BETWEEN_INSTANCES else REDUCE


def _collective(group: _ParamAndGradBucketGroup, row: int) -> str:
    if row == GATHER:
        return "all-gather"
    if row == SECOND_REDUCE:
        return "all-reduce between instances"
    return "reduce-scatter" if group.ddp_config.use_distributed_optimizer else "all-reduce"


def clock_reference(group: Group, device: torch.device) -> tuple[float, float]:
    """(this rank's clock at an instant that the ranks share, seconds by which the ranks' instants may differ); a collective.

    No rank leaves a reduction before the last one has entered it. So the instants at which they leave lie no further apart than
    the longest stay of any rank; of several rounds the one with the shortest is taken.
    """
    stays, instants = [], []
    for _ in range(_CLOCK_ROUNDS):
        entered = time.perf_counter()
        token = torch.zeros((), device=device)
        collectives.all_reduce(token, group)
        token.item()
        instants.append(time.perf_counter())
        stays.append(instants[-1] - entered)
    longest = torch.tensor(stays, dtype=torch.float64, device=device)
    collectives.all_reduce(longest, group, "max")
    best = int(longest.argmin())
    return instants[best], float(longest[best]) if collectives.group_size(group) > 1 else 0.0


def chrome_trace(records: Sequence[RankRecord], *, iteration: int, clock_uncertainty: float, device: str) -> dict[str, Any]:
    """One Chrome trace of all ranks: a process per rank, a thread per row and lane, microseconds since the first slice."""
    zero = min(min([record.begin, *(part.begin for part in record.slices)]) - record.reference for record in records)
    events: list[dict[str, Any]] = []
    exposed = {}
    for record in records:
        own = _rank_events(record, record.reference + zero)
        exposed[str(record.rank)] = sum(event["dur"] for event in own if event.get("cat") == "wait") / 1e6
        events += own
    first = records[0]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "iteration": iteration,
            "world_size": len(records),
            "device": device,
            "exposed_comm_time_s": exposed,
            "step_begin_us": _microseconds(first.begin - first.reference - zero),
            "step_end_us": _microseconds(first.end - first.reference - zero),
            "clock": "host time, microseconds since the first slice; the ranks' clocks are set alike by a reduction after the step, "
            "which no rank leaves before the last has entered",
            "clock_uncertainty_us": _microseconds(clock_uncertainty),
            "arrival": "a collective ends where its arrival was first seen, as args.arrival says: at a boundary of a slice where the "
            "backend can be asked, else in the wait, whose end is then an upper bound",
        },
        "traceEvents": events,
    }


def _rank_events(record: RankRecord, zero: float) -> list[dict[str, Any]]:
    names: dict[int, str] = {THREAD: ROWS[THREAD]}
    slices = []
    lanes: dict[int, list[float]] = {}
    for part in sorted(record.slices, key=lambda part: (part.begin, -part.end)):
        lane = 0
        if part.row != THREAD:
            ends = lanes.setdefault(part.row, [])
            lane = next((index for index, end in enumerate(ends) if end <= part.begin), len(ends))
            ends[lane : lane + 1] = [part.end]
        tid = part.row * LANES + lane
        names[tid] = ROWS[part.row] + (f" {lane + 1}" if lane else "")
        begin, end = _microseconds(part.begin - zero), _microseconds(part.end - zero)
        event = {"ph": "X", "pid": record.rank, "tid": tid, "cat": part.kind, "name": part.name, "ts": begin}
        slices.append(event | {"dur": round(end - begin, 3), "args": dict(part.args)})
    head = [_meta(record.rank, 0, "process_name", name=record.label), _meta(record.rank, 0, "process_sort_index", sort_index=record.rank)]
    for tid, name in sorted(names.items()):
        head += [_meta(record.rank, tid, "thread_name", name=name), _meta(record.rank, tid, "thread_sort_index", sort_index=tid)]
    return head + slices


def _meta(pid: int, tid: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}


def _microseconds(seconds: float) -> float:
    """To the nanosecond, which is what viewers resolve: slices that touch must not overlap by a rounding error."""
    return round(seconds * 1e6, 3)
