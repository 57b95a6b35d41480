"""docs/config_reference.md and docs/config.schema.json are what the dataclasses say, and the schema agrees with the loader."""

import pathlib

import jsonschema
import pytest
import yaml

from megatron.training.config import dump_yaml, load_run_config
from megatron.training.config.schema import json_schema
from tools.generate_config_reference import documents

from .base_config import RUNNABLE

ROOT = pathlib.Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("path", documents(), ids=lambda p: p.name)
def test_generated_document_is_up_to_date(path: pathlib.Path) -> None:
    assert path.read_text("utf-8") == documents()[path], "run: python tools/generate_config_reference.py"


def test_schema_is_valid_and_accepts_shipped_and_dumped_configurations() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for name in ("gpt2", "gpt2_data", "debug_cpu", "llama_1b"):
        validator.validate(yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text("utf-8")))
    validator.validate(yaml.safe_load(dump_yaml(load_run_config(RUNNABLE, {}).config)))
    validator.validate({"optimizer": "sgd", "lr": 1e-4, "language_model": {"num_layers": 2}, "base": ["a.yaml"]})


@pytest.mark.parametrize(
    "wrong", [{"weigth_decay": 1}, {"optimizer": {"lr": "abc"}}, {"model": {"lr": 1}}, {"seed": -1}, {"bf16": "yes"}]
)
def test_schema_refuses_what_the_loader_refuses(wrong: dict[str, object]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(json_schema()).validate(wrong)
