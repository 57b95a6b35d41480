"""The option table: every configuration field with its type, names and flags, read off the section dataclasses.

    RunConfig ─ section ─ dataclass field ─┬─ type      -> scalar, optional, many
                                           └─ FieldInfo -> flags, aliases, bounds, help

Loaders, `--help`, the config reference and the JSON schema all work on this table; nothing else knows the fields.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from megatron.core.config_field import FieldInfo, field_info
from megatron.training.config.run_config import RunConfig


@dataclasses.dataclass(frozen=True)
class Option:
    """One field of one section.

    scalar: type of the value, or of its elements where `many`. optional: whether null is a value. default: the field's
    default, `dataclasses.MISSING` if required.
    """

    section: str
    name: str
    info: FieldInfo
    scalar: type
    optional: bool
    many: bool
    default: Any

    @property
    def path(self) -> str:
        """`section.field`."""
        return f"{self.section}.{self.name}"

    @property
    def owner(self) -> str:
        """Path of the option that holds the value (another one's where two sections share a value)."""
        return self.info.linked or self.path

    @property
    def required(self) -> bool:
        """Whether the user must give a value."""
        return self.default is dataclasses.MISSING

    @property
    def names(self) -> tuple[str, ...]:
        """Names accepted in files: the field's own, then its aliases."""
        return (self.name, *self.info.aliases)

    @property
    def flag(self) -> str:
        """The flag shown to users."""
        return self.info.flag or as_flag(self.name)

    @property
    def expects(self) -> str:
        """What a value must look like, for messages: 'an integer', 'one of a, b' ..."""
        if self.info.choices is not None and not self.many:
            text = f"one of {', '.join(map(str, self.info.choices))}"
        else:
            text = _WORDS[self.scalar][self.many]
        return f"{text}, or null" if self.optional else text


_WORDS: Mapping[type, tuple[str, str]] = {
    int: ("an integer", "a list of integers"),
    float: ("a number", "a list of numbers"),
    bool: ("true or false", "a list of true or false"),
    str: ("text", "a list of texts"),
}


def as_flag(name: str) -> str:
    """`train_iters` -> `--train-iters`."""
    return "--" + name.replace("_", "-")


def _option(section: str, field: "dataclasses.Field[Any]", annotation: Any) -> Option:
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    (inner,) = (part for part in parts if part is not type(None))
    many = typing.get_origin(inner) is tuple
    scalar = typing.get_args(inner)[0] if many else inner
    assert scalar in _WORDS, f"{section}.{field.name}: the loader knows no type {scalar}"
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return Option(section, field.name, field_info(field), scalar, type(None) in parts, many, default)


def _collect() -> dict[str, Option]:
    found = {}
    for section, cls in SECTIONS.items():
        annotations = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            option = _option(section, field, annotations[field.name])
            found[option.path] = option
    return found


SECTIONS: Mapping[str, type] = typing.get_type_hints(RunConfig)
OPTIONS: Mapping[str, Option] = _collect()
OWNERS: tuple[Option, ...] = tuple(option for option in OPTIONS.values() if option.info.linked is None)

# Sections of Megatron's YAML files and ours that they stand for.
MEGATRON_SECTIONS: Mapping[str, str] = {"language_model": "model", "model_parallel": "parallel"}


def _by_name() -> dict[str, Option]:
    table: dict[str, Option] = {}
    for option in OWNERS:
        for name in option.names:
            assert name not in table, f"{name} names {option.path} and {table[name].path}"
            table[name] = option
    for option in OPTIONS.values():
        assert option.owner == OPTIONS[option.owner].path and table[option.name].path == option.owner
    return table


@dataclasses.dataclass(frozen=True)
class Constant:
    """A flag (or its flat name in a file) that gives an option one fixed value: `--swiglu`, `--bf16`, `--no-bf16`."""

    option: Option
    value: Any


def _constants(option: Option) -> dict[str, Any]:
    """Flags of the option that take no value, with the value they set."""
    found = dict(option.info.const_flags)
    if option.scalar is bool and not option.many:
        names = {option.flag, *map(as_flag, option.names)}
        found |= dict.fromkeys(names, True)
        found |= {f"--no-{name[2:]}": False for name in names if not name.startswith("--no-")}
        if option.info.negative_flag:
            found[option.info.negative_flag] = False
    return found


def _flags() -> dict[str, Option | Constant]:
    table: dict[str, Option | Constant] = {}
    for option in OWNERS:
        uses: dict[str, Option | Constant] = {flag: Constant(option, value) for flag, value in _constants(option).items()}
        if option.scalar is not bool:
            uses |= dict.fromkeys([option.flag, *map(as_flag, option.names)], option)
        for flag, use in uses.items():
            assert flag not in table, f"{flag} belongs to {option.path} and to {table[flag]}"
            table[flag] = use
    return table


BY_NAME: Mapping[str, Option] = _by_name()
FLAGS: Mapping[str, Option | Constant] = _flags()
# `swiglu: true` in a file is `--swiglu`.
CONSTANT_NAMES: Mapping[str, Constant] = {
    flag[2:].replace("-", "_"): use
    for flag, use in FLAGS.items()
    if isinstance(use, Constant) and flag[2:].replace("-", "_") not in BY_NAME
}


def option_in_section(section: str, name: str) -> Option | None:
    """The option of that section with that name or alias."""
    option = OPTIONS.get(f"{section}.{name}")
    if option is None and name in BY_NAME and BY_NAME[name].section == section:
        option = BY_NAME[name]
    return option
