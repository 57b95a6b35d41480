"""CheckpointStore in one process and over ranks: round trips, strictness, errors that reach every rank, pointer, retention."""

import errno
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing import reader, serialization, steps
from megatron.core.dist_checkpointing.mapping import Box, Piece, ShardedTensor, whole
from megatron.core.dist_checkpointing.reshard import whole_box
from megatron.core.dist_checkpointing.serialization import DTYPES, DamagedCheckpointError
from megatron.core.dist_checkpointing.store import CheckpointStore
from megatron.core.errors import CheckpointError
from tests.harness.distributed import run_distributed
from tests.unit_tests.dist_checkpointing.test_reshard import shape_and_cuts
from tests.unit_tests.dist_checkpointing.toys import (
    assert_holds,
    box_piece,
    load_alone,
    logical,
    rank_state,
    save_alone,
)


def step_names(directory):
    return sorted(path.name for path in Path(directory).iterdir() if path.is_dir())


# ------------------------------------------------------------------------------------------------------------ round trips


@settings(max_examples=60, deadline=None)
@given(shape_and_cuts(2), st.sampled_from(list(DTYPES.values())), st.booleans())
def test_any_cut_loads_into_any_other_cut(case, dtype, small_windows):
    shape, (stored, wanted) = case
    value = (torch.arange(math.prod(shape)) % 100).reshape(shape).to(dtype)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        if small_windows:
            patch.setattr(serialization, "CHUNK_BYTES", 16)
            patch.setattr(reader, "CHUNK_BYTES", 16)
            patch.setattr("megatron.core.dist_checkpointing.manifest.CHUNK_BYTES", 16)
            patch.setattr(reader, "WINDOW_BYTES", 32)
        store = CheckpointStore(directory)
        store.save(1, [ShardedTensor("model.x", shape, tuple(box_piece(value, box) for box in stored))], {})
        targets = [Piece(box, torch.zeros(box.shape, dtype=dtype)) for box in wanted]
        store.load(1, [ShardedTensor("model.x", shape, tuple(targets))])
        for piece in targets:
            assert torch.equal(piece.data.double(), value[piece.box.slices()].double())
        assert store.verify(1) == []


def test_loading_writes_into_strided_memory_in_place(tmp_path):
    value = torch.arange(12.0).reshape(3, 4)
    store = CheckpointStore(tmp_path)
    store.save(1, [whole("model.x", value.t())], {})
    target = torch.zeros(3, 4)
    store.load(1, [whole("model.x", target.t())])
    assert torch.equal(target, value)


def test_data_files_are_readable_by_the_safetensors_library(tmp_path):
    save_alone(tmp_path, 3)
    tensors = safetensors.torch.load_file(tmp_path / "iter_0000003" / "rank_00000.safetensors")
    assert torch.equal(tensors["model.a"], logical("model.a", (5, 6), 3))
    assert tensors["model.scale"].shape == ()


def test_an_alias_is_stored_once_and_loads_under_both_names(tmp_path):
    value = torch.randn(1000)
    store = CheckpointStore(tmp_path)
    store.save(1, [whole("model.x", value)], {}, aliases={"optimizer.main_param.x": "model.x"})
    assert sum(f.stat().st_size for f in (tmp_path / "iter_0000001").glob("*.safetensors")) < 1.5 * 4000
    target = torch.zeros(400)
    store.load(1, [ShardedTensor("optimizer.main_param.x", (1000,), (Piece(Box((300,), (400,)), target),))])
    assert torch.equal(target, value[300:700])


def test_common_state_keeps_floats_bit_for_bit(tmp_path):
    common = {"lr": 0.1 + 0.2, "list": [1e-300, 2**70, None, True], "text": "ü"}
    CheckpointStore(tmp_path).save(1, [], common)
    assert CheckpointStore(tmp_path).read_common(1) == common


def save_on_ranks(directory, iteration):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    store = CheckpointStore(directory)
    store.save(iteration, rank_state(rank, size, iteration), {"step": iteration})
    store.release()
    return sorted(os.listdir(Path(directory) / steps.step_name(iteration)))


def load_on_ranks(directory, iteration, with_rng):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tensors = rank_state(rank, size, iteration, filled=False)
    tensors = tensors if with_rng else [tensor for tensor in tensors if not tensor.name.startswith("rng.")]
    CheckpointStore(directory).load(iteration, tensors)
    assert_holds(tensors, iteration)


def test_data_parallel_sizes_two_three_one_restore_every_logical_value(tmp_path):
    files = run_distributed(save_on_ranks, 2, str(tmp_path), 4)
    assert files[0] == ["manifest.json", "rank_00000.safetensors", "rank_00001.safetensors"]
    run_distributed(load_on_ranks, 2, str(tmp_path), 4, True)
    run_distributed(load_on_ranks, 3, str(tmp_path), 4, False)
    run_distributed(save_on_ranks, 3, str(tmp_path), 5)
    run_distributed(load_on_ranks, 2, str(tmp_path), 5, False)
    tensors = [t for t in rank_state(0, 1, 5, filled=False) if not t.name.startswith("rng.")]
    CheckpointStore(tmp_path).load(5, tensors)
    assert_holds(tensors, 5)
    assert CheckpointStore(tmp_path).verify(5) == []


# ------------------------------------------------------------------------------------------------------------- strictness


def test_missing_unexpected_shape_and_dtype_are_named_all_at_once(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, [whole(f"model.{n}", torch.zeros(2)) for n in ("a", "b", "c")] + [whole("rng.x", torch.zeros(1))], {})
    wanted = [
        whole("model.a", torch.zeros(3)),
        whole("model.b", torch.zeros(2, dtype=torch.bfloat16)),
        whole("model.d", torch.zeros(2)),
    ]
    with pytest.raises(CheckpointError) as caught:
        store.load(1, wanted)
    for text in (
        "tensor model.a has shape [2], expected [3]",
        "tensor model.b has dtype torch.float32, expected torch.bfloat16",
        "missing tensor model.d",
        "unexpected tensor model.c",
    ):
        assert text in str(caught.value)
    assert "rng.x" not in str(caught.value)


def test_holes_and_overlaps_are_refused_before_anything_is_written(tmp_path):
    value = torch.zeros(4)
    for boxes, text in (([Box((0,), (3,))], "in no piece"), ([Box((0,), (3,)), Box((2,), (2,))], "overlap")):
        with pytest.raises(CheckpointError, match=f"model.x.*{text}"):
            CheckpointStore(tmp_path).save(1, [ShardedTensor("model.x", (4,), tuple(box_piece(value, b) for b in boxes))], {})
    assert step_names(tmp_path) == []


def test_common_state_that_is_not_json_is_refused(tmp_path):
    for bad in ({"x": float("nan")}, {"x": torch.zeros(1)}):
        with pytest.raises(CheckpointError, match="not plain JSON"):
            CheckpointStore(tmp_path).save(1, [], bad)
    assert step_names(tmp_path) == []


def test_a_foreign_directory_with_a_steps_name_is_not_touched(tmp_path):
    foreign = tmp_path / "iter_0000001" / "mp_rank_00"
    foreign.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="move it away"):
        save_alone(tmp_path, 1)
    save_alone(tmp_path, 2, keep_last=1)
    assert foreign.is_dir()


def test_a_step_that_does_not_exist_is_refused_with_those_that_do(tmp_path):
    save_alone(tmp_path, 2)
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; available: 2"):
        CheckpointStore(tmp_path).read_common(3)


# ------------------------------------------------------------------------------------------------- errors reach every rank


def save_with_fault(directory, fault, guilty):
    """Save step 2 with a failing system call on one rank; every rank's error text and what is left in the directory."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    store = CheckpointStore(directory)
    with pytest.MonkeyPatch.context() as patch:
        if rank == guilty:
            patch.setattr(os, *fault(os))
        with pytest.raises(CheckpointError) as caught:
            store.save(2, rank_state(rank, size, 2), {"step": 2})
    torch.distributed.barrier()
    left = step_names(directory)
    store.release()
    return str(caught.value), caught.value.reported, left


def full_disk(module):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    return "fsync", fail


def rename_fails(module):
    def fail(source, target):
        raise OSError(errno.EIO, "Input/output error", str(source))

    return "rename", fail


@pytest.mark.parametrize(("fault", "guilty", "text"), [(full_disk, 1, "disk full"), (full_disk, 0, "disk full"), (rename_fails, 0, "input/output")])
def test_a_failing_write_on_one_rank_fails_the_save_on_all_and_keeps_the_old_step(tmp_path, fault, guilty, text):
    run_distributed(save_on_ranks, 2, str(tmp_path), 1)
    answers = run_distributed(save_with_fault, 2, str(tmp_path), fault, guilty)
    for rank, (message, reported, left) in enumerate(answers):
        assert text in message and f"rank {guilty}" in message
        assert reported == (rank == guilty)
        assert left == ["iter_0000001"]
    run_distributed(load_on_ranks, 2, str(tmp_path), 1, True)
    assert steps.read_pointer(tmp_path) == 1


LIMITED = """
import resource, sys, torch
from tests.unit_tests.dist_checkpointing.toys import save_alone
from megatron.core.dist_checkpointing.mapping import whole
from megatron.core.errors import CheckpointError
store = save_alone(sys.argv[1], 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    store.save(2, [whole("model.x", torch.zeros(100_000))], {})
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [0, 100, 70_000, 399_999])
def test_a_file_that_cannot_grow_leaves_only_the_old_step(tmp_path, limit):
    run = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path), str(limit)], capture_output=True, text=True, check=True)
    assert "step 2 was not saved: rank 0: file size limit reached" in run.stdout
    assert step_names(tmp_path) == ["iter_0000001"]
    load_alone(tmp_path, 1)


def load_damaged(directory):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with pytest.raises(DamagedCheckpointError) as caught:
        CheckpointStore(directory).load(1, rank_state(rank, size, 1, filled=False))
    return str(caught.value)


def test_damage_that_one_rank_sees_is_raised_on_all(tmp_path):
    run_distributed(save_on_ranks, 2, str(tmp_path), 1)
    path = tmp_path / "iter_0000001" / "rank_00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # random state of rank 1, the last and smallest item size
    path.write_bytes(data)
    answers = run_distributed(load_damaged, 2, str(tmp_path))
    assert answers[0] == answers[1]
    assert "rank 1: " in answers[0] and "rng.rank00001.cpu" in answers[0] and "rank_00001.safetensors" in answers[0]


# ------------------------------------------------------------------------------------------------------ newest, retention


def test_pointer_names_the_last_save_and_is_only_a_hint(tmp_path):
    store = save_alone(tmp_path, 2)
    save_alone(tmp_path, 4)
    pointer = tmp_path / "latest_checkpointed_iteration.txt"
    assert pointer.read_text() == "4\n"
    for garbage in (b"", b"\xff\x00\x07", b"release", b"-3", b"9" * 50):
        pointer.write_bytes(garbage)
        assert store.latest_complete() == 4
    pointer.unlink()
    assert store.latest_complete() == 4
    pointer.write_text("8\n")
    assert "iter_0000008" in store.find_loadable().lost


def test_no_checkpoint_is_none_and_only_damaged_ones_are_an_error(tmp_path):
    assert CheckpointStore(tmp_path / "nowhere").latest_complete() is None
    store = save_alone(tmp_path, 2)
    (tmp_path / "iter_0000002" / "rank_00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint.*rank_00000.safetensors"):
        store.latest_complete()


def test_an_incomplete_newest_step_falls_back_and_says_what_is_lost(tmp_path):
    save_alone(tmp_path, 2)
    store = save_alone(tmp_path, 5)
    os.truncate(tmp_path / "iter_0000005" / "rank_00000.safetensors", 100)
    loadable = store.find_loadable()
    assert loadable.iteration == 2
    assert "rank_00000.safetensors has 100 bytes" in loadable.lost and "3 steps are lost" in loadable.lost


def test_newest_is_the_last_saved_after_a_restart_from_an_older_step(tmp_path):
    for iteration in (2, 4, 6, 3):
        store = save_alone(tmp_path, iteration)
    assert store.latest_complete() == 3


def test_saving_a_step_again_replaces_it(tmp_path):
    save_alone(tmp_path, 2)
    store = CheckpointStore(tmp_path)
    store.save(2, [whole("model.z", torch.ones(3))], {})
    assert store.tensor_names(2) == ["model.z"]
    assert step_names(tmp_path) == ["iter_0000002"]


def test_keep_last_removes_the_oldest_complete_steps_only(tmp_path):
    for iteration in (1, 2, 3, 4):
        store = save_alone(tmp_path, iteration)
    os.truncate(tmp_path / "iter_0000004" / "rank_00000.safetensors", 8)
    save_alone(tmp_path, 5, keep_last=2)
    assert step_names(tmp_path) == ["iter_0000003", "iter_0000004", "iter_0000005"]
    assert store.latest_complete() == 5


def test_a_failed_save_deletes_nothing(tmp_path, monkeypatch):
    store = save_alone(tmp_path, 1, keep_last=1)
    monkeypatch.setattr(os, *full_disk(os))
    with pytest.raises(CheckpointError):
        store.save(2, rank_state(0, 1, 2), {})
    monkeypatch.undo()
    assert step_names(tmp_path) == ["iter_0000001"]
    load_alone(tmp_path, 1)


def test_leftovers_of_killed_runs_are_removed_at_the_start_and_an_interrupted_replacement_is_undone(tmp_path):
    save_alone(tmp_path, 1).release()
    save_alone(tmp_path, 2).release()
    unique = "0123456789abcdef" * 2
    (tmp_path / f"iter_0000003.tmp-{unique}").mkdir()
    (tmp_path / f"iter_0000001.del-{unique}").mkdir()
    (tmp_path / f"latest_checkpointed_iteration.txt.tmp-{unique}").touch()
    (tmp_path / "iter_0000002").rename(tmp_path / f"iter_0000002.old-{unique}")
    (tmp_path / "mine.tmp-1").mkdir()
    load_alone(tmp_path, 2)
    store = CheckpointStore(tmp_path)
    store.acquire()
    assert step_names(tmp_path) == ["iter_0000001", "iter_0000002", "mine.tmp-1"]
    assert not (tmp_path / f"latest_checkpointed_iteration.txt.tmp-{unique}").exists()
    store.release()


# ------------------------------------------------------------------------------------------------------------------ lease

HOLD = """
import sys
from megatron.core.dist_checkpointing.store import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_in_a_directory_is_refused_until_the_first_is_dead(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"another run writes to .*pid {holder.pid} on host"):
            CheckpointStore(tmp_path).acquire()
    finally:
        holder.kill()
        holder.communicate()
    store = CheckpointStore(tmp_path)
    store.acquire()
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    store.release()


def test_a_save_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write to the save directory"):
        CheckpointStore(tmp_path / "file" / "save").acquire()


def test_empty_tensors_and_scalars_travel(tmp_path):
    state = {"model.empty": torch.zeros(0, 3), "model.scalar": torch.tensor(7.0)}
    store = CheckpointStore(tmp_path)
    store.save(1, [whole(name, value) for name, value in state.items()], {})
    target = torch.zeros(())
    empty = ShardedTensor("model.empty", (0, 3), (Piece(whole_box((0, 3)), torch.zeros(0, 3)),))
    store.load(1, [empty, whole("model.scalar", target)])
    assert target.item() == 7.0
