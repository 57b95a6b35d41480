"""Pipeline schedules as data: each rank's list of actions, a checker, and the time they take. Pure.

    F   forward of one microbatch through one model chunk
    B   its backward; where the schedule splits the backward, only the gradient of the input
    W   the gradient of the weights, where it is split off

A microbatch passes the parts 0 .. P-1 of the model. `PipelinePlan.place` says which rank and chunk holds a part:

    1f1b         1 chunk      part = rank                                Narayanan et al. 2021 (PipeDream-Flush), section 2.2
    interleaved  v chunks     part = chunk x stages + rank               Narayanan et al. 2021 (Megatron-LM), section 2.2.2
    zb_h1        1 chunk      as 1f1b, backward split                    Qi et al. 2023 (Zero Bubble), section 2.1
    zb_v         2 chunks     0 1 2 3 down, then 4 5 6 7 back up         Qi et al. 2024 (Controllable Memory), section 4

`check_plan` proves that a plan ends (no rank waits for something that is never sent), that every F, B and W happens once, that
messages are received in the order in which they are sent, and counts the activations that are held at most.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from megatron.core.errors import ConfigError


class Kind(enum.Enum):
    """What an action computes."""

    F = "F"
    B = "B"
    W = "W"


SCHEDULES = ("1f1b", "zb_h1", "zb_v")
SPLIT_BACKWARD = ("zb_h1", "zb_v")


@dataclasses.dataclass(frozen=True)
class Action:
    """One piece of work of a rank."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """actions[rank]: in order. split_backward: whether there are W actions."""

    schedule: str
    stages: int
    chunks: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def split_backward(self) -> bool:
        """Whether the gradient of the weights is an action of its own."""
        return self.schedule in SPLIT_BACKWARD

    @property
    def parts(self) -> int:
        """Parts of the model."""
        return self.stages * self.chunks

    def part_of(self, rank: int, chunk: int) -> int:
        """The part that a rank holds as its chunk."""
        return part_of(self.schedule, self.stages, rank, chunk)

    def place(self, part: int) -> tuple[int, int]:
        """(rank, chunk) of a part."""
        chunk, index = divmod(part, self.stages)
        return (self.stages - 1 - index if self.schedule == "zb_v" and chunk == 1 else index), chunk


@dataclasses.dataclass(frozen=True)
class Timing:
    """Of a plan, in the unit of the costs. starts[rank][i]: when action i begins. total: end of the last action on any rank."""

    starts: tuple[tuple[float, ...], ...]
    total: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Idle share of the ranks' time, 0 to 1."""
        return 1.0 - sum(self.busy) / (self.total * len(self.busy))


UNIT_COSTS: Mapping[Kind, float] = {Kind.F: 1.0, Kind.B: 1.0, Kind.W: 1.0}


def part_of(schedule: str, stages: int, rank: int, chunk: int) -> int:
    """The part of the model that a rank holds as its chunk."""
    if schedule == "zb_v" and chunk == 1:
        return 2 * stages - 1 - rank
    return chunk * stages + rank


def plan_problem(schedule: str, stages: int, chunks: int, microbatches: int | None) -> str | None:
    """Why there is no such plan, with the rule and the option names; None if there is one. microbatches None: any number."""
    if schedule not in SCHEDULES:
        return f"pipeline_schedule={schedule} is unknown; use one of {', '.join(SCHEDULES)}"
    if stages == 1 and (chunks > 1 or schedule != "1f1b"):
        what = f"pipeline_schedule={schedule}" if schedule != "1f1b" else f"virtual_pipeline_model_parallel_size={chunks}"
        return f"{what} needs pipeline_model_parallel_size > 1"
    if schedule == "zb_h1" and chunks != 1:
        return f"pipeline_schedule=zb_h1 has one model chunk per stage, got virtual_pipeline_model_parallel_size={chunks}; leave that out"
    if schedule == "zb_v" and chunks != 2:
        return f"pipeline_schedule=zb_v has two model chunks per stage, got virtual_pipeline_model_parallel_size={chunks}; set it to 2"
    if schedule == "1f1b" and chunks > 1 and microbatches is not None and microbatches % stages:
        return (
            f"the interleaved schedule (virtual_pipeline_model_parallel_size={chunks}) needs the number of microbatches, "
            f"global_batch_size / (micro_batch_size x data-parallel size) = {microbatches}, to be a multiple of "
            f"pipeline_model_parallel_size={stages}"
        )
    return None


def build_plan(schedule: str, stages: int, chunks: int, microbatches: int) -> PipelinePlan:
    """The plan of all ranks. Raises ConfigError where `plan_problem` finds one."""
    problem = plan_problem(schedule, stages, chunks, microbatches)
    if problem is not None:
        raise ConfigError(problem)
    if schedule == "zb_v":
        return _zb_v(stages, microbatches)
    if schedule == "zb_h1":
        actions = tuple(_zb_h1(stages, rank, microbatches) for rank in range(stages))
    else:
        actions = tuple(_one_f_one_b(stages, rank, chunks, microbatches) for rank in range(stages))
    return PipelinePlan(schedule, stages, chunks, microbatches, actions)


def forward_only(plan: PipelinePlan) -> PipelinePlan:
    """The plan's forwards, for evaluation."""
    kept = tuple(tuple(action for action in actions if action.kind is Kind.F) for actions in plan.actions)
    return dataclasses.replace(plan, actions=kept)


def _one_f_one_b(stages: int, rank: int, chunks: int, microbatches: int) -> tuple[Action, ...]:
    """Forwards to fill the pipeline, then one forward and one backward in turns, then the backwards that are left."""
    total = chunks * microbatches
    if chunks == 1:
        warmup = stages - rank - 1
    else:
        warmup = 2 * (stages - rank - 1) + (chunks - 1) * stages
    warmup = min(warmup, total)
    forwards = [_in_turn(Kind.F, index, stages, chunks) for index in range(total)]
    backwards = [_in_turn(Kind.B, index, stages, chunks) for index in range(total)]
    actions = forwards[:warmup]
    for index in range(total - warmup):
        actions += [forwards[warmup + index], backwards[index]]
    return tuple(actions + backwards[total - warmup :])


def _in_turn(kind: Kind, index: int, stages: int, chunks: int) -> Action:
    """The index-th forward or backward of a rank: `stages` microbatches through each chunk in turn."""
    if chunks == 1:
        return Action(kind, index)
    group, inside = divmod(index, stages * chunks)
    chunk, microbatch = divmod(inside, stages)
    return Action(kind, group * stages + microbatch, chunk if kind is Kind.F else chunks - 1 - chunk)


def _zb_h1(stages: int, rank: int, microbatches: int) -> tuple[Action, ...]:
    """1F1B in which rank r's W follows its B by r microbatches: every rank holds `stages` activations, none more than 1F1B's first."""
    warmup = min(stages - rank, microbatches)
    actions = [Action(Kind.F, index) for index in range(warmup)]
    for index in range(microbatches):
        actions.append(Action(Kind.B, index))
        if index >= rank:
            actions.append(Action(Kind.W, index - rank))
        if warmup + index < microbatches:
            actions.append(Action(Kind.F, warmup + index))
    return (*actions, *(Action(Kind.W, index) for index in range(max(0, microbatches - rank), microbatches)))


def _zb_v(stages: int, microbatches: int) -> PipelinePlan:
    """The best of a few list schedules, which differ in how far W may lag behind B before it goes before F."""
    empty = PipelinePlan("zb_v", stages, 2, microbatches, ((),) * stages)
    lags = dict.fromkeys([tuple(range(stages)), *((lag,) * stages for lag in (0, 1, stages, 2 * stages))])
    return min((_list_schedule(empty, lag) for lag in lags), key=lambda plan: time_plan(plan).total)


def _list_schedule(empty: PipelinePlan, lags: Sequence[int]) -> PipelinePlan:
    """List scheduling in unit time: what is ready goes first, B before F before W, so that W fills what would be bubbles.

    Activations are bounded by those of 1F1B's first rank: `stages` microbatches of a whole stage. A chunk-0 forward leaves one
    place free, so that a microbatch that has entered can always go on. lags: of each rank, W that may wait while an F is ready.
    """
    stages, chunks, microbatches = empty.stages, empty.chunks, empty.microbatches
    ranks = [_ListScheduler(empty, rank, lags[rank]) for rank in range(stages)]
    done: dict[tuple[Kind, int, int], int] = {}  # (kind, part, microbatch) -> when it ends
    actions: list[list[Action]] = [[] for _ in range(stages)]
    time = 0
    while any(not rank.finished for rank in ranks):
        chosen = [(rank, rank.choose(done, time)) for rank in ranks]
        for rank, action in chosen:
            if action is not None:
                rank.take(action)
                actions[rank.rank].append(action)
                done[action.kind, empty.part_of(rank.rank, action.chunk), action.microbatch] = time + 1
        time += 1
        assert time <= 12 * chunks * (microbatches + stages), "the schedule does not end"
    return dataclasses.replace(empty, actions=tuple(map(tuple, actions)))


class _ListScheduler:
    """What one rank has done so far and may do next."""

    def __init__(self, plan: PipelinePlan, rank: int, lag: int) -> None:
        self.plan, self.rank, self.lag = plan, rank, lag
        self.counts = {kind: [0] * plan.chunks for kind in Kind}
        self.pending: list[Action] = []  # W that may be done, in the order of their B

    @property
    def finished(self) -> bool:
        return all(count == self.plan.microbatches for count in self.counts[Kind.W])

    def choose(self, done: Mapping[tuple[Kind, int, int], int], time: int) -> Action | None:
        for chunk in reversed(range(self.plan.chunks)):
            backward = Action(Kind.B, self.counts[Kind.B][chunk], chunk)
            if backward.microbatch < self.counts[Kind.F][chunk] and self._arrived(backward, done, time):
                return backward
        if len(self.pending) > self.lag:
            return self.pending[0]
        for chunk in reversed(range(self.plan.chunks)):
            forward = Action(Kind.F, self.counts[Kind.F][chunk], chunk)
            if forward.microbatch < self.plan.microbatches and self._fits(chunk) and self._arrived(forward, done, time):
                return forward
        return self.pending[0] if self.pending else None

    def take(self, action: Action) -> None:
        self.counts[action.kind][action.chunk] += 1
        if action.kind is Kind.B:
            self.pending.append(dataclasses.replace(action, kind=Kind.W))
        elif action.kind is Kind.W:
            self.pending.remove(action)

    def _fits(self, chunk: int) -> bool:
        held = sum(self.counts[Kind.F]) - sum(self.counts[Kind.W])
        return held < self.plan.stages * self.plan.chunks - (chunk == 0)

    def _arrived(self, action: Action, done: Mapping[tuple[Kind, int, int], int], time: int) -> bool:
        need = needs(self.plan, self.rank, action)
        return need is None or done.get(need, time + 1) <= time


def needs(plan: PipelinePlan, rank: int, action: Action) -> tuple[Kind, int, int] | None:
    """(kind, part, microbatch) whose result the action takes; None for the first forward."""
    part = plan.part_of(rank, action.chunk)
    if action.kind is Kind.F:
        return None if part == 0 else (Kind.F, part - 1, action.microbatch)
    if action.kind is Kind.B:
        return (Kind.F, part, action.microbatch) if part == plan.parts - 1 else (Kind.B, part + 1, action.microbatch)
    return (Kind.B, part, action.microbatch)


def time_plan(plan: PipelinePlan, costs: Mapping[Kind, float] = UNIT_COSTS, latency: float = 0.0) -> Timing:
    """When each action begins if every rank goes through its list as soon as it can.

    costs: of each kind for one chunk of one stage; without a split backward, B costs B + W. latency: of a message between ranks.
    Raises ConfigError when the plan never ends, naming the first action that waits for ever.
    """
    cost = dict(costs) if plan.split_backward else {**costs, Kind.B: costs[Kind.B] + costs[Kind.W]}
    ends: dict[tuple[Kind, int, int], tuple[float, int]] = {}
    starts: list[list[float]] = [[] for _ in range(plan.stages)]
    free = [0.0] * plan.stages
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan.actions):
            while len(starts[rank]) < len(actions):
                action = actions[len(starts[rank])]
                need = needs(plan, rank, action)
                if need is not None and need not in ends:
                    break
                end, where = ends[need] if need is not None else (0.0, rank)
                begin = max(free[rank], end + (latency if where != rank else 0.0))
                free[rank] = begin + cost[action.kind]
                ends[action.kind, plan.part_of(rank, action.chunk), action.microbatch] = (free[rank], rank)
                starts[rank].append(begin)
                moved = True
    for rank, actions in enumerate(plan.actions):
        if len(starts[rank]) < len(actions):
            raise ConfigError(f"deadlock: rank {rank} waits for ever to run {actions[len(starts[rank])]}")
    busy = tuple(sum(cost[action.kind] for action in actions) for actions in plan.actions)
    return Timing(tuple(map(tuple, starts)), max(free), busy)


def check_plan(plan: PipelinePlan) -> tuple[int, ...]:
    """Prove the plan; returns the most activations (of one microbatch in one chunk) that each rank holds at once.

    An activation is held from its F to its W, or to its B where the backward is not split. Raises ConfigError with the first
    fault: a deadlock, an action that is missing, doubled or without what it needs, or messages out of order.
    """
    kinds = tuple(Kind) if plan.split_backward else (Kind.F, Kind.B)
    expected = sorted((k.value, c, m) for k in kinds for c in range(plan.chunks) for m in range(plan.microbatches))
    most = []
    for rank, actions in enumerate(plan.actions):
        if sorted((a.kind.value, a.chunk, a.microbatch) for a in actions) != expected:
            raise ConfigError(f"rank {rank} does not run every F, B and W exactly once")
        held = peak = 0
        for action in actions:
            held += (action.kind is Kind.F) - (action.kind is kinds[-1])
            peak = max(peak, held)
        most.append(peak)
    time_plan(plan)
    _check_message_order(plan)
    return tuple(most)


def _check_message_order(plan: PipelinePlan) -> None:
    """Each directed link carries forwards and backwards in two channels; both ends must use a channel in the same order."""
    for kind in (Kind.F, Kind.B):
        sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
        received: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank, actions in enumerate(plan.actions):
            for action in (a for a in actions if a.kind is kind):
                part = plan.part_of(rank, action.chunk)
                source, target = (part - 1, part + 1) if kind is Kind.F else (part + 1, part - 1)
                if 0 <= source < plan.parts and plan.place(source)[0] != rank:
                    received.setdefault((plan.place(source)[0], rank), []).append((source, action.microbatch))
                if 0 <= target < plan.parts and plan.place(target)[0] != rank:
                    sent.setdefault((rank, plan.place(target)[0]), []).append((part, action.microbatch))
        for link, messages in sent.items():
            if received[link] != messages:
                raise ConfigError(f"messages ({kind.value}) from rank {link[0]} to rank {link[1]} are received in another order")


def bubble_fraction(schedule: str, stages: int, chunks: int, microbatches: int) -> float:
    """Idle share of the ranks' time with F, B and W of equal cost. 1F1B: (p - 1) / (m + p - 1)."""
    return time_plan(build_plan(schedule, stages, chunks, microbatches)).bubble


def draw_plan(plan: PipelinePlan, costs: Mapping[Kind, float] = UNIT_COSTS) -> str:
    """The plan as text, one line per rank, one column per unit of time; `.` is idle."""
    timing = time_plan(plan, costs)
    cost = dict(costs) if plan.split_backward else {**costs, Kind.B: costs[Kind.B] + costs[Kind.W]}
    width = max((len(str(action)) for actions in plan.actions for action in actions), default=1) + 1
    lines = []
    for rank, actions in enumerate(plan.actions):
        cells = ["."] * round(timing.total)
        for action, start in zip(actions, timing.starts[rank], strict=True):
            begin, end = round(start), round(start + cost[action.kind])
            cells[begin:end] = [str(action)] + ["-"] * (end - begin - 1)
        lines.append(f"rank {rank:2d}  " + "".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)
