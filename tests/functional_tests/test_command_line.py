"""The command line as a user types it: messages, exit codes, nothing written on errors, logs that parsers understand."""

import json
import pathlib
import re
import subprocess
from typing import Any

import pytest

from tests.harness.d0 import write_d0
from tests.harness.jobs import read_metrics
from tests.harness.t0 import run_pretrain, t0_flags

CONSOLE = re.compile(r"iteration\s+(\d+)/\s*\d+.*elapsed time per iteration \(ms\):\s*([\d.]+)")


@pytest.fixture
def data(tmp_path: pathlib.Path) -> pathlib.Path:
    """D0 on disk."""
    write_d0(str(tmp_path / "d0"))
    return tmp_path / "d0"


def refused(result: "subprocess.CompletedProcess[str]", *words: str) -> None:
    """Exit code 2, one message with these words, no traceback."""
    text = result.stdout + result.stderr
    assert result.returncode == 2, text
    assert "Traceback" not in text, text
    for word in words:
        assert word.replace("-", "_") in result.stderr.replace("-", "_"), text  # an option is named as a flag or as a field


def test_one_process_trains_and_writes_what_the_interface_promises(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    save = tmp_path / "run"
    result = run_pretrain(
        t0_flags(data_path=str(data), train_iters=7, log_interval=3, save=str(save), eval_iters=0, tensorboard_dir=str(save / "tb"))
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert [int(m.group(1)) for m in CONSOLE.finditer(result.stdout)] == [3, 6, 7]
    lines = read_metrics(save / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [3, 6, 7]
    assert lines[-1]["consumed_samples"] == 56 and lines[-1]["consumed_tokens"] == 56 * 16
    promised = (
        "iteration consumed_samples consumed_tokens lm_loss grad_norm learning_rate loss_scale skipped global_batch_size step_time_s "
        "data_time_s exposed_comm_time_s tokens_per_s tflops_per_rank mfu peak_memory_bytes"
    )
    assert set(promised.split()) <= set(lines[0])
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "7"
    again = run_pretrain(["--config", str(save / "config.yaml")])
    assert again.returncode == 0, again.stderr
    assert [line["iteration"] for line in read_metrics(save / "metrics.jsonl")] == [3, 6, 7]


def test_flops_follow_the_architecture(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    result = run_pretrain(t0_flags(data_path=str(data), train_iters=2, log_interval=1, save=str(tmp_path / "run"), eval_iters=0))
    assert result.returncode == 0, result.stderr
    line = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    flops = line["tflops_per_rank"] * 1e12 * line["step_time_s"]
    assert abs(flops - 34_013_184) / 34_013_184 < 0.02
    assert line["tokens_per_s"] == pytest.approx(128 / line["step_time_s"])


@pytest.mark.parametrize("damage", ["cut bin", "cut idx", "other idx", "empty bin", "magic", "missing idx"])
def test_damaged_data_is_refused_before_training_with_both_paths(data: pathlib.Path, tmp_path: pathlib.Path, damage: str) -> None:
    bin_, idx = data.with_suffix(".bin"), data.with_suffix(".idx")
    if damage == "cut bin":
        bin_.write_bytes(bin_.read_bytes()[:-2])
    elif damage == "cut idx":
        idx.write_bytes(idx.read_bytes()[:-1])
    elif damage == "other idx":
        fixture = pathlib.Path(__file__).resolve().parents[1] / "fixtures" / "megatron_core" / "d1.idx"
        idx.write_bytes(fixture.read_bytes())
    elif damage == "empty bin":
        bin_.write_bytes(b"")
    elif damage == "magic":
        idx.write_bytes(b"WRONG" + idx.read_bytes()[5:])
    else:
        idx.unlink()
    result = run_pretrain(t0_flags(data_path=str(data), train_iters=1, save=str(tmp_path / "run"), eval_iters=0))
    refused(result, str(idx))
    assert "iteration  " not in result.stdout and not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch_size": 8, "micro_batch_size": 3}, ("global_batch_size", "micro_batch_size")),
        ({"num_attention_heads": 3}, ("num_attention_heads", "hidden_size")),
        ({"seq_length": 0}, ("seq_length",)),
        ({"tensor_model_parallel_size": 3}, ("tensor_model_parallel_size",)),
        ({"lr": "abc"}, ("lr", "abc")),
        ({"overlap_param_gather": True}, ("overlap_param_gather", "use_distributed_optimizer")),
        ({"bf16": True, "fp16": True}, ("bf16", "fp16")),
        ({"data_path": "/nowhere/at-all"}, ("/nowhere/at-all",)),
    ],
)
def test_impossible_settings_are_refused_with_the_options_named(
    data: pathlib.Path, tmp_path: pathlib.Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    result = run_pretrain(t0_flags(**{"data_path": str(data), "train_iters": 1, "save": str(tmp_path / "run"), **changes}))
    refused(result, *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["weigth_decay: 0.1", "model:\n  lr: 1.0", "lr: 1e-3\nlr: 1e-3", "weight-decay: 0.1"])
def test_wrong_keys_are_refused_with_file_and_line(data: pathlib.Path, tmp_path: pathlib.Path, text: str) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text(text + "\n")
    result = run_pretrain(["--config", str(config), *t0_flags(data_path=str(data), save=str(tmp_path / "run"))])
    refused(result, f"{config}:")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags", [["--train-iter", "5"], ["--optimzer.lr", "1"]])
def test_abbreviated_and_misspelt_flags_are_refused(data: pathlib.Path, tmp_path: pathlib.Path, flags: list[str]) -> None:
    refused(run_pretrain([*t0_flags(data_path=str(data), save=str(tmp_path / "run")), *flags]), flags[0])
    assert not (tmp_path / "run").exists()


def test_error_under_torchrun_is_printed_once_and_no_rank_stays(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    data.with_suffix(".bin").write_bytes(b"")
    result = run_pretrain(t0_flags(data_path=str(data), train_iters=1, eval_iters=0), nproc=2)
    assert result.returncode != 0
    assert result.stderr.count("error (rank") == 1, result.stderr


def test_wrong_flag_under_torchrun_is_said_once(data: pathlib.Path) -> None:
    result = run_pretrain(t0_flags(data_path=str(data), lr="abc"), nproc=2)
    assert result.returncode != 0
    assert result.stderr.count("error (rank") == 1 and "error (rank 0): --lr" in result.stderr, result.stderr


def test_data_damaged_for_one_rank_only_is_reported_by_that_rank(data: pathlib.Path) -> None:
    for rank in range(2):
        write_d0(f"{data}_{rank}")
    pathlib.Path(f"{data}_1.bin").write_bytes(b"")
    config = data.parent / "by_rank.yaml"
    config.write_text(f'data_path: ["{data}_${{RANK}}"]\n')
    flags = t0_flags(data_path="unused", train_iters=1)
    at = flags.index("--data-path")
    result = run_pretrain(["--config", str(config), *flags[:at], *flags[at + 2 :]], nproc=2)
    assert result.returncode != 0
    assert result.stderr.count("error (rank") == 1 and "error (rank 1): " in result.stderr, result.stderr
    assert f"{data}_1.bin" in result.stderr


def test_print_config_shows_origins_and_dry_run_checks_everything(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    printed = run_pretrain([*t0_flags(data_path=str(data)), "--print-config"])
    assert printed.returncode == 0 and re.search(r"hidden_size: 32\s+# .*--hidden-size", printed.stdout), printed.stdout
    checked = run_pretrain([*t0_flags(data_path=str(data), save=str(tmp_path / "run"), use_distributed_optimizer=True), "--dry-run"])
    assert checked.returncode == 0 and "bytes" in checked.stdout, checked.stdout + checked.stderr
    assert not (tmp_path / "run").exists()


def test_ramp_up_and_learning_rate_reach_their_ends(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    flags = t0_flags(
        data_path=str(data), train_iters=None, train_samples=40, rampup_batch_size=[2, 2, 12], global_batch_size=8, micro_batch_size=2,
        lr_decay_style="cosine", lr=1e-3, min_lr=1e-5, log_interval=1, save=str(tmp_path / "run"), eval_iters=0,
    )  # fmt: skip
    result = run_pretrain(flags)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["learning_rate"] == pytest.approx(1e-5)
    sizes = [line["global_batch_size"] for line in lines]
    assert sizes == [2, 2, 4, 6, 8, 8, 8]  # a tail of 2 samples is no whole batch
    assert [line["consumed_samples"] for line in lines] == [sum(sizes[: i + 1]) for i in range(len(sizes))]


def test_curves_continue_over_a_restart_in_one_axis(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = dict(data_path=str(data), train_iters=10, log_interval=3, save=str(tmp_path / "run"), eval_iters=0, tensorboard_dir=str(tmp_path / "tb"))
    assert run_pretrain(t0_flags(**flags, exit_interval=5)).returncode == 0
    assert run_pretrain(t0_flags(**flags)).returncode == 0
    whole = {**flags, "save": str(tmp_path / "whole"), "tensorboard_dir": str(tmp_path / "tb2")}
    assert run_pretrain(t0_flags(**whole)).returncode == 0
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    points = [(e.step, e.value) for e in events.Scalars("lm loss")]
    assert [step for step, _ in points] == [3, 6, 9, 10]
    ours, theirs = read_metrics(tmp_path / "run" / "metrics.jsonl"), read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert [json.dumps(line["lm_loss"]) for line in ours] == [json.dumps(line["lm_loss"]) for line in theirs]
