"""A signal to any process leads to one complete checkpoint of one step and a common clean exit (R07)."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest
import torch

from megatron.training.data import TrainingData
from megatron.training.trainer import Trainer
from tests.harness.d0 import write_d0
from tests.harness.jobs import read_metrics, train_job
from tests.harness.t0 import t0_flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE = 60.0
CLOCKS = ("step_time_s", "data_time_s", "exposed_comm_time_s", "tokens_per_s", "tflops_per_rank", "mfu", "peak_memory_bytes", "eta_s")


class Run:
    """torchrun with two ranks. All its processes carry a marker in their environment."""

    def __init__(self, flags: list[str]) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "pretrain_gpt.py")]
        self.marker = f"RUN_MARKER={uuid.uuid4().hex}"
        name, value = self.marker.split("=")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), name: value}
        self.process = subprocess.Popen(
            [*command, *flags], env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def family(self, *variables: str) -> list[int]:
        """Ids of the run's live processes, oldest first; only those that have all these variables."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            try:
                environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if {self.marker, *variables} <= set(environment):
                found.append(int(entry.name))
        return sorted(found)

    def rank_pid(self, rank: int) -> int:
        """Process id of a rank; its loader processes are younger."""
        return self.family(f"RANK={rank}")[0]


@pytest.fixture
def flags(tmp_path: pathlib.Path) -> Iterator[list[str]]:
    """T0 with loader workers, many steps, a log line per step."""
    write_d0(str(tmp_path / "d0"))
    yield t0_flags(
        data_path=str(tmp_path / "d0"), split="90,10,0", train_iters=100_000, log_interval=1, num_workers=2, save=str(tmp_path / "run"),
        eval_interval=7, eval_iters=2, use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True,
        hidden_dropout=0.1,
    )  # fmt: skip


def wait_for_step(run: Run, save: pathlib.Path, step: int) -> None:
    """Returns when the metrics hold a line of `step` or later."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        path = save / "metrics.jsonl"
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        if lines and json.loads(lines[-1])["iteration"] >= step:
            return
        assert run.process.poll() is None, run.process.communicate()[0]
        time.sleep(0.05)
    raise AssertionError("the run did not reach the step in time")


def finish(run: Run) -> str:
    """The run's output after it ended by itself; no process of it is left."""
    output, _ = run.process.communicate(timeout=DEADLINE)
    deadline = time.monotonic() + 10.0
    while run.family() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert run.family() == [], output
    return output


@pytest.mark.parametrize("target", ["rank 1", "all processes twice"])
def test_termination_leaves_one_complete_checkpoint_and_resumes_exactly(flags: list[str], tmp_path: pathlib.Path, target: str) -> None:
    save = tmp_path / "run"
    run = Run(flags)
    wait_for_step(run, save, 3)
    if target == "rank 1":
        os.kill(run.rank_pid(1), signal.SIGTERM)
    else:
        for _ in range(2):
            for pid in run.family():
                os.kill(pid, signal.SIGTERM)
    output = finish(run)
    if target == "rank 1":
        assert run.process.returncode == 0, output  # torchrun itself exits with 1 when it was signalled, whatever the ranks do
    step = int((save / "latest_checkpointed_iteration.txt").read_text())
    assert (save / f"iter_{step:07d}" / "manifest.json").exists()
    steps = [line["iteration"] for line in read_metrics(save / "metrics.jsonl") if "split" not in line]
    assert steps == list(range(1, step + 1))
    resume_and_compare(flags, save, tmp_path, step)


def resume_and_compare(flags: list[str], save: pathlib.Path, tmp_path: pathlib.Path, step: int) -> None:
    """The resumed run's numbers equal an uninterrupted run's. (The sample order depends on train_iters, so that stays.)"""
    ended = [*flags, "--exit-interval", str(step + 4)]
    resumed = Run(ended)
    assert "error" not in finish(resumed) and resumed.process.returncode == 0
    whole = Run([str(tmp_path / "whole") if flag == str(save) else flag for flag in ended])
    assert finish(whole) and whole.process.returncode == 0
    assert numbers(save) == numbers(tmp_path / "whole")


def numbers(save: pathlib.Path) -> list[dict[str, object]]:
    """Metrics without clocks and memory."""
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in read_metrics(save / "metrics.jsonl")]


class SignalAt:
    """A trainer callback that signals this process while a checkpoint is being written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def on_train_start(self, trainer: Trainer) -> None:
        """Wrap the store's commit."""
        commit = trainer.store.write_local

        def signalled(*args: object, **kwargs: object) -> object:
            os.kill(os.getpid(), signal.SIGTERM)
            return commit(*args, **kwargs)

        self.monkeypatch.setattr(trainer.store, "write_local", signalled)

    def on_step_end(self, trainer: Trainer, result: object) -> None:
        """Nothing to do."""

    on_eval_end = on_save = on_step_end

    def on_train_end(self, trainer: Trainer) -> None:
        """Nothing to do."""


def short_flags(tmp_path: pathlib.Path, save: str) -> list[str]:
    """Four steps in this process; evaluation and checkpoint at every second."""
    if not (tmp_path / "d0.bin").exists():
        write_d0(str(tmp_path / "d0"))
    return t0_flags(
        data_path=str(tmp_path / "d0"), split="90,10,0", train_iters=4, save=str(tmp_path / save), save_interval=2, eval_interval=2,
        eval_iters=3, hidden_dropout=0.1,
    )  # fmt: skip


def test_signal_during_evaluation_stops_there_and_the_resumed_run_makes_up_for_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_job(short_flags(tmp_path, "whole"))
    evaluation = TrainingData.evaluation

    def signalled(self: TrainingData, split: str, eval_iters: int) -> Iterator[list[dict[str, torch.Tensor]]]:
        for batch in evaluation(self, split, eval_iters):
            os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    with monkeypatch.context() as patched:
        patched.setattr(TrainingData, "evaluation", signalled)
        assert train_job(short_flags(tmp_path, "cut")).iteration == 2
    assert [line for line in read_metrics(tmp_path / "cut" / "metrics.jsonl") if "split" in line] == []
    assert (tmp_path / "cut" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    train_job(short_flags(tmp_path, "cut"))
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


def test_signal_during_a_save_lets_it_finish_and_stops_at_the_next_step(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_job(short_flags(tmp_path, "whole"))
    assert train_job(short_flags(tmp_path, "cut"), callbacks=[SignalAt(monkeypatch)]).iteration == 3
    assert (tmp_path / "cut" / "latest_checkpointed_iteration.txt").read_text().strip() == "3"
    assert (tmp_path / "cut" / "iter_0000002" / "manifest.json").exists()
    train_job(short_flags(tmp_path, "cut"))
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
