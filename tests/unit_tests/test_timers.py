"""Timers: intervals add up by a clock that the test moves, levels, misuse."""

import pytest

from megatron.core import timers
from megatron.core.errors import ConfigError
from megatron.core.timers import Timers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(timers, "_now", lambda: now[0])
    return now


def test_intervals_add_up_until_they_are_read(clock: list[float]) -> None:
    timer = Timers()("step")
    for length in (1.0, 2.0):
        timer.start()
        clock[0] += length
        timer.stop()
        clock[0] += 50.0
    assert timer.elapsed(reset=False) == 3.0
    assert timer.elapsed() == 3.0
    assert timer.elapsed() == 0.0


def test_a_running_timer_can_be_read_and_goes_on(clock: list[float]) -> None:
    timer = Timers()("step")
    timer.start()
    clock[0] += 1.0
    assert timer.elapsed() == 1.0
    clock[0] += 2.0
    assert timer.elapsed(reset=False) == 2.0
    timer.stop()
    assert timer.elapsed() == 2.0


def test_timers_above_the_level_are_not_measured(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    some = Timers(log_level=1)
    for name, level in (("shown", 1), ("hidden", 2)):
        some(name, log_level=level).start()
        clock[0] += 0.5
        some(name, log_level=level).stop()
    some.log(normalizer=2.0)
    assert capsys.readouterr().out == "time (ms) | shown: 250.00\n"
    Timers().log()
    assert capsys.readouterr().out == ""


def test_misuse_is_named() -> None:
    timer = Timers()("step")
    with pytest.raises(ConfigError, match="'step' is not running"):
        timer.stop()
    timer.start()
    with pytest.raises(ConfigError, match="'step' is running already"):
        timer.start()
    with pytest.raises(ConfigError, match="0 to 2"):
        Timers(3)
