"""One rank of one engine: waits for a line of JSON, does what it says, answers with a line of JSON.

    {"do": "turn", "steps": 2}   one step that is not counted, then `steps` counted ones, then waits for what is in flight
    {"do": "losses", "steps": 2} losses of that many steps on the same batch
    {"do": "report"}             memory, model state, version
    {"do": "end"}

Between lines it blocks in a read and uses no processor time (each answer says what share of a core it used). Started by `engine_teams.py`;
its standard output belongs to the protocol, what a library prints goes to standard error.
"""

import contextlib
import ctypes
import json
import os
import sys
import time
from typing import Any, TextIO

import torch
import torch.distributed as dist
from engines import KINDS, PHASES, Clock, Engine, Setup


class Worker:
    """Engine, data, and the place in the data."""

    def __init__(self, engine: Engine, setup: Setup, import_rss: int) -> None:
        self.engine, self.import_rss = engine, import_rss
        self.cycle = setup.batches(dist.get_rank(), dist.get_world_size())
        self.done = 0

    def step(self) -> tuple[float, Clock]:
        """Loss and phases of the next step."""
        clock = Clock()
        loss = self.engine.step(self.cycle[self.done % len(self.cycle)], clock)
        self.done += 1
        return loss, clock

    def losses(self, steps: int) -> dict[str, Any]:
        """Of the next steps, all on one batch: how far they fall shows that the engine trains."""
        losses = [self.engine.step(self.cycle[0], Clock()) for _ in range(steps)]
        self.engine.finish()
        give_back_memory()
        return {"losses": losses}

    def turn(self, steps: int) -> dict[str, Any]:
        """Seconds of each counted step, from the end of an optimizer's step to the end of the next one's."""
        dist.barrier()
        self.step()
        clocks, seconds, begun = [], [], time.perf_counter()
        for _ in range(steps):
            clocks.append(self.step()[1])
            now = time.perf_counter()
            seconds.append(now - begun)
            begun = now
        self.engine.finish()
        return {
            "seconds": seconds,
            "phases": {phase: sum(clock.seconds[phase] for clock in clocks) / steps for phase in PHASES},
        }

    def report(self) -> dict[str, Any]:
        """Peak memory of this process, and its model state with a step's gradients in place. The last thing to ask for."""
        peak = memory("VmHWM")
        self.engine.gradients(self.cycle[0], Clock())
        return {"peak_rss": peak, "rss": memory("VmRSS"), "import_rss": self.import_rss, "state": self.engine.state_bytes()}


def memory(field: str) -> int:
    """Bytes, from /proc/self/status; 0 where there is none."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":")), 0)
    except OSError:
        return 0


def give_back_memory() -> None:
    """Let the other teams have what the allocator kept of a step's activations; the next turn's first step is not counted."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def go_first_when_memory_ends() -> None:
    """Where memory runs out, the kernel ends a benchmark's worker rather than something else on the machine."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as adjustment:
        adjustment.write("800")


def protocol() -> TextIO:
    """The driver's end of standard output, which from now on is standard error for everyone else."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def serve(worker: Worker, answers: TextIO) -> None:
    """Until told to end, or the driver is gone."""
    while True:
        used, begun = time.process_time(), time.perf_counter()
        line = sys.stdin.readline()
        idle = (time.process_time() - used) / (time.perf_counter() - begun)
        request = json.loads(line) if line else {"do": "end"}
        kind = request.pop("do")
        if kind == "end":
            return
        answer = getattr(worker, kind)(**request)
        print(json.dumps({**answer, "idle_load": idle}), file=answers, flush=True)


def main() -> None:
    """Build the engine that the first line asks for, then serve."""
    answers = protocol()
    go_first_when_memory_ends()
    request = json.loads(sys.stdin.readline())
    setup = Setup.from_dict(request["setup"])
    torch.set_num_threads(1)
    if request["core"] is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {request["core"]})
    begun = time.perf_counter()
    dist.init_process_group("gloo")
    import_rss = memory("VmRSS")
    worker = Worker(KINDS[request["engine"]].build(setup), setup, import_rss)
    print(
        json.dumps({"ready": True, "torch": torch.__version__, "built_s": time.perf_counter() - begun}),
        file=answers,
        flush=True,
    )
    serve(worker, answers)
    answers.close()
    os._exit(0)  # peers' exit handlers wait for groups that are gone


if __name__ == "__main__":
    main()
