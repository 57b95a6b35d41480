"""A dumped configuration is complete and reads back to an equal one."""

import dataclasses
import pathlib

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.training.config import dump_yaml, load_run_config, render_with_origins
from megatron.training.config.dump import format_value
from megatron.training.config.options import OWNERS
from megatron.training.config.run_config import RunConfig

from .base_config import RUNNABLE, write

ROOT = pathlib.Path(__file__).resolve().parents[4]


def read_back(tmp_path: pathlib.Path, text: str) -> RunConfig:
    return load_run_config(["--config", write(tmp_path / "dumped.yaml", text)], {}).config


@pytest.mark.parametrize("name", ["gpt2", "debug_cpu", "llama_1b"])
def test_dump_and_printed_config_read_back_equal(tmp_path: pathlib.Path, name: str) -> None:
    resolved = load_run_config(["--config", str(ROOT / "configs" / f"{name}.yaml"), "--use-mcore-models"], {})
    text = dump_yaml(resolved.config)
    assert read_back(tmp_path, text) == resolved.config
    assert dump_yaml(read_back(tmp_path, text)) == text
    assert read_back(tmp_path, render_with_origins(resolved)) == resolved.config
    written = yaml.safe_load(text)
    assert {f"{section}.{name}" for section, values in written.items() for name in values} == {o.path for o in OWNERS}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    save=st.text(st.characters(exclude_characters="\0"), max_size=20),
    words=st.lists(st.text(st.characters(exclude_characters="\0"), max_size=6)),
)
def test_any_text_survives(tmp_path: pathlib.Path, save: str, words: list[str]) -> None:
    config = load_run_config(RUNNABLE, {}).config
    config = dataclasses.replace(
        config,
        checkpoint=dataclasses.replace(config.checkpoint, save=save),
        training=dataclasses.replace(config.training, freeze=tuple(words)),
    )
    assert read_back(tmp_path, dump_yaml(config)) == config


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_floats_for_every_yaml_reader(value: float) -> None:
    read = yaml.safe_load(format_value(value))
    assert type(read) is float and read == value
