"""The dry run's bytes per rank are those that the run itself then counts."""

import pathlib
import re
from typing import Any

import pytest

from megatron.core.optimizer import memory_report
from megatron.training.config import parse_command_line
from megatron.training.dry_run import dry_run_report
from tests.harness.d0 import write_d0
from tests.harness.distributed import run_distributed
from tests.harness.jobs import make_trainer
from tests.harness.t0 import t0_flags


def held(flags: list[str]) -> dict[str, int]:
    """What a rank really holds; runs on each rank."""
    trainer = make_trainer(flags)
    trainer.data.close()
    report = memory_report(trainer.model_chunks, trainer.optimizer)
    return {"main_params": report.main_params, "main_grads": report.main_grads, "moments": report.moments, "total": report.total}


def foretold(flags: list[str], world_size: int, stage: int = 0) -> dict[str, int]:
    """What the dry run says of the ranks of a stage."""
    text = dry_run_report(parse_command_line(flags).resolved.config, world_size)
    names = {"main params": "main_params", "main grads": "main_grads", "moments": "moments", "together": "total"}
    line = [line for line in text.splitlines() if line.startswith("model state per rank")][stage]
    return {key: int(re.search(rf"{name} ([\d,]+) bytes", line).group(1).replace(",", "")) for name, key in names.items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"bf16": True}, {"fp16": True}, {"fp16": True, "accumulate_allreduce_grads_in_fp32": True},
     {"bf16": True, "use_precision_aware_optimizer": True},
     {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": "bf16", "exp_avg_dtype": "fp16", "main_grads_dtype": "bf16"},
     {"fp16": True, "use_precision_aware_optimizer": True, "main_params_dtype": "fp16", "exp_avg_sq_dtype": "bf16"},
     {"optimizer": "sgd"}, {"optimizer": "sgd", "sgd_momentum": 0.0}, {"optimizer": "lion"}, {"freeze": ["embedding.*"]}],
)  # fmt: skip
def test_bytes_foretold_are_the_bytes_held(tmp_path: pathlib.Path, sharded: bool, options: dict[str, Any]) -> None:
    write_d0(str(tmp_path / "d0"))
    flags = t0_flags(data_path=str(tmp_path / "d0"), ddp_bucket_size=5000, use_distributed_optimizer=sharded or None, **options)
    assert run_distributed(held, 2, flags) == [foretold(flags, 2)] * 2


def test_bytes_of_each_pipeline_stage(tmp_path: pathlib.Path) -> None:
    """Two interleaved chunks per stage, tied embeddings, another number of bytes on each stage."""
    write_d0(str(tmp_path / "d0"))
    pipeline = {
        "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E|ttt|t|L",
        "untie_embeddings_and_output_weights": False,
    }  # fmt: skip
    flags = t0_flags(data_path=str(tmp_path / "d0"), ddp_bucket_size=5000, use_distributed_optimizer=True, **pipeline)
    stages = [foretold(flags, 4, stage) for stage in range(2)]
    assert run_distributed(held, 4, flags) == [stages[0], stages[0], stages[1], stages[1]]
    assert stages[0] != stages[1]


def test_bytes_of_muon_are_those_of_the_fullest_rank(tmp_path: pathlib.Path) -> None:
    write_d0(str(tmp_path / "d0"))
    for sharded, options in ((None, {}), (True, {}), (True, {"muon_scalar_optimizer": "lion", "bf16": True})):
        flags = t0_flags(
            data_path=str(tmp_path / "d0"), ddp_bucket_size=5000, use_distributed_optimizer=sharded, optimizer="muon", **options
        )
        ranks = run_distributed(held, 2, flags)
        assert max(ranks, key=lambda rank: rank["moments"]) == foretold(flags, 2)


def test_offloaded_bytes_are_those_that_leave_the_device_and_the_copies(tmp_path: pathlib.Path) -> None:
    write_d0(str(tmp_path / "d0"))
    common = dict(data_path=str(tmp_path / "d0"), ddp_bucket_size=5000, use_distributed_optimizer=True, bf16=True)
    kept = foretold(t0_flags(**common), 2)
    text = dry_run_report(parse_command_line(t0_flags(**common, optimizer_cpu_offload=True)).resolved.config, 2)
    assert "main params 0 bytes, main grads 0 bytes, moments 0 bytes" in text
    host = int(re.search(r"in host memory ([\d,]+) bytes", text).group(1).replace(",", ""))  # type: ignore[union-attr]
    elements = kept["main_params"] // 4
    assert host == kept["main_params"] + kept["moments"] + (2 + 4) * elements  # copies of bf16 parameters and fp32 gradients
    half = t0_flags(**common, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    text = dry_run_report(parse_command_line(half).resolved.config, 2)
    part = int(re.search(r"in host memory ([\d,]+) bytes", text).group(1).replace(",", ""))  # type: ignore[union-attr]
    assert host / 2 <= part < host
