"""Mutations of good configurations, in grammar, bytes or command line, end in a configuration or in ConfigError."""

import pathlib
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.core.errors import ConfigError
from megatron.training.config import check_run_config, load_run_config, parse_command_line
from megatron.training.config.options import BY_NAME, FLAGS, SECTIONS

ROOT = pathlib.Path(__file__).resolve().parents[4]
GOOD = [(ROOT / "configs" / f"{name}.yaml").read_text("utf-8") for name in ("gpt2", "debug_cpu", "llama_1b")]
fuzz = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))

STRANGE = [
    "!!python/object/apply:os.system [touch /tmp/never]", "!!binary aGk=", "&a [*a]", "*nowhere", "{", "[", "- x", "? y",
    "<<: *a", "1e400", "0777", "12:30", "9" * 400, "nan", "yes", "${GONE}", "${", "'", '"\\UFFFFFFFF"', '"\\ud800"', "\t",
    "%TAG ! !",
    "---", "...", "| \n  x", "> \n", "null", "", "[" * 200, "{a: " * 200, "\u2028", "@x", "`x`", "a: b: c", "# only", "-1",
    "1_", "0x1F",
]  # fmt: skip
keys = st.sampled_from(
    [*BY_NAME, *SECTIONS, "base", "language_model", "weigth_decay", "Lr", "lr ", "num_experts", "swiglu", "x" * 3000]
)
values = st.one_of(
    st.sampled_from(STRANGE),
    st.text(max_size=30),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.lists(st.integers(), max_size=3),
)


def ends_well(data: bytes, tmp_path: pathlib.Path, *flags: str) -> bool:
    """Whether the file was refused; anything but a configuration or ConfigError, or a second's wait, fails."""
    file = tmp_path / "mutant.yaml"
    file.write_bytes(data)
    before = time.process_time()
    refused = False
    try:
        check_run_config(load_run_config(["--config", str(file), *flags], {}).config, 2)
    except ConfigError as error:
        refused = True
        assert str(error) and len(str(error)) < 60_000
    assert time.process_time() - before < 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["mutant.yaml"]
    return refused


@fuzz
@given(st.sampled_from(GOOD), st.integers(0, 60), keys, values, st.sampled_from(["", "  ", "\t", "    "]), st.booleans())
def test_mutated_grammar(
    tmp_path: pathlib.Path, text: str, at: int, key: str, value: object, indent: str, replace: bool
) -> None:
    lines = text.splitlines()
    at %= len(lines)
    lines[at : at + replace] = [f"{indent}{key}: {value}"]
    ends_well("\n".join(lines).encode("utf-8", "surrogatepass"), tmp_path)


@fuzz
@given(
    st.sampled_from(GOOD),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 4), st.binary(max_size=6)), min_size=1, max_size=6),
)
def test_mutated_bytes(tmp_path: pathlib.Path, text: str, edits: list[tuple[int, int, bytes]]) -> None:
    data = text.encode()
    for at, removed, inserted in edits:
        at %= len(data) + 1
        data = data[:at] + inserted + data[at + removed :]
    ends_well(data, tmp_path)


@fuzz
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(tmp_path: pathlib.Path, data: bytes) -> None:
    assert ends_well(data, tmp_path)


@fuzz
@given(
    st.sampled_from(GOOD),
    st.integers(1, 60),
    st.sampled_from(["weigth_decay: 1", "lr: abc", "seed: 0777", "x-y: 1", "- 1", "lr: [", "a: *b"]),
)
def test_a_file_with_a_wrong_line_is_always_refused(tmp_path: pathlib.Path, text: str, at: int, line: str) -> None:
    lines = text.splitlines()
    starts = [i for i, other in enumerate(lines) if other and not other.startswith((" ", "#"))]
    lines.insert(starts[at % len(starts)], line)
    assert ends_well("\n".join(lines).encode(), tmp_path)


@fuzz
@given(
    st.lists(
        st.one_of(
            st.sampled_from([*FLAGS, "--set", "--config", "--help-config", "--", "-h", "=", "model.x=1"]), st.text(max_size=12)
        ),
        max_size=8,
    )
)
def test_any_command_line(argv: list[str]) -> None:
    try:
        command = parse_command_line(argv, {})
    except ConfigError:
        return
    assert command.help_text


@pytest.mark.parametrize("value", STRANGE)
def test_strange_values_of_every_kind_of_field(tmp_path: pathlib.Path, value: str) -> None:
    for name in ("lr", "seed", "bf16", "save", "data_path", "rampup_batch_size", "lr_decay_style", "model", "base"):
        ends_well(f"{GOOD[1]}\n{name}: {value}\n".encode(), tmp_path)
