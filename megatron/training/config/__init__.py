"""The run's configuration: one tree of dataclasses, read from files, flags and --set, checked, explained and written back."""

from megatron.training.config.command_line import CommandLine, parse_command_line
from megatron.training.config.dump import dump_yaml, render_with_origins
from megatron.training.config.load import Resolved, load_run_config
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validate import check_run_config

__all__ = [
    "CommandLine",
    "Resolved",
    "RunConfig",
    "check_run_config",
    "dump_yaml",
    "load_run_config",
    "parse_command_line",
    "render_with_origins",
]
