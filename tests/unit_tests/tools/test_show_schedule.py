"""The schedule tool: drawing, figures, picture, and what cannot be."""

import pathlib

import pytest

from tools.show_schedule import main


def test_text_and_picture(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "new folder" / "plan.png"
    assert main(["--schedule", "1f1b", "--stages", "2", "--microbatches", "3", "--output", str(picture)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "rank  1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  ."
    assert printed[2] == "1f1b, 2 stages, 1 chunk(s) each, 3 microbatches: time 12, bubble 25.0%"
    assert printed[3].endswith("by rank: 2, 1")
    assert picture.read_bytes().startswith(b"\x89PNG") and [path.name for path in picture.parent.iterdir()] == ["plan.png"]


def test_costs_move_the_bubble(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--schedule", "zb_h1", "--stages", "4", "--microbatches", "8"]
    assert main(flags) == 0
    assert "time 27, bubble 11.1%" in capsys.readouterr().out
    assert main([*flags, "--costs", "1", "2", "1"]) == 0
    assert "time 38, " in capsys.readouterr().out  # 8 (1 + 2 + 1) and the (P - 1)(F + B - W) of H1


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--stages", "4", "--microbatches", "6", "--chunks", "2"], "multiple of pipeline_model_parallel_size=4"),
        (["--stages", "0", "--microbatches", "6"], "--stages and --microbatches must be at least 1"),
        (["--stages", "2", "--microbatches", "6", "--costs", "0", "1", "1"], "--costs"),
    ],
)
def test_what_cannot_be_is_one_message_and_exit_code_2(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert text in capsys.readouterr().err
