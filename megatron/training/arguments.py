"""Arguments: Megatron's flat `args` as a view of a RunConfig. Reading finds a field by name; assigning builds a new one.

args.hidden_size                 a field, by name or alias
args.config.optimizer            the sections
args.overlap_param_gather = True sets what that needs as well, or says what stands against it
"""

import dataclasses
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.errors import ConfigError
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.coerce import Rejected, from_value
from megatron.training.config.load import load_run_config
from megatron.training.config.options import BY_NAME, OPTIONS, OWNERS, SECTIONS
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validate import check_run_config

# What switching an option on switches on with it, by the owning paths.
_OVERLAP_GATHER = ("ddp.use_distributed_optimizer", "ddp.overlap_grad_reduce")
PREREQUISITES: Mapping[str, tuple[str, ...]] = {
    "ddp.overlap_param_gather": _OVERLAP_GATHER,
    "optimizer.overlap_param_gather_with_optimizer_step": (*_OVERLAP_GATHER, "ddp.overlap_param_gather"),
}


class Arguments:
    """Flat view of a run's configuration.

    An assignment re-validates: a wrong type or value raises ConfigError and changes nothing. Unknown names raise
    AttributeError with the nearest name. `config` is the RunConfig as it stands.
    """

    __slots__ = ("_config",)

    def __init__(self, config: RunConfig) -> None:
        object.__setattr__(self, "_config", config)

    @property
    def config(self) -> RunConfig:
        """The configuration behind the view."""
        config: RunConfig = object.__getattribute__(self, "_config")
        return config

    @property
    def params_dtype(self) -> torch.dtype:
        """dtype of the model parameters."""
        return self.config.parallel.params_dtype

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        option = BY_NAME.get(name)
        if option is not None:
            return getattr(getattr(self.config, option.section), option.name)
        if name in SECTIONS:
            return getattr(self.config, name)
        raise _unknown(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_config":  # copy and pickle restore the view this way
            object.__setattr__(self, name, value)
            return
        option = BY_NAME.get(name)
        if option is None:
            raise _unknown(name)
        try:
            changes = {option.path: from_value(option, value)}
        except Rejected as error:
            raise ConfigError(f"{name}: {error}") from None
        if changes[option.path] is True:
            changes |= dict.fromkeys(PREREQUISITES.get(option.path, ()), True)
        object.__setattr__(self, "_config", changed(self.config, changes))

    def __dir__(self) -> Iterator[str]:
        return iter(sorted({*BY_NAME, *SECTIONS, "config", "params_dtype"}))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arguments) and self.config == other.config

    def __repr__(self) -> str:
        fields = ", ".join(f"{option.name}={getattr(self, option.name)!r}" for option in OWNERS)
        return f"Arguments({fields})"


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """A copy with new values by `section.field` (owning paths); linked fields follow. Raises ConfigError."""
    sections = {}
    for section in SECTIONS:
        values = {
            option.name: changes[option.owner]
            for option in OPTIONS.values()
            if option.section == section and option.owner in changes
        }
        if values:
            sections[section] = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **sections)


def parse_args(argv: Sequence[str] | None = None) -> Arguments:
    """The flat view of a command line (default: this process's). Raises ConfigError naming every problem."""
    return Arguments(load_run_config(sys.argv[1:] if argv is None else argv).config)


def validate_args(args: Arguments, world_size: int | None = None) -> Arguments:
    """Run the checks across sections; None leaves out those that depend on the number of ranks. Raises ConfigError."""
    problems = check_run_config(args.config, world_size)
    if problems:
        raise ConfigError("\n".join(problems))
    return args


def core_transformer_config_from_args(args: Arguments) -> TransformerConfig:
    """What model code takes."""
    return args.config.transformer_config()


def _unknown(name: str) -> AttributeError:
    near = difflib.get_close_matches(name, [*BY_NAME, *SECTIONS], n=1)
    return AttributeError(f"the configuration has no option {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
