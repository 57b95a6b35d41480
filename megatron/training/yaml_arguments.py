"""Megatron's YAML entry points, over the same schema and loader as the command line."""

import os

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import Arguments, core_transformer_config_from_args, validate_args
from megatron.training.config.load import load_run_config


def parse_yaml_args(path: str | os.PathLike[str]) -> Arguments:
    """The flat view of a configuration file: nested sections, Megatron's `language_model` and `model_parallel`, flat names.

    Raises ConfigError naming every unknown, misplaced, doubled or badly typed key with file and line.
    """
    return Arguments(load_run_config([f"--config={os.fspath(path)}"]).config)


def load_yaml(yaml_path: str | os.PathLike[str]) -> Arguments:
    """Megatron's name of `parse_yaml_args`."""
    return parse_yaml_args(yaml_path)


def validate_yaml(args: Arguments, world_size: int | None = None) -> Arguments:
    """Megatron's name of `validate_args`."""
    return validate_args(args, world_size)


def core_transformer_config_from_yaml(args: Arguments) -> TransformerConfig:
    """Megatron's name of `core_transformer_config_from_args`."""
    return core_transformer_config_from_args(args)
