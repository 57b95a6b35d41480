"""Every logged step is in every log once, also after a kill and a resume."""

import dataclasses
import io
import json
import pathlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.core.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.transformer_config import ModelArchitectureConfig
from megatron.training.config.run_config import (
    CheckpointConfig,
    DataConfig,
    DistributedDataParallelConfig,
    LaunchConfig,
    LoggingConfig,
    ObjectiveConfig,
    RunConfig,
    SchedulerConfig,
    TrainingConfig,
)
from megatron.training.event_files import EventWriter, cut_after, event_files
from megatron.training.loggers import (
    CompositeLogger,
    ConsoleLogger,
    JsonlLogger,
    TensorBoardLogger,
    WandbLogger,
    build_loggers,
    console_line,
)
from megatron.training.metrics import LOGGED_FIELDS, EvalMetrics, StepMetrics
from megatron.training.progress import ProgressBar, format_duration
from tests.harness.t0 import read_metrics

SAMPLES_PER_STEP = 8


def step(iteration: int, **changes: Any) -> StepMetrics:
    metrics = StepMetrics(
        iteration=iteration,
        train_iters=10,
        consumed_samples=iteration * SAMPLES_PER_STEP,
        consumed_tokens=iteration * SAMPLES_PER_STEP * 16,
        lm_loss=1.0 / iteration + 0.1,
        grad_norm=0.8123,
        learning_rate=3e-4,
        loss_scale=1.0,
        skipped=0,
        nan=0,
        global_batch_size=SAMPLES_PER_STEP,
        step_time_s=0.1234,
        data_time_s=0.001,
        exposed_comm_time_s=0.002,
        tokens_per_s=1037.3,
        tflops_per_rank=0.0123,
        mfu=0.0191,
        peak_memory_bytes=12345,
        eta_s=83.4,
    )
    return dataclasses.replace(metrics, **changes)


def evaluation(iteration: int, split: str = "validation", loss: float = 3.1, **changes: Any) -> EvalMetrics:
    return EvalMetrics(iteration, split, loss, 22.2, 100, **changes)


# ---------------------------------------------------------------------------------------------------------- console


def test_console_line_is_megatrons_with_ours_behind_it() -> None:
    line = console_line(step(100, train_iters=1000, lm_loss=3.123456, grad_norm=0.812, tflops_per_rank=12.34, step_time_s=0.1234))
    assert line == (
        "iteration      100/    1000 | consumed samples:          800 | elapsed time per iteration (ms): 123.4 | "
        "throughput per GPU (TFLOP/s/GPU): 12.3 | learning rate: 3.000000E-04 | global batch size:     8 | "
        "lm loss: 3.123456E+00 | loss scale: 1.0 | grad norm: 0.812 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 | tokens/s: 1037 | MFU: 1.9% | ETA: 0:01:23 |"
    )


def test_existing_parsers_find_iteration_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleLogger().log_step(step(7))
    out = capsys.readouterr().out
    found = re.search(r"iteration\s+(\d+)/\s*\d+.*elapsed time per iteration \(ms\):\s*([\d.]+)", out)
    assert found is not None
    assert found.groups() == ("7", "123.4")
    assert re.match(r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration ", out)


def test_console_line_leaves_out_what_was_not_measured_and_shows_nan() -> None:
    line = console_line(step(1, grad_norm=None, mfu=None, lm_loss=float("nan"), skipped=1, nan=1))
    assert "grad norm" not in line
    assert "MFU" not in line
    assert "lm loss: NAN" in line
    assert "number of skipped iterations:   1 | number of nan iterations:   1 |" in line


def test_validation_line_stands_between_rules(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleLogger().log_eval(evaluation(100))
    ConsoleLogger().log_eval(evaluation(100, "test"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == " validation loss at iteration 100 | lm loss value: 3.100000E+00 | lm loss PPL: 2.220000E+01 | "
    assert lines[4].startswith(" validation loss at iteration 100 on test set | lm loss value: ")
    assert lines[0] == lines[2] == "-" * (len(lines[1]) + 1)


# ------------------------------------------------------------------------------------------------------ metrics.jsonl


def test_jsonl_holds_the_promised_fields_at_full_precision(tmp_path: pathlib.Path) -> None:
    logger = JsonlLogger(tmp_path / "run" / "metrics.jsonl")
    loss = 0.1 + 0.2
    logger.log_step(step(1, lm_loss=loss))
    logger.log_eval(evaluation(1, loss=1 / 3))
    trained, evaluated = read_metrics(tmp_path / "run" / "metrics.jsonl")  # readable before the close
    assert tuple(trained) == LOGGED_FIELDS
    assert trained["lm_loss"] == loss
    assert evaluated == {"iteration": 1, "split": "validation", "lm_loss": 1 / 3, "perplexity": 22.2}
    logger.close()
    logger.close()


def test_jsonl_writes_numbers_that_are_not_finite_as_null(tmp_path: pathlib.Path) -> None:
    logger = JsonlLogger(tmp_path / "m.jsonl")
    logger.log_step(step(1, lm_loss=float("nan"), grad_norm=float("inf"), mfu=None, num_zeros=3))
    (line,) = read_metrics(tmp_path / "m.jsonl")
    assert (line["lm_loss"], line["grad_norm"], line["mfu"], line["num_zeros"]) == (None, None, None, 3)


@settings(deadline=None, max_examples=40)
@given(saved=st.integers(1, 6), killed=st.integers(0, 5), torn=st.booleans(), evaluate=st.booleans())
def test_jsonl_has_no_gap_and_no_repeat_after_a_kill(saved: int, killed: int, torn: bool, evaluate: bool) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "m.jsonl"
        first = JsonlLogger(path)
        for iteration in range(1, saved + killed + 1):
            first.log_step(step(iteration))
            if evaluate and iteration % 2 == 0:
                first.log_eval(evaluation(iteration))
        if torn:
            with path.open("a") as file:
                file.write('{"iteration": 12, "consumed_sam')
        second = JsonlLogger(path, resume_iteration=saved)
        for iteration in range(saved + 1, 13):
            second.log_step(step(iteration))
            if evaluate and iteration % 2 == 0:
                second.log_eval(evaluation(iteration))
        lines = read_metrics(path)
        assert [line["iteration"] for line in lines if "split" not in line] == list(range(1, 13))
        assert [line["iteration"] for line in lines if "split" in line] == (list(range(2, 13, 2)) if evaluate else [])
        assert [p.name for p in pathlib.Path(folder).iterdir()] == ["m.jsonl"]


def test_jsonl_evaluation_repeated_after_a_restart_replaces_the_earlier(tmp_path: pathlib.Path) -> None:
    first = JsonlLogger(tmp_path / "m.jsonl")
    first.log_step(step(10))
    first.log_eval(evaluation(10))
    first.log_eval(evaluation(10, "test"))
    first.close()
    second = JsonlLogger(tmp_path / "m.jsonl", resume_iteration=10)
    second.log_eval(evaluation(10, "test", loss=2.0))
    lines = read_metrics(tmp_path / "m.jsonl")
    assert [(line["iteration"], line.get("split"), line["lm_loss"]) for line in lines] == [
        (10, None, 0.2),
        (10, "validation", 3.1),
        (10, "test", 2.0),
    ]


def test_jsonl_of_a_fresh_start_keeps_the_old_file_as_backup(tmp_path: pathlib.Path) -> None:
    JsonlLogger(tmp_path / "m.jsonl").log_step(step(3))
    JsonlLogger(tmp_path / "m.jsonl").log_step(step(1))
    assert [line["iteration"] for line in read_metrics(tmp_path / "m.jsonl")] == [1]
    assert [line["iteration"] for line in read_metrics(tmp_path / "m.jsonl.bak")] == [3]


def test_a_file_that_is_no_metrics_file_is_refused_and_left_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("remember\nthe milk\n")
    with pytest.raises(ConfigError, match=r"notes\.txt:1: not a line of a metrics file"):
        JsonlLogger(path, resume_iteration=5)
    assert path.read_text() == "remember\nthe milk\n"


# -------------------------------------------------------------------------------------------------------- TensorBoard


def points(folder: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag, as TensorBoard reads them."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_megatrons_tags(tmp_path: pathlib.Path) -> None:
    logger = TensorBoardLogger(tmp_path, world_size=2)
    logger.log_step(step(1, num_zeros=3, params_norm=1.5))
    logger.log_eval(evaluation(1, consumed_samples=8))
    logger.close()
    both = [
        *("lm loss", "learning-rate", "batch-size", "loss-scale", "grad-norm", "params-norm", "num-zeros"),
        *("iteration-time", "world-size", "lm loss validation", "lm loss validation ppl"),
    ]
    found = points(tmp_path)
    assert set(found) == {*both, *(f"{tag} vs samples" for tag in both), "throughput"}
    assert found["lm loss"] == [(1, pytest.approx(1.1))]
    assert found["lm loss vs samples"] == [(8, pytest.approx(1.1))]
    assert found["world-size"] == [(1, 2.0)]


@pytest.mark.parametrize("torn", [False, True])
def test_tensorboard_has_each_step_once_after_two_kills(tmp_path: pathlib.Path, torn: bool) -> None:
    for start, end in ((0, 7), (5, 8), (6, 10)):  # each killed past the checkpoint that the next one resumes from
        logger = TensorBoardLogger(tmp_path, resume_iteration=start)
        for iteration in range(start + 1, end + 1):
            logger.log_step(step(iteration))
            if iteration % 2 == 0:
                logger.log_eval(evaluation(iteration, consumed_samples=iteration * SAMPLES_PER_STEP))
        if torn:
            with event_files(tmp_path)[-1].open("ab") as file:
                file.write(b"\x40\0\0\0\0\0\0\0torn")
    found = points(tmp_path)
    assert [s for s, _ in found["lm loss"]] == list(range(1, 11))
    assert [s for s, _ in found["lm loss vs samples"]] == [8 * n for n in range(1, 11)]
    assert [s for s, _ in found["lm loss validation"]] == [2, 4, 6, 8, 10]
    assert [s for s, _ in found["lm loss validation vs samples"]] == [16, 32, 48, 64, 80]
    assert [v for _, v in found["lm loss"]] == [pytest.approx(step(n).lm_loss) for n in range(1, 11)]


def test_tensorboard_resume_without_surplus_rewrites_nothing(tmp_path: pathlib.Path) -> None:
    first = TensorBoardLogger(tmp_path)
    first.log_step(step(5))
    first.close()
    (before,) = event_files(tmp_path)
    content, inode = before.read_bytes(), before.stat().st_ino
    TensorBoardLogger(tmp_path, resume_iteration=5)
    assert (before.read_bytes(), before.stat().st_ino) == (content, inode)


def test_tensorboard_evaluation_of_a_finished_run_is_not_written_twice(tmp_path: pathlib.Path) -> None:
    for start in (0, 10):
        logger = TensorBoardLogger(tmp_path, resume_iteration=start)
        if start == 0:
            logger.log_step(step(10))
        logger.log_eval(evaluation(10, "test"))
    assert [s for s, _ in points(tmp_path)["lm loss test"]] == [10]


def test_tensorboard_interval_keeps_its_multiples_and_the_last_step(tmp_path: pathlib.Path) -> None:
    logger = TensorBoardLogger(tmp_path, interval=4)
    for iteration in range(2, 11, 2):
        logger.log_step(step(iteration))
    assert [s for s, _ in points(tmp_path)["lm loss"]] == [4, 8, 10]


def test_fresh_start_hides_older_events_and_keeps_them(tmp_path: pathlib.Path) -> None:
    TensorBoardLogger(tmp_path).log_step(step(3))
    TensorBoardLogger(tmp_path).log_step(step(1))
    assert [s for s, _ in points(tmp_path)["lm loss"]] == [1]
    assert len(list(tmp_path.glob("*superseded*"))) == 1


def test_cutting_stops_at_the_first_file_that_has_no_surplus(tmp_path: pathlib.Path) -> None:
    for first in (1, 4, 7):
        writer = EventWriter(tmp_path)
        for iteration in range(first, first + 3):
            writer.scalar("lm loss", 1.0, iteration)
        writer.close()
    names = [path.name for path in event_files(tmp_path)]
    cut_after(tmp_path, 5)
    assert [path.name for path in event_files(tmp_path)] == names[:2]  # the third held nothing else
    assert [s for s, _ in points(tmp_path)["lm loss"]] == [1, 2, 3, 4, 5]


# --------------------------------------------------------------------------------------------- wandb, bar, composition


class FakeRun:
    id = "abc123"

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[dict[str, Any], FakeRun]]]:
    calls: list[tuple[dict[str, Any], FakeRun]] = []
    module = types.ModuleType("wandb")

    def init(**options: Any) -> FakeRun:
        calls.append((options, FakeRun()))
        return calls[-1][1]

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_run_is_continued_after_a_restart(tmp_path: pathlib.Path, wandb_calls: list[tuple[dict[str, Any], FakeRun]]) -> None:
    for _ in range(2):
        logger = WandbLogger(LoggingConfig(wandb_project="p", wandb_exp_name="n"), tmp_path / "w")
        logger.log_step(step(5))
        logger.log_eval(evaluation(5))
        logger.close()
    (first, run), (second, _) = wandb_calls
    assert (first["id"], second["id"]) == (None, "abc123")
    assert (first["project"], first["name"], first["mode"]) == ("p", "n", "offline")
    assert [number for _, number in run.logged] == [5, 5]
    assert run.logged[0][0]["lm loss"] == step(5).lm_loss
    assert run.logged[1][0] == {"lm loss validation": 3.1, "lm loss validation ppl": 22.2}
    assert run.finished


def test_missing_wandb_is_a_configuration_error(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'megadlms\[wandb\]'"):
        WandbLogger(LoggingConfig(wandb_project="p"), tmp_path)


def test_progress_bar_shows_steps_loss_and_eta() -> None:
    stream = io.StringIO()
    bar = ProgressBar(10, 4, stream)
    bar.log_step(step(7))
    bar.log_eval(evaluation(7))
    bar.advance(8)
    bar.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "8/10" in text
    assert "loss 0.2429" in text
    assert "ETA 0:01:23" in text


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0:00:00"), (83.4, "0:01:23"), (3600, "1:00:00"), (200_000, "2d 7:33:20")])
def test_durations_read_as_hours_minutes_seconds(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def run_config(save: pathlib.Path | None, **logging: Any) -> RunConfig:
    return RunConfig(
        model=ModelArchitectureConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
        parallel=ModelParallelConfig(),
        optimizer=OptimizerConfig(lr=1e-3),
        scheduler=SchedulerConfig(),
        ddp=DistributedDataParallelConfig(),
        training=TrainingConfig(micro_batch_size=1),
        data=DataConfig(seq_length=4),
        checkpoint=CheckpointConfig(save=str(save) if save else None),
        logging=LoggingConfig(**logging),
        objective=ObjectiveConfig(),
        launch=LaunchConfig(),
    )


def test_rank_0_alone_logs_to_all_that_is_asked_for(tmp_path: pathlib.Path) -> None:
    config = run_config(tmp_path / "run", tensorboard_dir=str(tmp_path / "tb"), progress_bar="off")
    others = build_loggers(config, 1, 10, 0)
    others.log_step(step(1))
    assert not list(tmp_path.iterdir())
    logger = build_loggers(config, 0, 10, 0)
    assert isinstance(logger, CompositeLogger)
    assert [type(part).__name__ for part in logger.loggers] == ["ConsoleLogger", "JsonlLogger", "TensorBoardLogger"]
    logger.advance(1)
    logger.log_step(step(1))
    logger.close()
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 1


def test_without_save_the_console_is_the_only_log_unless_a_file_is_named(tmp_path: pathlib.Path) -> None:
    (only,) = build_loggers(run_config(None, progress_bar="off"), 0, 10, 0).loggers  # type: ignore[attr-defined]
    assert isinstance(only, ConsoleLogger)
    named = build_loggers(run_config(None, progress_bar="off", metrics_file=str(tmp_path / "m.jsonl")), 0, 10, 0)
    named.log_step(step(1))
    assert json.loads((tmp_path / "m.jsonl").read_text())["iteration"] == 1


def test_bar_appears_only_on_a_terminal_or_when_forced(tmp_path: pathlib.Path) -> None:
    quiet = build_loggers(run_config(None, progress_bar="auto"), 0, 10, 0)  # pytest's stdout is no terminal
    assert [type(part).__name__ for part in quiet.loggers] == ["ConsoleLogger"]  # type: ignore[attr-defined]
    forced = build_loggers(run_config(None, progress_bar="on"), 0, 10, 0)
    forced.close()
    assert [type(part).__name__ for part in forced.loggers] == ["ConsoleLogger", "ProgressBar"]  # type: ignore[attr-defined]


def test_tensorboard_interval_must_be_a_multiple_of_the_log_interval(tmp_path: pathlib.Path) -> None:
    config = run_config(None, tensorboard_dir=str(tmp_path), log_interval=10, tensorboard_log_interval=25)
    with pytest.raises(ConfigError, match=r"tensorboard_log_interval=25 is not a multiple of log_interval=10"):
        build_loggers(config, 0, 10, 0)
