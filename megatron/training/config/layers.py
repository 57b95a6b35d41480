"""Layer: the options that one source (a file, the flags, the --set arguments) gives, each with where it was written."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from megatron.training.config.coerce import Rejected, Text, from_items, from_text
from megatron.training.config.megatron_options import MegatronOption
from megatron.training.config.options import (
    BY_NAME,
    CONSTANT_NAMES,
    MEGATRON_SECTIONS,
    SECTIONS,
    Constant,
    Option,
    option_in_section,
)
from megatron.training.config.problems import Problems, did_you_mean, nearest, shown

INVALID = object()  # the value of an option whose text was refused


@dataclasses.dataclass(frozen=True)
class Entry:
    """One option as one source gives it. written: the name used there. origin: 'x.yaml:12', '--lr', '--set optimizer.lr=1'."""

    option: Option
    value: Any
    written: str
    origin: str


class Layer:
    """Entries by the path that owns the value. Giving one value twice in a layer is a problem."""

    def __init__(self, problems: Problems, notes: list[str]) -> None:
        self.entries: dict[str, Entry] = {}
        self.problems, self.notes = problems, notes

    def put_text(self, option: Option, values: Text | Sequence[Text], written: str, origin: str) -> None:
        """Record the option's value, typed; a text that is not one is a problem at `origin`."""
        if isinstance(values, Text):
            self._put_coerced(option, lambda: from_text(option, values), written, origin)
        else:
            self._put_coerced(option, lambda: from_items(option, values), written, origin)

    def put_constant(self, constant: Constant, written: str, origin: str) -> None:
        """Record the constant of a flag such as `--swiglu`."""
        self._put(Entry(constant.option, constant.value, written, origin))

    def put_invalid(self, option: Option, reason: str, written: str, origin: str) -> None:
        """Record that the option was given, with a value that cannot be one."""
        self._complain(written, origin, reason)
        self._put(Entry(option, INVALID, written, origin))

    def put_unread(self, option: Option, written: str, origin: str) -> None:
        """Record that the option was given, with a value that was already reported as a problem."""
        self._put(Entry(option, INVALID, written, origin))

    def put_megatron(self, known: MegatronOption, values: list[str] | None, written: str, origin: str) -> None:
        """A Megatron option that is none here: a note, or a problem."""
        accepted, text = known.verdict(values)
        if not accepted:
            self._complain(written, origin, str(text))
        elif text is not None and text not in self.notes:
            self.notes.append(text)

    def _put_coerced(self, option: Option, coerce: Callable[[], Any], written: str, origin: str) -> None:
        try:
            value = coerce()
        except Rejected as error:
            self.put_invalid(option, str(error), written, origin)
        else:
            self._put(Entry(option, value, written, origin))

    def _put(self, entry: Entry) -> None:
        first = self.entries.setdefault(entry.option.owner, entry)
        if first is entry:
            return
        linked = first.option.path != entry.option.path
        if linked and INVALID not in (first.value, entry.value) and first.value == entry.value:
            return
        names = f"{first.written} at {first.origin}" if first.written != first.origin else first.origin
        also = f" with another value ({first.value!r})" if linked else ""
        self._complain(entry.written, entry.origin, f"given twice, first as {names}{also}; remove one")

    def _complain(self, written: str, origin: str, text: str) -> None:
        """A flag is its own place; elsewhere the place comes first and the name follows."""
        self.problems.add(origin, text if written == origin else f"{written}: {text}")


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Why a name is no option, for a message."""

    text: str


def look_up(keys: Sequence[str]) -> Option | Constant | Unknown:
    """The option that a dotted name means: `section.field`, a Megatron section's, or a flat name."""
    if len(keys) == 1:
        return _flat(keys[0])
    section = MEGATRON_SECTIONS.get(keys[0], keys[0])
    if section not in SECTIONS:
        return Unknown(f"unknown section {shown(keys[0])}{did_you_mean(keys[0], [*SECTIONS, *MEGATRON_SECTIONS])}")
    if len(keys) > 2:
        return Unknown(f"unknown option; {section} holds plain values, no sections")
    option = option_in_section(section, keys[1])
    return option if option is not None else Unknown(why_not_in_section(section, keys[1]))


def _flat(name: str) -> Option | Constant | Unknown:
    found = BY_NAME.get(name) or CONSTANT_NAMES.get(name)
    if found is not None:
        return found
    return Unknown(f"unknown option{did_you_mean(name, [*BY_NAME, *SECTIONS, 'base'])}")


def why_not_in_section(section: str, name: str) -> str:
    """The reason that `name` is no option of `section`: it belongs to another one, or it is misspelt."""
    if name in BY_NAME:
        home = BY_NAME[name]
        return f"misplaced; {name} belongs to section {home.section}: write {home.path}"
    own = [known for known, option in BY_NAME.items() if option.section == section]
    near = did_you_mean(name, own)
    elsewhere = None if near else nearest(name, BY_NAME)
    if elsewhere is not None:
        near = f"; did you mean {elsewhere}, which belongs to section {BY_NAME[elsewhere].section}?"
    return f"unknown option{near}"
