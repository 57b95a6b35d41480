"""The tool draws what the trace holds, from the step's first phase on, and says in one line what is wrong with a file."""

import json
import pathlib
from typing import Any

import pytest

from megatron.core.distributed.overlap_trace import GATHER, REDUCE, THREAD, RankRecord, Slice, chrome_trace
from tools.plot_overlap_trace import draw, main, read_trace

PNG = b"\x89PNG\r\n\x1a\n"


def write(path: pathlib.Path, ranks: int = 2) -> pathlib.Path:
    parts = (
        Slice(THREAD, "phase", "evaluation", 0.0, 1.0),
        Slice(GATHER, "collective", "all-gather bucket 0", -0.5, 1.5),
        Slice(THREAD, "forward", "forward decoder.layers.0", 1.2, 2.0),
        Slice(THREAD, "wait", "wait for all-gather bucket 0", 1.4, 1.5),
        Slice(REDUCE, "collective", "reduce-scatter bucket 0", 2.0, 2.5),
        Slice(REDUCE, "collective", "reduce-scatter bucket 1", 2.2, 2.6),
    )
    records = [RankRecord(rank, f"rank {rank}", 10.0 * rank, 10.0 * rank, 10.0 * rank + 3.0, moved(parts, 10.0 * rank)) for rank in range(ranks)]
    path.write_text(json.dumps(chrome_trace(records, iteration=7, clock_uncertainty=0.0, device="cpu")))
    return path


def moved(parts: tuple[Slice, ...], by: float) -> tuple[Slice, ...]:
    return tuple(Slice(part.row, part.kind, part.name, part.begin + by, part.end + by, part.args) for part in parts)


def test_bars_are_the_slices_after_what_ran_between_the_steps(tmp_path: pathlib.Path) -> None:
    trace = read_trace(write(tmp_path / "t.json"))
    assert (trace.iteration, trace.length, list(trace.panels)) == (7, pytest.approx(2000.0), [0, 1])
    panel = trace.panels[1]
    assert panel.exposed == pytest.approx(100.0)
    assert list(panel.rows) == ["training thread", "gradient reduction", "gradient reduction 2", "parameter gather"]
    assert [(bar.name, round(bar.begin, 6), round(bar.end, 6)) for bar in panel.rows["parameter gather"]] == [("all-gather bucket 0", 0, 500)]
    assert [bar.kind for bar in panel.rows["training thread"]] == ["forward", "wait"]


def test_axes_have_labels_and_rows_names(tmp_path: pathlib.Path) -> None:
    figure = draw(read_trace(write(tmp_path / "t.json")), [0, 1])
    first, second = figure.axes
    assert second.get_xlabel() == "milliseconds"
    assert first.get_title(loc="left") == "rank 0: 100.00 ms exposed"
    assert [tick.get_text() for tick in first.get_yticklabels()] == ["parameter gather", "", "gradient reduction", "training thread"]


def test_the_command_writes_a_png(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "t.json", ranks=6)
    output = tmp_path / "new" / "t.png"
    assert main([str(trace), "--output", str(output), "--ranks", "0", "5"]) == 0
    assert output.read_bytes().startswith(PNG)
    assert main([str(trace), "--output", str(output), "--ranks", "6"]) == 2
    assert "--ranks 6: the trace has ranks 0, 1, 2, 3, 4, 5" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"otherData": {}, "traceEvents": []}', '{"traceEvents": [{"ph": "X"}]}'])
def test_another_file_is_named(tmp_path: pathlib.Path, content: str, capsys: pytest.CaptureFixture[Any]) -> None:
    (tmp_path / "t.json").write_text(content)
    assert main([str(tmp_path / "t.json"), "--output", str(tmp_path / "t.png")]) == 2
    assert "t.json: not a trace that --trace-overlap wrote" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json"), "--output", str(tmp_path / "t.png")]) == 1
