"""tools/inspect_checkpoint.py from the command line: hashes that no layout changes, verify, diff, merge."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed

from megatron.core.dist_checkpointing.mapping import whole
from megatron.core.dist_checkpointing.store import CheckpointStore
from tests.harness.distributed import run_distributed
from tests.unit_tests.dist_checkpointing.toys import SHAPES, logical, rank_state, save_alone

ROOT = Path(__file__).resolve().parents[2]


def inspect(*arguments):
    command = [sys.executable, str(ROOT / "tools" / "inspect_checkpoint.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")


def save_on_ranks(directory, iteration):
    store = CheckpointStore(directory)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    store.save(iteration, rank_state(rank, size, iteration), {}, aliases={"optimizer.main_param.a": "model.a"})
    store.release()


def test_json_hashes_are_those_of_the_logical_bytes_in_any_layout(tmp_path):
    run_distributed(save_on_ranks, 2, str(tmp_path / "two"), 3)
    CheckpointStore(tmp_path / "one").save(3, rank_state(0, 1, 3), {}, aliases={"optimizer.main_param.a": "model.a"})
    expected = {
        name: {
            "shape": list(shape),
            "dtype": "float32",
            "sha256": hashlib.sha256(logical(name, shape, 3).numpy().tobytes()).hexdigest(),
        }
        for name, shape in SHAPES.items()
    }
    expected["optimizer.main_param.a"] = expected["model.a"]
    answers = [inspect(tmp_path / "two", "--json"), inspect(tmp_path / "one" / "iter_0000003", "--json")]
    assert [answer.returncode for answer in answers] == [0, 0], answers
    assert json.loads(answers[0].stdout) == {"iteration": 3, "tensors": expected}
    assert answers[0].stdout == answers[1].stdout


def test_table_lists_names_shapes_dtypes_and_hashes(tmp_path):
    CheckpointStore(tmp_path).save(7, [whole("model.w", torch.zeros(2, 3, dtype=torch.bfloat16)), *rank_state(0, 1, 1)], {})
    answer = inspect(tmp_path)
    lines = answer.stdout.splitlines()
    assert answer.returncode == 0 and answer.stderr == ""
    assert lines[0].split() == ["tensor", "shape", "dtype", "sha256"]
    assert ["model.w", "2x3", "bfloat16", hashlib.sha256(bytes(12)).hexdigest()] in [line.split() for line in lines]
    assert not any(line.startswith("rng.") for line in lines)


def test_verify_accepts_a_sound_step_and_names_file_and_tensor_of_a_damaged_one(tmp_path):
    save_alone(tmp_path, 3)
    assert inspect(tmp_path, "--verify").returncode == 0
    path = tmp_path / "iter_0000003" / "rank_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[data.index(logical("model.b", (7,), 3).numpy().tobytes())] ^= 4
    path.write_bytes(data)
    answer = inspect(tmp_path, "--verify")
    assert answer.returncode == 1
    assert "rank_00000.safetensors: does not match its sha256" in answer.stdout and "tensor model.b" in answer.stdout
    assert "Traceback" not in answer.stderr
    os.truncate(path, 100)
    assert inspect(tmp_path, "--verify").returncode == 1


def test_verify_of_a_save_directory_fails_when_its_newest_step_is_incomplete(tmp_path):
    save_alone(tmp_path, 3)
    save_alone(tmp_path, 4)
    (tmp_path / "iter_0000004" / "manifest.json").unlink()
    answer = inspect(tmp_path, "--verify")
    assert answer.returncode == 1 and "iter_0000004" in answer.stdout


def test_diff_names_the_tensors_that_differ_and_by_how_much(tmp_path):
    state = {"model.same": torch.ones(3), "model.other": torch.zeros(4), "model.gone": torch.zeros(1)}
    CheckpointStore(tmp_path / "a").save(1, [whole(name, value) for name, value in state.items()], {})
    del state["model.gone"]
    assert inspect(tmp_path / "a", "--diff", tmp_path / "a").returncode == 0
    state["model.other"][2] = -0.25
    CheckpointStore(tmp_path / "b").save(1, [whole(name, value) for name, value in state.items()], {})
    answer = inspect(tmp_path / "a", "--diff", tmp_path / "b")
    assert answer.returncode == 1
    assert "model.other: max abs difference 0.25, 1 of 4 elements" in answer.stdout
    assert "model.gone: only in the first" in answer.stdout and "model.same" not in answer.stdout


def test_merged_safetensors_hold_the_logical_tensors(tmp_path):
    run_distributed(save_on_ranks, 2, str(tmp_path / "two"), 3)
    merged = tmp_path / "merged.safetensors"
    assert inspect(tmp_path / "two", "--to-safetensors", merged).returncode == 0
    tensors = safetensors.torch.load_file(merged)
    assert sorted(tensors) == sorted([*SHAPES, "optimizer.main_param.a"])
    for name, shape in SHAPES.items():
        assert torch.equal(tensors[name], logical(name, shape, 3))


def test_a_directory_without_checkpoint_is_an_error_without_traceback(tmp_path):
    for directory in (tmp_path, tmp_path / "nowhere", tmp_path / "iter_0000001"):
        answer = inspect(directory)
        assert answer.returncode == 1 and answer.stderr.startswith("error: ") and "Traceback" not in answer.stderr
