"""Kill trials: a save in forked processes, SIGKILLed at its k-th file-system operation; prints one JSON line per trial.

    python -m tests.unit_tests.dist_checkpointing.kill_trials FOLDER RANKS new|replace

Every trial starts from a directory with the complete steps 1 and 2. `new` saves step 3 with keep_last=1 (so retention deletes
steps 1 and 2); `replace` saves step 2 again with other values. Each operation (mkdir, open for writing, fsync, rename, replace,
unlink, rmdir) is a kill point before it and one after it; trials run over all points of every rank.
"""

import builtins
import datetime
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
import torch.distributed

from megatron.core.dist_checkpointing import steps
from megatron.core.dist_checkpointing.mapping import whole
from megatron.core.dist_checkpointing.reader import StepReader
from megatron.core.dist_checkpointing.store import CheckpointStore
from tests.unit_tests.dist_checkpointing.toys import SHAPES, assert_holds, rank_state

OLD, NEW = 2, 103  # keys of the values of step 2 and of what the killed save writes


def arm(point):
    """Kill this process at the `point`-th kill point. Returns the counter."""
    count = [0]

    def hit():
        if count[0] == point:
            os.kill(os.getpid(), signal.SIGKILL)
        count[0] += 1

    def guarded(operation):
        def call(*args, **kwargs):
            hit()
            result = operation(*args, **kwargs)
            hit()
            return result

        return call

    for name in ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, guarded(getattr(os, name)))
    plain = builtins.open
    builtins.open = lambda file, mode="r", *args, **kw: (guarded(plain) if "x" in mode else plain)(file, mode, *args, **kw)
    return count


def save(directory, rank, ranks, iteration, values, keep_last=None):
    store = CheckpointStore(directory, keep_last=keep_last)
    store.save(iteration, rank_state(rank, ranks, values), {"values": values})


def child(directory, rank, ranks, scenario, guilty, point):
    """One rank of a trial; exit code 0 when the save went through, 3 when it failed because the other rank died."""
    if ranks > 1:
        rendezvous = torch.distributed.FileStore(f"{directory}.store", ranks)
        torch.distributed.init_process_group(
            "gloo", store=rendezvous, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=20)
        )
    if scenario == "prepare":
        for iteration in (1, OLD):
            save(directory, rank, ranks, iteration, iteration)
        return 0
    if rank == guilty:
        arm(point)
    try:
        save(directory, rank, ranks, 3 if scenario == "new" else 2, NEW, keep_last=1 if scenario == "new" else None)
    except RuntimeError:
        return 3
    return 0


def run(directory, ranks, scenario, guilty=-1, point=-1):
    """Fork the ranks, wait for all; their exit codes (negative: killed)."""
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = child(directory, rank, ranks, scenario, guilty, point)
            finally:
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    Path(f"{directory}.store").unlink(missing_ok=True)
    return codes


def outcome(directory, ranks):
    """What a restart finds, then what is left after it: newest complete step, key of its values, whether all are of one save."""
    loadable = CheckpointStore(directory).find_loadable()
    step = steps.find_step(directory, loadable.iteration)
    values = step.manifest.common["values"]
    names = [*SHAPES, *(f"rng.rank{rank:05d}.cpu" for rank in range(ranks))]
    with StepReader(step.path, step.manifest) as reader:
        assert sorted(step.manifest.tensors) == sorted(names)
        assert_holds([whole(name, reader.read(name)) for name in names], values)
        assert reader.verify() == []
    restarted = CheckpointStore(directory)
    restarted.acquire()
    restarted.release()
    left = sorted(path.name for path in directory.iterdir() if path.is_dir())
    assert all(steps.find_step(directory, int(name[5:])).problem is None for name in left), left
    named = steps.find_step(directory, steps.read_pointer(directory))
    return {"found": loadable.iteration, "values": values, "lost": loadable.lost, "left": left, "pointer_ok": named is not None}


def main(folder, ranks, scenario):
    torch.set_num_threads(1)
    pristine = Path(folder) / "pristine"
    assert run(pristine, ranks, "prepare") == [0] * ranks
    for guilty in range(ranks):
        for point in range(1000):
            directory = Path(folder) / f"{guilty}-{point}"
            shutil.copytree(pristine, directory)
            codes = run(directory, ranks, scenario, guilty, point)
            print(json.dumps({"guilty": guilty, "point": point, "codes": codes} | outcome(directory, ranks)), flush=True)
            shutil.rmtree(directory)
            if codes[guilty] == 0:
                break


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
