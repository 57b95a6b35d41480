"""Kills, corruption and hostile files: old or new is loaded, never a mix, and nothing damaged is loaded in silence."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.manifest import decode
from megatron.core.dist_checkpointing.mapping import whole
from megatron.core.dist_checkpointing.serialization import DamagedCheckpointError
from megatron.core.dist_checkpointing.store import CheckpointStore
from megatron.core.errors import CheckpointError
from tests.unit_tests.dist_checkpointing.kill_trials import NEW, OLD
from tests.unit_tests.dist_checkpointing.toys import assert_holds, load_alone, rank_state, save_alone


@pytest.mark.parametrize(("ranks", "scenario"), [(1, "new"), (1, "replace"), (2, "new"), (2, "replace")])
def test_a_kill_at_any_point_of_a_save_leaves_the_old_or_the_new_step(tmp_path, ranks, scenario):
    command = [sys.executable, "-m", "tests.unit_tests.dist_checkpointing.kill_trials", str(tmp_path), str(ranks), scenario]
    run = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    trials = [json.loads(line) for line in run.stdout.splitlines()]
    for guilty in range(ranks):
        mine = [trial for trial in trials if trial["guilty"] == guilty]
        killed, survived = mine[:-1], mine[-1]
        assert all(trial["codes"][guilty] == -9 for trial in killed)
        assert survived["codes"] == [0] * ranks and survived["values"] == NEW
        values = [trial["values"] for trial in killed]
        assert set(values) <= {OLD, NEW} and values[0] == OLD
        assert values == sorted(values), "once published, a step stays published"
        assert len(killed) >= (18 if guilty == 0 else 5), len(killed)
        assert {trial["lost"] for trial in killed} == {None}
        assert all(trial["pointer_ok"] for trial in killed)
        if guilty == 0:
            assert NEW in values


# -------------------------------------------------------------------------------------------------------------- corruption


def assert_refused(directory):
    tensors = rank_state(0, 1, 2, filled=False)
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(directory).load(2, tensors)
    assert CheckpointStore(directory).verify(2) != []
    assert "manifest.json" in str(caught.value) or "rank_00000.safetensors" in str(caught.value)


def test_bit_flips_at_random_places_of_all_files_are_refused(tmp_path):
    save_alone(tmp_path, 2)
    chance = random.Random(20)
    for name in ("manifest.json", "rank_00000.safetensors"):
        path = tmp_path / "iter_0000002" / name
        good = path.read_bytes()
        for _ in range(100):
            bad = bytearray(good)
            bad[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
            path.write_bytes(bad)
            assert_refused(tmp_path)
        path.write_bytes(good)
    load_alone(tmp_path, 2)


def test_truncated_extended_zeroed_and_missing_files_are_refused(tmp_path):
    save_alone(tmp_path, 2)
    for name in ("manifest.json", "rank_00000.safetensors"):
        path = tmp_path / "iter_0000002" / name
        good = path.read_bytes()
        for bad in (b"", good[:1], good[: len(good) // 2], good[:-1], good + b"\0", bytes(len(good))):
            path.write_bytes(bad)
            assert_refused(tmp_path)
        path.unlink()
        assert_refused(tmp_path)
        path.write_bytes(good)


def test_swapped_and_stale_files_are_refused(tmp_path):
    save_alone(tmp_path, 2)
    save_alone(tmp_path, 3)
    for name in ("manifest.json", "rank_00000.safetensors"):
        path = tmp_path / "iter_0000002" / name
        good = path.read_bytes()
        shutil.copy(tmp_path / "iter_0000003" / name, path)
        assert_refused(tmp_path)
        path.write_bytes(good)
    load_alone(tmp_path, 2)


# ----------------------------------------------------------------------------------------------------------------- hostile


def forge(directory, change, header=None):
    """Rewrite the manifest of step 2 with a right checksum after `change(body)`."""
    path = directory / "iter_0000002" / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["sha256"]
    change(body)
    path.write_bytes(sealed(json.dumps(body, separators=(",", ":"))))


def sealed(text):
    rest = text[1:].encode()
    return b'{"sha256":"' + hashlib.sha256(rest).hexdigest().encode() + b'",' + rest


def rename_file(name):
    def change(body):
        body["files"] = {name: next(iter(body["files"].values()))}
        for tensor in body["tensors"].values():
            for piece in tensor["pieces"]:
                piece["file"] = name

    return change


def tensor_change(**values):
    return lambda body: body["tensors"]["model.a"].update(values)


def piece_change(**values):
    return lambda body: body["tensors"]["model.a"]["pieces"][0].update(values)


HOSTILE = {
    "parent path": rename_file("../iter_0000003/rank_00000.safetensors"),
    "absolute path": rename_file("/etc/passwd"),
    "dot": rename_file("."),
    "manifest as data": rename_file("manifest.json"),
    "newline": rename_file("rank_00000.safetensors\n"),
    "missing file": rename_file("rank_00001.safetensors"),
    "huge shape": tensor_change(shape=[1 << 40, 1 << 40]),
    "negative shape": tensor_change(shape=[-5, -6]),
    "float shape": tensor_change(shape=[5.0, 6]),
    "bool shape": tensor_change(shape=[True, 6]),
    "many dims": tensor_change(shape=[1] * 100),
    "unknown dtype": tensor_change(dtype="OBJECT"),
    "other dtype": tensor_change(dtype="I32"),
    "no pieces": tensor_change(pieces=[]),
    "pieces no list": tensor_change(pieces={}),
    "alias of nothing": tensor_change(alias_of="model.q"),
    "alias of itself": tensor_change(alias_of="model.a"),
    "overlap": lambda body: body["tensors"]["model.a"]["pieces"].append(body["tensors"]["model.a"]["pieces"][0]),
    "shared bytes": lambda body: body["tensors"]["optimizer.exp_avg.a"].update(pieces=body["tensors"]["model.a"]["pieces"]),
    "outside": piece_change(offset=[1, 0]),
    "checksums left out": piece_change(crc32=[]),
    "huge file": lambda body: body["files"]["rank_00000.safetensors"].update(bytes=1 << 47),
    "huge number": lambda body: body["files"]["rank_00000.safetensors"].update(bytes=10**4000),
    "other format": lambda body: body.update(format="pickle"),
    "other version": lambda body: body.update(version=2),
    "no tensors": lambda body: body.pop("tensors"),
    "other step": lambda body: body.update(iteration=3),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_with_right_checksums_are_refused(tmp_path, name):
    save_alone(tmp_path, 2)
    save_alone(tmp_path, 3)
    forge(tmp_path, HOSTILE[name])
    tensors = rank_state(0, 1, 2, filled=False)
    with pytest.raises(CheckpointError):
        CheckpointStore(tmp_path).load(2, tensors)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "{" + "[" * 100 + "]" * 100, "null]", '{"a":1e999999}', '{"format":1}'])
def test_malformed_and_deeply_nested_json_is_refused(text):
    with pytest.raises(DamagedCheckpointError):
        decode(sealed(text), "manifest.json")


def test_links_and_special_files_are_refused(tmp_path):
    save_alone(tmp_path, 2)
    path = tmp_path / "iter_0000002" / "rank_00000.safetensors"
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert_refused(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert_refused(tmp_path)


def rewrite_header(path, change):
    """Change the header of a data file in place; its length and data stay."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    assert len(text) == size
    path.write_bytes(data[:8] + text + data[8 + size :])
    return serialization.zlib.crc32(data[:8] + text)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["model.b"].update(data_offsets=h["model.a"]["data_offsets"]),
        lambda h: h["model.b"].update(dtype="I32"),
        lambda h: h["model.b"].update(shape=[9]),
        lambda h: h["model.b"].update(data_offsets=[0, 1]),
    ],
)
def test_hostile_headers_with_right_checksums_are_refused(tmp_path, change):
    save_alone(tmp_path, 2)
    crc = rewrite_header(tmp_path / "iter_0000002" / "rank_00000.safetensors", change)
    forge(tmp_path, lambda body: body["files"]["rank_00000.safetensors"].update(header_crc32=crc))
    with pytest.raises(DamagedCheckpointError):
        CheckpointStore(tmp_path).load(2, rank_state(0, 1, 2, filled=False))


def test_a_header_length_beyond_the_file_is_refused_before_it_is_read(tmp_path):
    save_alone(tmp_path, 2)
    path = tmp_path / "iter_0000002" / "rank_00000.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(DamagedCheckpointError, match="header does not fit"):
        CheckpointStore(tmp_path).load(2, [*rank_state(0, 1, 2, filled=False)])


def test_loading_changes_no_byte_of_the_checkpoint(tmp_path):
    save_alone(tmp_path, 2)
    before = {path.name: path.read_bytes() for path in (tmp_path / "iter_0000002").iterdir()}
    tensors = rank_state(0, 1, 2, filled=False)
    CheckpointStore(tmp_path).load(2, tensors)
    assert_holds(tensors, 2)
    assert {path.name: path.read_bytes() for path in (tmp_path / "iter_0000002").iterdir()} == before


def test_a_tensor_larger_than_a_chunk_is_checked_chunk_by_chunk(tmp_path):
    value = torch.randn((serialization.CHUNK_BYTES // 4) * 2 + 10)
    store = CheckpointStore(tmp_path)
    store.save(1, [whole("model.x", value)], {})
    path = tmp_path / "iter_0000001" / "rank_00000.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(DamagedCheckpointError, match=r"tensor model.x: bytes"):
        store.load(1, [whole("model.x", torch.zeros_like(value))])
