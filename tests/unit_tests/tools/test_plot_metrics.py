"""The plot tool draws what the metrics files hold, and says in one line what is wrong with them."""

import json
import pathlib
from typing import Any

import pytest

from tools.plot_metrics import draw, main, parse_references, read_run

PNG = b"\x89PNG\r\n\x1a\n"


def write_metrics(path: pathlib.Path, *, evaluations: bool = True) -> pathlib.Path:
    lines: list[dict[str, Any]] = []
    for i in range(2, 21, 2):
        lines.append(
            {
                "iteration": i,
                "consumed_samples": 8 * i,
                "consumed_tokens": 128 * i,
                "lm_loss": 5 - i / 10 if i != 6 else None,
                "grad_norm": 40.0 if i == 10 else 1.0,
                "learning_rate": 1e-3,
            }
        )
        if evaluations and i % 4 == 0:
            lines.append({"iteration": i, "split": "validation", "lm_loss": 5.5 - i / 10, "perplexity": 9.0})
    lines.append({"iteration": 20, "split": "test", "lm_loss": 1.0, "perplexity": 2.7})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_curves_are_the_logged_values_over_tokens(tmp_path: pathlib.Path) -> None:
    run = read_run(write_metrics(tmp_path / "tiny" / "metrics.jsonl"), "tokens")
    assert run.label == "tiny"
    assert run.train[0] == [128.0 * i for i in range(2, 21, 2) if i != 6]  # a step without a loss is left out
    assert run.train[1][0] == 4.8
    assert run.validation == ([512.0, 1024.0, 1536.0, 2048.0, 2560.0], [5.5 - i / 10 for i in range(4, 21, 4)])


def test_an_evaluation_between_two_logged_steps_lies_between_them(tmp_path: pathlib.Path) -> None:
    path = write_metrics(tmp_path / "metrics.jsonl", evaluations=False)
    with path.open("a") as file:
        file.write(json.dumps({"iteration": 5, "split": "validation", "lm_loss": 4.0}) + "\n")
        file.write(json.dumps({"iteration": 1, "split": "validation", "lm_loss": 4.0}) + "\n")
    assert read_run(tmp_path, "samples").validation[0] == [40.0, 8.0]


def test_every_axis_has_a_label_and_its_unit(tmp_path: pathlib.Path) -> None:
    run = read_run(write_metrics(tmp_path / "metrics.jsonl"), "steps")
    figure = draw([run], [("unigram entropy", 6.2)], x="steps", title=None, log_x=False)
    loss, rate, norm = figure.axes
    assert [plot.get_ylabel() for plot in (loss, rate, norm)] == ["loss (nats per token)", "learning rate", "gradient norm"]
    assert norm.get_xlabel() == "step"
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["training", "validation", "unigram entropy (6.200)"]


def test_command_writes_a_png_of_several_runs(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_metrics(tmp_path / "a" / "metrics.jsonl")
    write_metrics(tmp_path / "b" / "metrics.jsonl", evaluations=False)
    output = tmp_path / "pictures" / "loss.png"
    arguments = [str(one), str(tmp_path / "b"), "--output", str(output), "--reference", "unigram entropy", "6.18", "--log-x"]
    assert main([*arguments, "--title", "two", "--label", "first", "--label", "second"]) == 0
    assert output.read_bytes().startswith(PNG)
    assert [path.name for path in output.parent.iterdir()] == ["loss.png"]
    assert "loss.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no training step is logged"),
        ("{broken\n", "metrics.jsonl:1: not a line of a metrics file"),
        ("[1]\n", "metrics.jsonl:1: not a line of a metrics file: it has no consumed_tokens"),
        ('{"iteration": 1}\n', "it has no consumed_tokens, consumed_samples, lm_loss, learning_rate, grad_norm"),
    ],
)
def test_a_file_that_is_no_metrics_file_is_named(
    tmp_path: pathlib.Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(content)
    assert main([str(tmp_path), "--output", str(tmp_path / "x.png")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


def test_missing_file_and_wrong_options_are_said_in_one_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.jsonl"), "--output", "x.png"]) == 1
    write_metrics(tmp_path / "metrics.jsonl")
    assert main([str(tmp_path), "--output", "x.png", "--reference", "entropy", "high"]) == 2
    assert main([str(tmp_path), "--output", "x.png", "--label", "a", "--label", "b"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert errors[1] == "error: --reference 'entropy': expected a number, got 'high'"


def test_references_are_numbers() -> None:
    assert parse_references([("a", "1e1"), ("b", "2")]) == [("a", 10.0), ("b", 2.0)]
