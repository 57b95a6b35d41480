"""`--trace-overlap`: the traced step's waits are the logged ones; resume, accumulation, evaluation; bad files; steps not reached."""

import json
import pathlib
from typing import Any

import pytest

from megatron.training.main import main
from tests.harness.d0 import write_d0
from tests.harness.distributed import run_distributed
from tests.harness.jobs import Job, read_metrics, train_job
from tests.harness.t0 import t0_flags

OVERLAP = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "overlap_param_gather_with_optimizer_step": True,
    "ddp_bucket_size": 8000,
}


@pytest.fixture
def flags(tmp_path: pathlib.Path) -> dict[str, Any]:
    """D0 with a validation split, output below tmp_path."""
    write_d0(str(tmp_path / "d0"))
    return {
        "data_path": str(tmp_path / "d0"),
        "split": "80,20,0",
        "metrics_file": str(tmp_path / "metrics.jsonl"),
        "trace_overlap": str(tmp_path / "traces" / "t.json"),
        "train_iters": 4,
    }


def trained(flags: list[str]) -> Job:
    """Runs on each rank."""
    return train_job(flags)


def waits_ms(flags: dict[str, Any], rank: int = 0) -> tuple[int, float]:
    """(iteration, milliseconds of all wait slices of a rank)."""
    trace = json.loads(pathlib.Path(flags["trace_overlap"]).read_text())
    waits = [event["dur"] for event in trace["traceEvents"] if event["pid"] == rank and event.get("cat") == "wait"]
    assert trace["otherData"]["exposed_comm_time_s"][str(rank)] == pytest.approx(sum(waits) / 1e6, abs=1e-12)
    return trace["otherData"]["iteration"], sum(waits) / 1e3


def names(flags: dict[str, Any]) -> list[str]:
    trace = json.loads(pathlib.Path(flags["trace_overlap"]).read_text())
    return [event["name"] for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]


def test_waits_are_the_logged_ones_with_accumulation_evaluation_save_and_resume(flags: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """The evaluation and the save before the traced step wait for gathers too, and their waits are logged with the step."""
    save = {"save": str(tmp_path / "run"), "save_interval": 2}
    options = {**flags, **OVERLAP, **save, "eval_interval": 2, "eval_iters": 1, "micro_batch_size": 1}
    quiet = run_distributed(trained, 2, t0_flags(**{**options, "trace_overlap": None, "save": None, "save_interval": None}))
    traced = run_distributed(trained, 2, t0_flags(**options))
    assert traced[0].losses == quiet[0].losses and traced[0].grad_norms == quiet[0].grad_norms
    iteration, exposed = waits_ms(flags)
    lines = {line["iteration"]: line for line in read_metrics(flags["metrics_file"]) if "split" not in line}
    assert iteration == 3
    assert exposed == pytest.approx(lines[3]["exposed_comm_time_s"] * 1e3, abs=1e-3)  # 1e-6 ms per slice of some hundreds
    seen = names(flags)
    assert seen.count("forward decoder.layers.0") == seen.count("backward decoder.layers.3") == 4  # microbatches
    assert {"evaluation", "save-checkpoint", "optimizer", "gradient norm"} <= set(seen)

    resumed = run_distributed(trained, 2, t0_flags(**{**options, "train_iters": 6, "trace_overlap_step": 5, "recompute_granularity": "full",
                                                      "recompute_method": "uniform", "recompute_num_layers": 1}))  # fmt: skip
    assert resumed[0].iteration == 6
    iteration, exposed = waits_ms(flags)
    lines = {line["iteration"]: line for line in read_metrics(flags["metrics_file"]) if "split" not in line}
    assert iteration == 5
    assert exposed == pytest.approx(lines[5]["exposed_comm_time_s"] * 1e3, abs=1e-3)
    assert names(flags).count("recompute decoder.layers.0") == 4


@pytest.mark.parametrize(("step", "text"), [(9, "iterations 1 to 2"), (None, None)])
def test_a_step_that_is_not_reached_is_a_warning(
    flags: dict[str, Any], step: int | None, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    train_job(t0_flags(**{**flags, "train_iters": 2}, trace_overlap_step=step))
    printed = capsys.readouterr().out
    if text is None:  # the default falls back to the last step
        assert waits_ms(flags)[0] == 2 and "warning" not in printed
    else:
        assert f"warning: trace_overlap: step {step} was not traced, this run had {text}" in printed
        assert not pathlib.Path(flags["trace_overlap"]).exists()


def test_a_file_that_cannot_be_written_is_refused_at_the_start(
    flags: dict[str, Any], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file/t.json", "."):
        path = str(tmp_path / name)
        assert main(t0_flags(**{**flags, "trace_overlap": path, "save": str(tmp_path / "run")}), {}) == 2
        message = capsys.readouterr().err
        assert f"trace_overlap={pathlib.Path(path)} cannot be written" in message and "folder that rank 0 can write to" in message
    assert not (tmp_path / "run").exists()


def test_a_file_that_cannot_be_written_any_more_does_not_end_the_run(
    flags: dict[str, Any], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Remove:
        """Puts a folder where the file was to be."""

        def on_step_end(self, trainer: Any, result: Any) -> None:
            pathlib.Path(flags["trace_overlap"]).mkdir(exist_ok=True)

        def __getattr__(self, name: str) -> Any:
            return lambda *values: None

    job = train_job(t0_flags(**flags), callbacks=[Remove()])
    assert job.iteration == 4
    assert "warning: trace_overlap:" in capsys.readouterr().out
