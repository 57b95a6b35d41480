"""Norms by parameter group and the count of zeros are the same in every layout; a bad gradient of one parameter is named."""

import math
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed

from megatron.core.errors import NonFiniteError
from megatron.training.gpt_builder import build_gpt_model
from tests.harness.d0 import write_d0
from tests.harness.distributed import run_distributed
from tests.harness.jobs import read_metrics, train_job
from tests.harness.t0 import t0_flags

SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 5000}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # vocabularies of the same padded size
    "plain": (1, {"make_vocab_size_divisible_by": 16}),
    "plain dp2": (2, {"make_vocab_size_divisible_by": 16}),
    "sharded dp2": (2, {"make_vocab_size_divisible_by": 16, **SHARDED}),
    "two instances dp4": (4, {"make_vocab_size_divisible_by": 16, **SHARDED, "num_distributed_optimizer_instances": 2}),
    "tp2": (2, {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 8, **SHARDED}),
    "tp2 with sequence parallelism, dp2": (
        4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "make_vocab_size_divisible_by": 8},
    ),
    "pp2": (2, {"pipeline_model_parallel_size": 2, "make_vocab_size_divisible_by": 16, **SHARDED}),
}  # fmt: skip
GROUPS = {"adam, decayed", "adam, not decayed", "adam, decayed, decoupled lr"}


def test_group_norms_and_zeros_are_those_of_one_process_in_every_layout(tmp_path: pathlib.Path) -> None:
    write_d0(str(tmp_path / "d0"))
    common = dict(
        data_path=str(tmp_path / "d0"), train_iters=2, log_param_group_norms=True, log_num_zeros_in_grad=True, log_params_norm=True,
        decoupled_lr=5e-4, tensorboard_dir=str(tmp_path / "tb"), global_batch_size=8, micro_batch_size=1,
    )  # fmt: skip
    lines = {}
    for name, (ranks, options) in LAYOUTS.items():
        flags = t0_flags(**{**common, **options}, metrics_file=str(tmp_path / f"{name}.jsonl"))
        run_distributed(train_job, ranks, flags)
        lines[name] = read_metrics(tmp_path / f"{name}.jsonl")
    for name, steps in lines.items():
        for step, expected in zip(steps, lines["plain"], strict=True):
            norms = step["param_group_norms"]
            assert set(norms) == GROUPS
            for total, part in (("grad_norm", "grad"), ("params_norm", "param")):
                assert math.hypot(*(group[part] for group in norms.values())) == pytest.approx(step[total], rel=1e-9), name
            for group, parts in norms.items():
                assert parts == pytest.approx(expected["param_group_norms"][group], rel=2e-5), (name, group)
            assert step["num_zeros"] == expected["num_zeros"] > 0, name
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    for group in GROUPS:
        last = lines["pp2"][-1]["param_group_norms"][group]
        for tag, part in (("grad-norm", "grad"), ("params-norm", "param")):
            assert events.Scalars(f"{tag}/{group}")[-1].value == pytest.approx(last[part], rel=1e-6)


def poisoned(runs: list[tuple[list[str], str]]) -> list[tuple[str, int, bool]]:
    """(error, exit code, whether this rank reports it) of jobs in which rank 1's gradient of one parameter is NaN."""

    def build(name: str, *args: Any, **kwargs: Any) -> torch.nn.Module:
        model = build_gpt_model(*args, **kwargs)
        if torch.distributed.get_rank() == 1:
            dict(model.named_parameters())[name].register_hook(lambda grad: grad.index_fill(0, torch.tensor([3]), math.nan))
        return model

    found = []
    for flags, name in runs:
        try:
            train_job(flags, model_builder=lambda *args, bad=name, **kwargs: build(bad, *args, **kwargs))
            found.append(("", 0, False))
        except NonFiniteError as error:
            found.append((str(error), error.exit_code, error.reported))
    return found


def test_a_nan_in_one_parameter_of_one_rank_is_named_before_it_spreads(tmp_path: pathlib.Path) -> None:
    write_d0(str(tmp_path / "d0"))
    names = ("decoder.layers.1.input_layernorm.weight", "decoder.layers.2.mlp.linear_fc2.weight")
    engines: list[dict[str, Any]] = [{}, {"overlap_grad_reduce": True}, {"use_distributed_optimizer": True}, SHARDED]
    runs = [
        (t0_flags(data_path=str(tmp_path / "d0"), train_iters=2, no_gradient_accumulation_fusion=True, **engine), name)
        for engine in engines
        for name in names
    ]
    first, second = run_distributed(poisoned, 2, runs)
    for (_, name), one, two in zip(runs, first, second, strict=True):
        assert one[0] == two[0] and (one[1:], two[1:]) == ((1, False), (1, True))
        assert f"rank 1: gradient of {name} is not finite" in one[0] and "rank 0" not in one[0]
