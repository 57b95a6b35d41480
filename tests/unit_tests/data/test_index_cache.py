"""The index cache: keyed by content, damage found and rebuilt, one builder per file system, safe between ranks."""

import hashlib
import logging
import os
import shutil

import numpy as np
import pytest
import torch.distributed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.core.datasets.gpt_dataset import Blend, GPTDatasetConfig, build_gpt_datasets
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.errors import DataError, MegatronError
from megatron.training.data import RankCoordinator
from tests.harness.d0 import write_d0
from tests.harness.distributed import run_distributed

DESCRIPTION = {"seed": 1, "weights": [0.5, 0.5], "limits": None}


def arrays():
    return {"a": np.arange(100, dtype=np.int32), "b": np.arange(14, dtype=np.int64).reshape(7, 2), "c": np.zeros(0, np.uint32)}


class Builder:
    """Counts how often it is asked."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return arrays()


def assert_same(found):
    expected = arrays()
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)


def test_arrays_are_built_once_and_then_loaded(tmp_path):
    build = Builder()
    for _ in range(3):
        assert_same(IndexCache(tmp_path / "deep" / "cache").get(DESCRIPTION, build))
    assert build.calls == 1
    assert sorted(p.suffix for p in (tmp_path / "deep" / "cache").iterdir() if p.name != ".lock") == [".index"]


def test_another_description_is_another_file(tmp_path):
    build = Builder()
    for seed in (1, 2):
        IndexCache(tmp_path).get({**DESCRIPTION, "seed": seed}, build)
    assert build.calls == 2
    assert IndexCache(tmp_path).load({**DESCRIPTION, "seed": 3}) is None


def test_a_file_under_the_wrong_name_is_not_believed(tmp_path):
    cache = IndexCache(tmp_path)
    cache.get(DESCRIPTION, arrays)
    other = {**DESCRIPTION, "seed": 2}
    shutil.copy(cache.path(DESCRIPTION), cache.path(other))
    assert cache.load(other) is None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_found_and_repaired(tmp_path, data):
    cache = IndexCache(tmp_path)
    cache.get(DESCRIPTION, arrays)
    path = cache.path(DESCRIPTION)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert_same(cache.get(DESCRIPTION, arrays))
    assert_same(cache.load(DESCRIPTION))


def test_damage_is_reported(tmp_path, caplog):
    cache = IndexCache(tmp_path)
    cache.get(DESCRIPTION, arrays)
    os.truncate(cache.path(DESCRIPTION), 100)
    cache.get(DESCRIPTION, arrays)
    assert "is damaged and is built again" in caplog.text


@pytest.mark.parametrize("announce", [True, False])
def test_an_unwritable_folder_costs_one_warning(tmp_path, caplog, announce):
    (tmp_path / "file").touch()
    cache = IndexCache(tmp_path / "file" / "cache", announce)
    assert_same(cache.get(DESCRIPTION, arrays))
    assert [r.levelname for r in caplog.records] == ["WARNING"] * announce


def test_what_a_killed_builder_left_is_removed(tmp_path):
    (tmp_path / "x.123.partial").write_bytes(b"half")
    IndexCache(tmp_path).get(DESCRIPTION, arrays)
    assert not list(tmp_path.glob("*.partial"))


def config(prefixes, cache, **changes):
    weights = (0.7, 0.3) if len(prefixes) == 2 else None
    blend = Blend(tuple(prefixes), weights)
    return GPTDatasetConfig(seq_length=16, split="80,20,0", blend=blend, cache_path=cache and str(cache), **changes)


def cache_files(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.index")}


def test_the_key_is_content_not_path_or_time(tmp_path):
    first, second = write_d0(tmp_path / "one"), tmp_path / "moved" / "two"
    cache = tmp_path / "cache"
    build_gpt_datasets(config([first], cache), (40, 5, 0))
    built = cache_files(cache)
    second.parent.mkdir()
    for suffix in (".bin", ".idx"):
        os.rename(f"{first}{suffix}", f"{second}{suffix}")
        os.utime(f"{second}{suffix}", (1, 1))
    build_gpt_datasets(config([str(second)], cache), (40, 5, 0))
    assert cache_files(cache) == built
    write_d0(second, documents=63)
    build_gpt_datasets(config([str(second)], cache), (40, 5, 0))
    assert len(cache_files(cache)) > len(built)


def test_without_a_cache_path_the_cache_lies_beside_the_data(tmp_path):
    build_gpt_datasets(config([write_d0(tmp_path / "d0")], None), (40, 0, 0))
    assert len(cache_files(tmp_path / "cache")) == 1


# --- R24: four ranks


class Built(logging.Handler):
    """Collects the names of the indices that this process builds."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.paths, self.warnings = [], []

    def emit(self, record):
        text = record.getMessage()
        (self.paths if text.startswith("building index") else self.warnings).append(text)


def build_on_rank(prefixes, folders, local_ranks, repetitions):
    """Cold builds on this rank: per repetition (hash of all indices, indices built here, warnings)."""
    rank = torch.distributed.get_rank()
    logger = logging.getLogger("megatron.core.datasets.index_cache")
    level, local = logger.level, os.environ["LOCAL_RANK"]
    logger.setLevel(logging.INFO)
    os.environ["LOCAL_RANK"] = str(local_ranks[rank])
    results = []
    try:
        for repetition in range(repetitions):
            handler = Built()
            logger.addHandler(handler)
            folder = os.path.join(folders[rank], str(repetition))
            sets = build_gpt_datasets(config(prefixes, folder), (64, 20, 0), RankCoordinator())
            logger.removeHandler(handler)
            results.append((index_hash(sets), handler.paths, handler.warnings))
    finally:
        logger.setLevel(level)
        os.environ["LOCAL_RANK"] = local
    return results


def index_hash(sets):
    digest = hashlib.sha256()
    for dataset in (s for s in sets if s is not None):
        digest.update(dataset.dataset_index.tobytes() + dataset.sample_index.tobytes())
        for part in dataset.datasets:
            for array in (part.index.document_index, part.index.sample_index, part.index.shuffle_index):
                digest.update(array.tobytes())
    return digest.hexdigest()


INDICES = 6  # of a blend of two sets in two splits: per split the blend's and each set's


def prefixes_in(folder):
    return [write_d0(folder / "d0"), write_d0(folder / "d1", documents=40, factor=93)]


def assert_one_builder(per_rank, ranks, expected=INDICES):
    """Among the ranks of one file system every index was built by exactly one."""
    for repetition in range(len(per_rank[0])):
        built = [path for rank in ranks for path in per_rank[rank][repetition][1]]
        assert len(built) == len(set(built)) == expected


def assert_same_order(per_rank):
    for repetition in zip(*per_rank, strict=True):
        assert len({found for found, _, _ in repetition}) == 1


def test_ranks_of_one_machine_build_each_index_once(tmp_path):
    per_rank = run_distributed(build_on_rank, 4, prefixes_in(tmp_path), [str(tmp_path / "cache")] * 4, [0, 1, 2, 3], 20)
    assert_same_order(per_rank)
    assert_one_builder(per_rank, range(4))


def test_machines_that_share_a_file_system_build_each_index_once(tmp_path):
    per_rank = run_distributed(build_on_rank, 4, prefixes_in(tmp_path), [str(tmp_path / "cache")] * 4, [0, 1, 0, 1], 20)
    assert_same_order(per_rank)
    assert_one_builder(per_rank, range(4))


def test_machines_with_their_own_disks_each_build_once(tmp_path):
    folders = [str(tmp_path / machine) for machine in "aabb"]
    per_rank = run_distributed(build_on_rank, 4, prefixes_in(tmp_path), folders, [0, 1, 0, 1], 20)
    assert_same_order(per_rank)
    assert_one_builder(per_rank, (0, 1))
    assert_one_builder(per_rank, (2, 3))


def test_a_disk_without_a_builder_of_its_own_gets_one(tmp_path):
    folders = [str(tmp_path / machine) for machine in "aabb"]
    per_rank = run_distributed(build_on_rank, 4, prefixes_in(tmp_path), folders, [0, 1, 2, 3], 5)
    assert_same_order(per_rank)
    assert_one_builder(per_rank, (0, 1))
    assert_one_builder(per_rank, (2, 3))


def test_unwritable_caches_are_built_in_memory_with_a_warning_from_each_machine(tmp_path):
    (tmp_path / "file").touch()
    per_rank = run_distributed(build_on_rank, 4, prefixes_in(tmp_path), [str(tmp_path / "file" / "cache")] * 4, [0, 1, 0, 1], 2)
    assert_same_order(per_rank)
    for rank, results in enumerate(per_rank):
        for _, _, warnings in results:
            assert bool(warnings) == (rank in (0, 2))


def test_truncated_index_files_are_rebuilt_once(tmp_path):
    prefixes, cache = prefixes_in(tmp_path), tmp_path / "cache"
    run_distributed(build_on_rank, 4, prefixes, [str(cache)] * 4, [0, 1, 2, 3], 1)
    files = list((cache / "0").glob("*.index"))
    assert len(files) == INDICES
    for path in files[:2]:
        os.truncate(path, path.stat().st_size // 2)
    per_rank = run_distributed(build_on_rank, 4, prefixes, [str(cache)] * 4, [0, 1, 2, 3], 1)
    assert_same_order(per_rank)
    assert_one_builder(per_rank, range(4), expected=2)


def build_and_tell(prefixes):
    """The error of a build on this rank: (class, text, whether this rank reports it)."""
    rank = torch.distributed.get_rank()
    try:
        build_gpt_datasets(config([prefixes[rank]], os.path.dirname(prefixes[rank]) + "/cache"), (40, 5, 0), RankCoordinator())
    except MegatronError as error:
        return type(error).__name__, str(error), error.reported, error.exit_code
    return None


def test_damage_that_one_rank_sees_ends_all_ranks_with_its_text(tmp_path):
    prefixes = [write_d0(tmp_path / f"d{rank}") for rank in range(2)]
    os.truncate(f"{prefixes[1]}.bin", 1916)
    first, second = run_distributed(build_and_tell, 2, prefixes)
    for _, text, _, code in (first, second):
        assert code == DataError.exit_code
        assert f"{prefixes[1]}.bin should have 1918 bytes" in text
        assert "has 1916" in text
    assert (first[2], second[2]) == (False, True)


def test_ranks_that_find_different_data_stop_together(tmp_path):
    prefixes = [write_d0(tmp_path / "a"), write_d0(tmp_path / "b", factor=93, documents=60)]
    for _, text, _, code in run_distributed(build_and_tell, 2, prefixes):
        assert "rank 1 finds other documents" in text
        assert code == DataError.exit_code
