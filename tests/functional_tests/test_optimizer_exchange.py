"""The plain and the distributed optimizer are one: same numbers, and either goes on from the other's checkpoint; so do all dtypes."""

import itertools
import pathlib
import shutil
from typing import Any

import pytest

from tests.functional_tests.test_resume import numbers, tensor_hashes
from tests.harness.distributed import run_distributed
from tests.harness.jobs import train_job
from tests.harness.t0 import t0_flags

PLAIN: dict[str, Any] = {}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
STEPS, CUT = 8, 4
# A scale that overflows at first, falls to where gradients fit, and grows again: all of the scaler's state matters.
FP16 = {"fp16": True, "initial_loss_scale": 2.0**13, "hysteresis": 1, "loss_scale_window": 2}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": FP16,
    "remainders": {"bf16": True, "use_precision_aware_optimizer": True},
    "16 bit, rounded stochastically": {
        "bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": "bf16", "exp_avg_dtype": "bf16",
        "exp_avg_sq_dtype": "fp16", "main_grads_dtype": "bf16", "stochastic_rounding": True,
    },
}


def jobs(runs: list[list[str]]) -> None:
    """Several jobs, one after the other; runs on each rank."""
    for flags in runs:
        train_job(flags)


def same_numbers(one: pathlib.Path, other: pathlib.Path) -> None:
    """Every logged number is equal; the norm's fp64 sum is formed in another order, which its last bits may show."""
    first, second = numbers(one), numbers(other)
    norms = [[line.pop("grad_norm") or -1.0 for line in lines] for lines in (first, second)]  # null in a skipped step
    assert first == second
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)


@pytest.mark.parametrize(
    ("world_size", "precision"),
    [
        (1, "fp16"), (2, "fp32"), (2, "fp16"), (2, "remainders"), (2, "16 bit, rounded stochastically"),
        *(pytest.param(1, kind, marks=pytest.mark.slow) for kind in PRECISIONS if kind != "fp16"),
        pytest.param(2, "bf16", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_either_optimizer_goes_on_where_the_other_stopped(
    data: pathlib.Path, tmp_path: pathlib.Path, world_size: int, precision: str
) -> None:
    common = dict(data_path=data, train_iters=STEPS, save_interval=CUT, micro_batch_size=1, ddp_bucket_size=5000)
    common |= dict(lr_decay_style="cosine", lr_decay_iters=STEPS, lr_warmup_iters=1, hidden_dropout=0.1)
    common |= PRECISIONS[precision]

    def flags(name: str, optimizer: dict[str, Any], **changes: Any) -> list[str]:
        return t0_flags(**common, **optimizer, **changes, save=str(tmp_path / name))

    runs = [
        flags("plain", PLAIN),
        flags("sharded", SHARDED),
        flags("plain then sharded", PLAIN, exit_interval=CUT),
        flags("plain then sharded", SHARDED),
        flags("sharded then plain", SHARDED, exit_interval=CUT),
        flags("sharded then plain", PLAIN),
    ]
    run_distributed(jobs, world_size, runs, timeout=120)
    expected = tensor_hashes(tmp_path / "plain")
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in expected)
    for name in ("sharded", "plain then sharded", "sharded then plain"):
        same_numbers(tmp_path / "plain", tmp_path / name)
        assert tensor_hashes(tmp_path / name) == expected, name
    if precision == "fp16":
        lines = numbers(tmp_path / "plain")
        after = [line["loss_scale"] for line in lines[CUT - 1 :]]
        assert {line["skipped"] for line in lines} == {0, 1}
        assert any(two > one for one, two in itertools.pairwise(after)), after
        assert any(two < one for one, two in itertools.pairwise(after)), after


def test_remainders_hold_fp32_main_params_through_a_resume_at_another_size(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    common = dict(data_path=data, train_iters=20, bf16=True, micro_batch_size=1, ddp_bucket_size=5000, **SHARDED)
    forms: dict[str, dict[str, Any]] = {"fp32": {}, "remainders": {"use_precision_aware_optimizer": True}}

    def flags(name: str, form: str, **changes: Any) -> list[str]:
        return t0_flags(**common, **forms[form], **changes, save=str(tmp_path / name))

    run_distributed(jobs, 2, [flags(name, name, exit_interval=10) for name in forms], timeout=120)
    for name in forms:
        shutil.copytree(tmp_path / name, tmp_path / f"{name}, then the other")
    at_half = [tensor_hashes(tmp_path / name) for name in forms]
    assert at_half[0] == at_half[1]
    second = [flags(name, name) for name in forms]
    second += [flags("fp32, then the other", "remainders"), flags("remainders, then the other", "fp32")]
    run_distributed(jobs, 1, second, timeout=120)
    expected = tensor_hashes(tmp_path / "fp32")
    for name in ("remainders", "fp32, then the other", "remainders, then the other"):
        assert tensor_hashes(tmp_path / name) == expected, name
        assert numbers(tmp_path / name) == numbers(tmp_path / "fp32"), name


def test_a_change_of_dtype_is_said_once(data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = dict(data_path=data, train_iters=4, bf16=True, save=str(tmp_path / "run"))
    train_job(t0_flags(**common, exit_interval=2))
    capsys.readouterr()
    job = train_job(t0_flags(**common, use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="fp16"))
    said = [line for line in capsys.readouterr().out.splitlines() if "converted" in line]
    assert said == ["optimizer values are converted: exp_avg from float32 to bfloat16, exp_avg_sq from float32 to fp16 in rows"]
    assert job.iteration == 4
