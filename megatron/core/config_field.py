"""One way to declare a configuration field: default, help, bounds and Megatron flag in the dataclass that owns the field.

CLI flags, YAML keys, `--help`, the config reference and the JSON schema are generated from this metadata
(`megatron/training/config`), so a field is described in exactly one place.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any


@dataclasses.dataclass(frozen=True)
class FieldInfo:
    """What a configuration field says about itself, beside its type and default.

    flag: the command-line flag (default: `--` + name with dashes). For a bool it sets True.
    negative_flag: flag that sets a bool field False (Megatron's `--no-...` and `--disable-...`).
    const_flags: further flags, each of which sets the field to a constant (`--swiglu` -> activation_func="swiglu").
    aliases: other accepted YAML/flat names (`layernorm_epsilon` for `norm_epsilon`).
    value_aliases: other accepted spellings of a value (`squaredrelu` -> `squared_relu`).
    choices, minimum, exclusive_minimum, maximum, exclusive_maximum: what the loader and `check_fields` enforce.
    linked: dotted path of the field that owns the value, when two sections carry one value (`optimizer.bf16` ->
        `parallel.bf16`): setting either sets both.
    unit: unit of a number, for help and docs.
    """

    help: str
    flag: str | None = None
    negative_flag: str | None = None
    const_flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aliases: Sequence[str] = ()
    value_aliases: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    choices: Sequence[Any] | None = None
    minimum: float | None = None
    exclusive_minimum: float | None = None
    maximum: float | None = None
    exclusive_maximum: float | None = None
    linked: str | None = None
    unit: str | None = None


def config_field(default: Any = MISSING, *, help: str, factory: Callable[[], Any] | None = None, **info: Any) -> Any:
    """Declare a dataclass field with its `FieldInfo`. Without default or factory the field is required."""
    metadata = {"info": FieldInfo(help=help, **info)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    if default is MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def field_info(field: "dataclasses.Field[Any]") -> FieldInfo:
    """The `FieldInfo` of a field declared with `config_field`."""
    return field.metadata["info"]


def bounds_violation(info: FieldInfo, value: Any) -> str | None:
    """Why `value` breaks the field's choices or bounds, or None. None values and non-numbers pass the bounds."""
    if value is None:
        return None
    if info.choices is not None and not isinstance(value, (list, tuple)) and value not in info.choices:
        return f"must be one of {', '.join(map(str, info.choices))}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if value != value:
        return "must be a number, got nan"
    for bound, broken, word in (
        (info.minimum, lambda b: value < b, "at least"),
        (info.exclusive_minimum, lambda b: value <= b, "greater than"),
        (info.maximum, lambda b: value > b, "at most"),
        (info.exclusive_maximum, lambda b: value >= b, "less than"),
    ):
        if bound is not None and broken(bound):
            return f"must be {word} {bound:g}, got {value!r}"
    return None


def field_violations(config: Any) -> list[tuple[str, str]]:
    """(field name, reason) for each field of a config dataclass that breaks its declared choices or bounds."""
    found = []
    for field in dataclasses.fields(config):
        if "info" not in field.metadata:
            continue
        reason = bounds_violation(field_info(field), getattr(config, field.name))
        if reason is not None:
            found.append((field.name, reason))
    return found
