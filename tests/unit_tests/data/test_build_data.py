"""build_data: from the run's configuration to batches, and one error on all ranks where that is impossible (R16)."""

import pathlib
import shutil

import pytest
import torch.distributed

from megatron.core.errors import ConfigError, DataError, MegatronError
from megatron.core.num_microbatches_calculator import NumMicroBatches
from megatron.core.tokenizers import build_tokenizer
from megatron.training.config import parse_command_line
from megatron.training.data import build_data
from tests.harness.d0 import write_d0
from tests.harness.distributed import run_distributed
from tests.harness.t0 import t0_flags
from tests.unit_tests.data.test_indexed_dataset import DAMAGES

FIXTURES = pathlib.Path(__file__).resolve().parents[2] / "fixtures" / "megatron_core"
D0, D1 = str(FIXTURES / "d0"), str(FIXTURES / "d1")


def build(flags, dp_rank=0, dp_size=1):
    config = parse_command_line(flags).resolved.config
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    calculator = NumMicroBatches(8, 2, dp_size)
    return build_data(config, tokenizer, dp_rank=dp_rank, dp_size=dp_size, train_samples=48, calculator=calculator)


def ids_of_steps(flags):
    """Sample ids and tokens of the first three steps on this rank."""
    size = torch.distributed.get_world_size()
    data = build(flags, torch.distributed.get_rank(), size)
    return [
        [
            (int(i), row.tolist())
            for batch in data.train_step(8 * step)
            for i, row in zip(batch["sample_ids"], batch["tokens"], strict=True)
        ]
        for step in range(3)
    ]


def test_two_and_four_ranks_read_the_batches_of_one(tmp_path):
    flags = t0_flags(D0, data_cache_path=tmp_path)
    data = build(flags)
    whole = [
        [(int(i), row.tolist()) for b in data.train_step(8 * k) for i, row in zip(b["sample_ids"], b["tokens"], strict=True)]
        for k in range(3)
    ]
    for ranks in (2, 4):
        per_rank = run_distributed(ids_of_steps, ranks, flags)
        assert [sorted(pair for rank in per_rank for pair in rank[k]) for k in range(3)] == whole


def test_options_reach_the_samples(tmp_path):
    flags = t0_flags(
        ["0.7", D0, "0.3", D1],
        data_cache_path=tmp_path,
        split="60,40,0",
        eval_iters=2,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        no_mmap_bin_files=True,
        data_shuffle="epoch",
    )
    data = build(flags)
    batch = data.train_step(0)[0]
    assert (batch["loss_mask"] == (batch["tokens"] != 100)).all()
    assert batch["document_ids"].max() > 0
    assert (batch["position_ids"][:, 1:] == 0).any()
    assert not data.datasets["train"].datasets[0].tokens.mmap
    assert [len(step) for step in data.evaluation("valid", 2)] == [4, 4]
    assert not data.has("test")


def test_paths_per_split_need_no_split(tmp_path):
    flags = t0_flags(None, split=None, train_data_path=D0, valid_data_path=D1, eval_iters=1, data_cache_path=tmp_path)
    data = build(flags)
    assert [data.datasets[name].tokens.prefix for name in ("train", "valid")] == [D0, D1]


def error_of(flags):
    """(text, exit code, whether this rank reports) of build_data on this rank."""
    try:
        build(flags, torch.distributed.get_rank(), torch.distributed.get_world_size())
    except MegatronError as error:
        return str(error), error.exit_code, error.reported
    return None


@pytest.mark.parametrize("no_mmap", [False, True])
@pytest.mark.parametrize(
    "damage",
    ["two bytes off the bin", "one byte off the idx", "index of another set", "empty bin", "wrong magic", "missing idx"],
)
def test_damaged_data_stops_both_ranks_before_training_and_is_told_once(tmp_path, damage, no_mmap):
    prefix = write_d0(tmp_path / "d0")
    act, texts = DAMAGES[damage]
    act(prefix)
    results = run_distributed(error_of, 2, t0_flags(prefix, data_cache_path=tmp_path / "cache", no_mmap_bin_files=no_mmap))
    assert [reported for _, _, reported in results] == [True, False]
    for text, code, _ in results:
        assert code == 2
        for wanted in (f"{prefix}.bin", f"{prefix}.idx", *texts):
            assert wanted in text
    assert not (tmp_path / "cache").exists()


def test_wrong_options_are_configuration_errors(tmp_path):
    with pytest.raises(ConfigError):
        build(t0_flags(["0.5", D0, D1], data_cache_path=tmp_path))
    with pytest.raises(ConfigError, match="weights"):
        build(t0_flags(["0.5", D0, "nan", D1], data_cache_path=tmp_path))


def test_another_tokenizers_data_is_refused_when_read(tmp_path):
    prefix = tmp_path / "d0"
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{D0}{suffix}", f"{prefix}{suffix}")
    config = parse_command_line(t0_flags(prefix, data_cache_path=tmp_path)).resolved.config
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=50)
    data = build_data(config, tokenizer, dp_rank=0, dp_size=1, train_samples=48, calculator=NumMicroBatches(8, 2, 1))
    with pytest.raises(DataError, match="another tokenizer"):
        data.train_step(0)
