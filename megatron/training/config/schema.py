"""JSON schema (draft 2020-12) of configuration files, for editors; generated from the option table."""

from typing import Any

from megatron.training.config.megatron_options import MEGATRON_BY_NAME
from megatron.training.config.options import (
    BY_NAME,
    CONSTANT_NAMES,
    MEGATRON_SECTIONS,
    OPTIONS,
    OWNERS,
    SECTIONS,
    Option,
    option_in_section,
)

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
_ENVIRONMENT = {"type": "string", "pattern": r"\$\{"}


def json_schema() -> dict[str, Any]:
    """The schema: nested sections, Megatron's two sections, flat names, `base`."""
    properties: dict[str, Any] = {
        "base": {
            "description": "Files read before this one, relative to it.",
            "anyOf": [{"type": "string"}, _list({"type": "string"})],
        }
    }
    properties |= {name: _reference(option) for name, option in BY_NAME.items()}
    properties |= {
        name: {"type": "boolean", "description": f"true: {use.option.path}={use.value}"}
        for name, use in CONSTANT_NAMES.items()
        if not isinstance(use.value, bool)
    }
    properties |= {
        known.name: {"description": f"Accepted without effect: {known.reason}", "deprecated": True}
        for known in MEGATRON_BY_NAME.values()
        if known.satisfied
    }
    for section in SECTIONS:
        flat = properties.get(section)
        nested = _section_schema(section)
        properties[section] = nested if flat is None else {"anyOf": [nested, flat]}
    for name, section in MEGATRON_SECTIONS.items():
        properties[name] = {**_section_schema(section), "additionalProperties": True}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "MegaDLMs run configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "$defs": {option.path: option_schema(option) for option in OWNERS},
    }


def _reference(option: Option) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{option.owner}"}


def option_schema(option: Option) -> dict[str, Any]:
    """What one option accepts in a file."""
    value = _scalar_schema(option)
    forms = [_list(value), value] if option.many else [value]
    forms.append(_ENVIRONMENT)
    if option.optional or (option.many and option.default == ()):
        forms.append({"type": "null"})
    unit = f" Unit: {option.info.unit}." if option.info.unit else ""
    schema: dict[str, Any] = {"description": f"{option.info.help}{unit}", "anyOf": forms}
    if not option.required:
        schema["default"] = list(option.default) if option.many and option.default is not None else option.default
    return schema


def _scalar_schema(option: Option) -> dict[str, Any]:
    info = option.info
    if info.choices is not None:
        return {"enum": [*info.choices, *info.value_aliases]}
    schema: dict[str, Any] = {"type": [_TYPES[option.scalar], "number"] if option.scalar is str else _TYPES[option.scalar]}
    for key, bound in (
        ("minimum", info.minimum),
        ("exclusiveMinimum", info.exclusive_minimum),
        ("maximum", info.maximum),
        ("exclusiveMaximum", info.exclusive_maximum),
    ):
        if bound is not None:
            schema[key] = bound
    return schema


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _section_schema(section: str) -> dict[str, Any]:
    names = {option.name for option in OPTIONS.values() if option.section == section}
    names |= {name for name, option in BY_NAME.items() if option.section == section}
    properties = {}
    for name in sorted(names):
        option = option_in_section(section, name)
        assert option is not None
        properties[name] = _reference(option)
    return {
        "description": (SECTIONS[section].__doc__ or "").strip().splitlines()[0],
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": properties,
    }
