"""Layers to one RunConfig: default < files in order < flags < --set. Every value keeps the place it came from."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.errors import ConfigError
from megatron.training.config.config_files import FileReader
from megatron.training.config.flags import ParsedFlags, parse_flags
from megatron.training.config.layers import INVALID, Entry, Layer
from megatron.training.config.options import OPTIONS, OWNERS, SECTIONS, Option
from megatron.training.config.problems import Problems
from megatron.training.config.run_config import RunConfig


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A run's configuration and where it comes from.

    origins: 'default', 'configs/x.yaml:12', '--lr' or '--set optimizer.lr=1' by `section.field`. files: all files read, bases
    included, in order. notes: what the user should know though it is no error; to be printed once.
    """

    config: RunConfig
    origins: Mapping[str, str]
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load_run_config(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Resolved:
    """The configuration that a command line describes (`--config`, flags, `--set`).

    environment: for `${NAME}` in files; default: the process's. Raises ConfigError naming every problem of every file and
    flag. Checks across sections are `check_run_config`'s.
    """
    problems, notes = Problems(), []  # type: tuple[Problems, list[str]]
    return resolve(parse_flags(argv, problems, notes), environment, problems, notes)


def resolve(parsed: ParsedFlags, environment: Mapping[str, str] | None, problems: Problems, notes: list[str]) -> Resolved:
    """Read the files of a parsed command line and merge everything. Raises ConfigError with all problems."""
    reader = FileReader(os.environ if environment is None else environment, problems, notes)
    for path in parsed.configs:
        reader.read(path)
    chosen = _merge([*reader.layers, parsed.flags, parsed.sets])
    _check_required(chosen, problems)
    sections = _build_sections(chosen, problems)
    problems.raise_if_any()
    origins = {path: chosen[option.owner].origin if option.owner in chosen else "default" for path, option in OPTIONS.items()}
    return Resolved(RunConfig(**sections), origins, tuple(reader.files), tuple(notes))


def _merge(layers: Sequence[Layer]) -> dict[str, Entry]:
    """The last entry of each option."""
    chosen: dict[str, Entry] = {}
    for layer in layers:
        chosen |= layer.entries
    return chosen


def _check_required(chosen: Mapping[str, Entry], problems: Problems) -> None:
    for option in OWNERS:
        if option.required and option.path not in chosen:
            problems.add(option.path, f"is required ({option.expects}); set it in a file or with {option.flag}")


def _build_sections(chosen: Mapping[str, Entry], problems: Problems) -> dict[str, Any]:
    """The section dataclasses. A section with a wrong or missing field is left out: its problems are already known."""
    built = {}
    for section, cls in SECTIONS.items():
        options = [option for option in OPTIONS.values() if option.section == section]
        given = {option.name: chosen[option.owner] for option in options if option.owner in chosen}
        missing = any(option.required and option.name not in given for option in options)
        if missing or any(entry.value is INVALID for entry in given.values()):
            continue
        try:
            built[section] = cls(**{name: entry.value for name, entry in given.items()})
        except ConfigError as error:
            problems.add(section, f"{error}{_places(str(error), options, chosen)}")
    return built


def _places(text: str, options: Sequence[Option], chosen: Mapping[str, Entry]) -> str:
    """` (hidden_size: x.yaml:3, ...)`: where the options that a message names were given."""
    places = [
        f"{option.name}: {chosen[option.owner].origin}"
        for option in options
        if option.owner in chosen and re.search(rf"\b{re.escape(option.name)}\b", text)
    ]
    return f" ({', '.join(places)})" if places else ""
