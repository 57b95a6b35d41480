"""R06: the usual ways of writing numbers are typed first; everything else is refused with field, text and file."""

import math
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.errors import ConfigError
from megatron.training.config import load_run_config
from megatron.training.config.coerce import Rejected, Text, from_text
from megatron.training.config.options import OPTIONS

from .base_config import FLAGS, load_text


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", ".0001", "0.0001", "+1e-4", "1.e-4", "1_0e-5", '"1e-4"'])
def test_every_spelling_of_a_learning_rate_is_a_float(tmp_path: pathlib.Path, text: str) -> None:
    for resolved in (
        load_text(tmp_path, f"lr: {text}"),
        load_text(tmp_path, f"optimizer:\n  lr: {text}"),
        load_run_config([*FLAGS, "--lr", text.strip('"')], {}),
        load_run_config([*FLAGS, "--set", f"optimizer.lr={text}"], {}),
    ):
        assert type(resolved.config.optimizer.lr) is float
        assert resolved.config.optimizer.lr == 1e-4


@pytest.mark.parametrize(
    ("text", "value"), [("1e3", 1000), ("1_000", 1000), ("1000", 1000), ("1.5e3", 1500), ("0", 0), ("+7", 7), ("10.0", 10)]
)
def test_every_spelling_of_an_integer_is_an_int(tmp_path: pathlib.Path, text: str, value: int) -> None:
    for resolved in (load_text(tmp_path, f"train_iters: {text}"), load_run_config([*FLAGS, f"--train-iters={text}"], {})):
        assert type(resolved.config.training.train_iters) is int
        assert resolved.config.training.train_iters == value


@pytest.mark.parametrize(
    ("field", "text"),
    [
        *[
            ("train_iters", text)
            for text in ("0777", "12:30", "10.5", "abc", "0x10", "0o17", "1e-3", "nan", ".inf", "1__0", "١٢", "9" * 30)
        ],
        *[("train_iters", text) for text in ("1e999999999", "true", "'12 '3", "1,000", "[1]", "{a: 1}", "2026-01-01", "1e")],
        *[
            ("lr", text)
            for text in (
                "abc",
                "nan",
                ".nan",
                "inf",
                "-.inf",
                "1e999",
                "12:30",
                "00.1",
                "true",
                "yes",
                "1,5",
                "[1e-4]",
                "1e",
                ".",
            )
        ],
    ],
)
def test_everything_else_is_refused_with_field_text_and_file(tmp_path: pathlib.Path, field: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, f"seed: 1\n{field}: {text}")
    message = str(caught.value)
    assert f"{tmp_path / 'c.yaml'}:2" in message
    if text != "'12 '3":  # no YAML at all
        assert field in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["0777", "12:30", "10.5", "abc"])
def test_refused_numbers_are_shown(tmp_path: pathlib.Path, text: str) -> None:
    with pytest.raises(ConfigError, match="train_iters: .*integer.*'" + text):
        load_text(tmp_path, f"train_iters: {text}")
    with pytest.raises(ConfigError, match="^--train-iters: .*integer.*'" + text):
        load_run_config([*FLAGS, "--train-iters", text], {})


@pytest.mark.parametrize(
    ("text", "hint"), [("yes", "write true"), ("on", "write true"), ("No", "write false"), ("0", "write false")]
)
def test_booleans_are_true_or_false_only(tmp_path: pathlib.Path, text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        load_text(tmp_path, f"bf16: {text}")
    assert load_text(tmp_path, "bf16: True").config.parallel.bf16 is True
    assert load_text(tmp_path, "bf16: false").config.parallel.bf16 is False


@pytest.mark.parametrize("text", ["null", "~", "", "none", "None", "NULL"])
def test_null_is_a_value_of_optional_fields_only(tmp_path: pathlib.Path, text: str) -> None:
    assert load_text(tmp_path, f"train_iters: {text}").config.training.train_iters is None
    assert load_text(tmp_path, f"save: {text}").config.checkpoint.save is None
    with pytest.raises(ConfigError, match=r"seed.*null"):
        load_text(tmp_path, f"seed: {text}")
    assert load_text(tmp_path, "position_embedding_type: none").config.model.position_embedding_type == "none"


@pytest.mark.parametrize(
    ("text", "value"), [("100", "100"), ("1e-4", "1e-4"), ("'null'", "null"), ('"yes"', "yes"), ("a b", "a b"), ("~/x", "~/x")]
)
def test_texts_stay_as_written(tmp_path: pathlib.Path, text: str, value: str) -> None:
    assert load_text(tmp_path, f"save: {text}").config.checkpoint.save == value


@pytest.mark.parametrize("text", ["yes", "off", "true"])
def test_a_bare_word_that_looks_like_a_switch_is_no_folder(tmp_path: pathlib.Path, text: str) -> None:
    with pytest.raises(ConfigError, match="quote it"):
        load_text(tmp_path, f"save: {text}")


@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False))
def test_any_float_survives_its_repr(value: float) -> None:
    assert from_text(OPTIONS["optimizer.lr"], Text(repr(value))) == value


@given(st.text(max_size=30))
def test_any_text_is_a_number_or_rejected(text: str) -> None:
    for path, kind in (("optimizer.lr", float), ("training.train_iters", int)):
        try:
            value = from_text(OPTIONS[path], Text(text))
        except Rejected:
            continue
        assert value is None or (type(value) is kind and math.isfinite(value))
