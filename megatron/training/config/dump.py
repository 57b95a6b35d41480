"""A resolved configuration as YAML text that can be read back to an equal one, bare or with the origin of each value."""

from collections.abc import Callable
from typing import Any

import yaml

from megatron.training.config.environment import escape
from megatron.training.config.load import Resolved
from megatron.training.config.options import OWNERS, SECTIONS, Option
from megatron.training.config.run_config import RunConfig


def dump_yaml(config: RunConfig) -> str:
    """Every option of the run, by section. Reading the text gives a RunConfig equal to `config`."""
    return _dump(config, lambda option: "")


def render_with_origins(resolved: Resolved) -> str:
    """The same text, each line with a comment that says where the value comes from."""
    header = "".join(f"# note: {_one_line(note)}\n" for note in resolved.notes)
    return header + _dump(resolved.config, lambda option: f"  # {_one_line(resolved.origins[option.path])}")


def _dump(config: RunConfig, comment: Callable[[Option], str]) -> str:
    lines = []
    for section in SECTIONS:
        lines.append(f"{section}:")
        for option in OWNERS:
            if option.section == section:
                value = getattr(getattr(config, section), option.name)
                lines.append(f"  {option.name}: {format_value(value)}{comment(option)}")
    return "\n".join(lines) + "\n"


def format_value(value: Any) -> str:
    """A value in YAML, on one line, such that other YAML readers see the same type (1.0e-05, not 1e-05)."""
    if isinstance(value, tuple):
        return f"[{', '.join(format_value(item) for item in value)}]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _format_text(value)
    text = repr(value)
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def _format_text(text: str) -> str:
    if text.replace("_", "").replace("-", "").replace("/", "").isalpha() and text.isascii() and text[0].isalpha():
        return text if text.lower() not in _WORDS_OF_OTHER_TYPES else f'"{text}"'
    quoted = yaml.safe_dump(escape(text), default_style='"', allow_unicode=False, width=float("inf"))
    return str(quoted).rstrip("\n")


def _one_line(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii")


_WORDS_OF_OTHER_TYPES = ("null", "none", "true", "false", "yes", "no", "on", "off", "y", "n")
