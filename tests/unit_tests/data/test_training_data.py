"""TrainingData: a step's microbatches depend on the consumed samples alone; loader processes change and leave nothing."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from megatron.core.datasets.gpt_dataset import SPLITS, Blend, GPTDatasetConfig, build_gpt_datasets
from megatron.core.num_microbatches_calculator import NumMicroBatches
from megatron.training.data import TrainingData
from tests.harness.d0 import EOD, write_documents

ROOT = pathlib.Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests" / "fixtures" / "megatron_core"


@contextlib.contextmanager
def opened(cache, *, samples=48, batch=8, micro=2, dp_rank=0, dp_size=1, workers=0, rampup=None, **changes):
    fields = {"seq_length": 16, "split": "80,20,0", "blend": Blend((str(FIXTURES / "d0"),)), "eod": EOD, "vocab_size": 101}
    config = GPTDatasetConfig(**(fields | {"cache_path": str(cache)} | changes))
    data = TrainingData(
        dict(zip(SPLITS, build_gpt_datasets(config, (samples, 2 * batch, 0)), strict=True)),
        micro_batch_size=micro,
        evaluation_batch_size=batch,
        dp_rank=dp_rank,
        dp_size=dp_size,
        calculator=NumMicroBatches(batch, micro, dp_size, rampup),
        num_workers=workers,
    )
    try:
        yield data
    finally:
        data.close()


def flat(batches):
    return {name: torch.cat([batch[name] for batch in batches]).tolist() for name in batches[0]}


def steps(data, positions):
    return [flat(data.train_step(position)) for position in positions]


def test_a_microbatch_is_a_dict_of_tensors(tmp_path):
    with opened(tmp_path, reset_attention_mask=True) as data:
        batches = data.train_step(0)
        assert len(batches) == 4
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in batches[0].items()}
        assert shapes == {
            **dict.fromkeys(("tokens", "labels", "position_ids", "document_ids"), ((2, 16), torch.int64)),
            "loss_mask": ((2, 16), torch.float32),
            "sample_ids": ((2,), torch.int64),
        }


def test_batches_are_the_samples_megatron_core_gives(tmp_path):
    expected = json.loads((FIXTURES / "megatron_sample_order.json").read_text())["d0_48"]
    with opened(tmp_path, split="100,0,0") as data:
        for k in range(6):
            step = flat(data.train_step(8 * k))
            assert step["sample_ids"] == list(range(8 * k, 8 * k + 8))
            assert step["tokens"] == [ids[:-1] for ids in expected[8 * k : 8 * k + 8]]
            assert step["labels"] == [ids[1:] for ids in expected[8 * k : 8 * k + 8]]


@pytest.mark.parametrize("workers", [1, 2])
def test_loader_processes_give_the_same_batches_from_any_position(tmp_path, workers):
    positions = [0, 8, 16, 32, 40, 8, 16]  # two jumps
    with opened(tmp_path) as plain, opened(tmp_path, workers=workers) as ahead:
        assert steps(ahead, positions) == steps(plain, positions)


def test_a_resumed_run_continues_where_it_stopped(tmp_path):
    with opened(tmp_path, workers=2) as whole, opened(tmp_path, workers=2) as resumed:
        assert steps(whole, range(0, 48, 8))[3:] == steps(resumed, range(24, 48, 8))


def test_every_data_parallel_size_reads_the_same_global_batches(tmp_path):
    def epoch(dp_size, micro):
        seen = []
        for position in range(0, 48, 12):
            for rank in range(dp_size):
                with opened(tmp_path, batch=12, micro=micro, dp_rank=rank, dp_size=dp_size) as data:
                    step = flat(data.train_step(position))
                    seen += zip(step["sample_ids"], step["tokens"], strict=True)
        return sorted(seen)

    assert epoch(1, 2) == epoch(2, 1) == epoch(3, 2) == epoch(4, 1)


def test_a_batch_size_ramp_is_followed_by_loader_processes(tmp_path):
    positions, sizes, position = [], [], 0
    plan = NumMicroBatches(8, 2, 1, (2, 2, 12))
    while position < 46:
        positions.append(position)
        sizes.append(plan.global_batch_size(position))
        position += sizes[-1]
    with opened(tmp_path, samples=position, rampup=(2, 2, 12), workers=2) as data:
        found = [flat(data.train_step(p))["sample_ids"] for p in positions]
    assert [len(ids) for ids in found] == sizes
    assert sizes[0] == 2 and sizes[-1] == 8
    assert [i for ids in found for i in ids] == list(range(position))


def test_starting_loader_processes_does_not_advance_the_runs_random_numbers(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with opened(tmp_path, workers=2) as data:
        data.train_step(0)
        data.train_step(24)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_evaluation_sees_the_same_samples_and_disturbs_no_training_step(tmp_path):
    with opened(tmp_path, workers=2) as data, opened(tmp_path) as undisturbed:
        first = data.train_step(0)
        evaluations = [[flat(batches) for batches in data.evaluation("valid", 2)] for _ in range(2)]
        assert evaluations[0] == evaluations[1]
        assert [step["sample_ids"] for step in evaluations[0]] == [list(range(8)), list(range(8, 16))]
        assert [flat(first), flat(data.train_step(8))] == steps(undisturbed, [0, 8])


def test_has_tells_which_splits_there_are(tmp_path):
    with opened(tmp_path) as data:
        assert [data.has(name) for name in SPLITS] == [True, True, False]


def test_a_padded_sample_leaks_no_mask_into_the_next(tmp_path):
    tiny = write_documents(tmp_path / "tiny", [[1, 2], [3, EOD]])
    blend = Blend((tiny, str(FIXTURES / "d0")), (0.5, 0.5))
    with opened(tmp_path, blend=blend, split="100,0,0", shuffle="epoch", samples=16) as data:
        masks = flat(data.train_step(0))["loss_mask"]
    assert [sum(mask) for mask in masks] == [3.0, 16.0] * 4


PROGRAM = textwrap.dedent(
    """
    import os, signal, sys, time
    from tests.unit_tests.data.test_training_data import opened
    from pathlib import Path

    with opened(Path(sys.argv[1]), workers=2) as data:
        signal.signal(signal.SIGTERM, lambda *a: print("asked to stop", flush=True))
        ids = data.train_step(0)
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        print(*children, flush=True)
        for line in sys.stdin:
            if line.strip() == "step":
                print(*[i for b in data.train_step(8) for i in b["sample_ids"].tolist()], flush=True)
            elif line.strip() == "leave":
                sys.exit(0)
            elif line.strip() == "raise":
                raise SystemExit(3)
    """
)


@contextlib.contextmanager
def trainer(tmp_path):
    """A process with two loader processes: (process, pids of the loaders)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    try:
        yield process, [int(pid) for pid in process.stdout.readline().split()]
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def ended(pid):
    """Wait for the end of a process that is not our child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    import select

    poll = select.poll()
    poll.register(handle, select.POLLIN)
    done = bool(poll.poll(20_000))
    os.close(handle)
    return done


def test_signals_to_the_whole_group_stop_no_loader_process(tmp_path):
    with trainer(tmp_path) as (process, loaders):
        assert len(loaders) == 2
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            for pid in loaders:
                os.kill(pid, number)
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == "asked to stop\n"
        process.stdin.write("step\nleave\n")
        process.stdin.flush()
        assert process.stdout.readline() == "8 9 10 11 12 13 14 15\n"
        assert process.wait(30) == 0
        assert all(ended(pid) for pid in loaders)


def test_loader_processes_end_with_a_killed_trainer(tmp_path):
    with trainer(tmp_path) as (process, loaders):
        process.kill()
        process.wait()
        assert len(loaders) == 2
        assert all(ended(pid) for pid in loaders)


def test_an_error_exit_does_not_wait_for_loader_processes(tmp_path):
    with trainer(tmp_path) as (process, loaders):
        process.stdin.write("raise\n")
        process.stdin.flush()
        assert process.wait(30) == 3
        assert all(ended(pid) for pid in loaders)
