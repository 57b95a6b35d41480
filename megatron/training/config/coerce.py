"""Text (or a Python value) to a value of an option's type. What is not exactly such a value is refused with a reason.

Accepted: integers 1000, 1_000, 1e3; numbers 1e-4, 1E-4, .0001, 1_000.5; true and false; null, ~ and none where null is a
value. Refused: 0777, 0x10, 12:30, 10.5 for an integer, yes and on, nan and infinities (no option has a use for them).
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from megatron.core.config_field import bounds_violation
from megatron.training.config.options import Option
from megatron.training.config.problems import did_you_mean, shown

_DIGITS = r"[0-9](?:_?[0-9])*"
_NUMBER = re.compile(rf"[+-]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][+-]?[0-9]{{1,9}})?\Z")
_LEADING_ZERO = re.compile(r"[+-]?0[0-9_]")
_OTHER_BASE = re.compile(r"[+-]?0[xXoObB]")
_NULLS = ("null", "~", "none", "")
_LARGEST = 2**63 - 1


class Rejected(ValueError):
    """The value does not fit the option; the text is the reason, without the option's name."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A value as written. plain: unquoted in a file (null, numbers and words can be meant). literal: from the command line,
    where words like `yes` are as good a folder name as any."""

    text: str
    plain: bool = True
    literal: bool = False


def from_text(option: Option, value: Text) -> Any:
    """The value of a single written word. Raises Rejected."""
    if value.plain and _is_null(option, value.text):
        return _null(option)
    if option.many:
        return from_items(option, [value])
    return _bounded(option, _scalar(option, value))


def from_items(option: Option, values: Sequence[Text]) -> Any:
    """The value of a written list. Raises Rejected."""
    if not option.many:
        hint = f"; write {','.join(v.text for v in values)[:60]} as one text" if option.scalar is str else ""
        raise Rejected(f"expected {option.expects}, got a list{hint}")
    return _bounded(option, tuple(_scalar(option, value) for value in values))


def from_value(option: Option, value: Any) -> Any:
    """A Python value, checked; lists become tuples and integers floats where the option is a number. Raises Rejected."""
    if value is None:
        return _null(option)
    if not option.many:
        return _bounded(option, _python_scalar(option, value))
    if not isinstance(value, (list, tuple)):
        value = (value,)
    return _bounded(option, tuple(_python_scalar(option, item) for item in value))


def _is_null(option: Option, text: str) -> bool:
    word = text.lower()
    if word not in _NULLS:
        return False
    return word not in (option.info.choices or ())


def _null(option: Option) -> Any:
    if option.optional:
        return None
    if option.many and option.default == ():
        return ()
    raise Rejected(f"expected {option.expects}, got null; give a value or leave the option out")


def _scalar(option: Option, value: Text) -> Any:
    text = value.text.strip() if option.scalar is not str else value.text
    if option.scalar is bool:
        return _boolean(option, text)
    if option.scalar is int:
        return _integer(option, text)
    if option.scalar is float:
        return _number(option, text)
    if "\0" in text:
        raise Rejected(f"got {shown(text)}; texts cannot hold a NUL character")
    word = value.plain and not value.literal and option.info.choices is None
    if word and text.lower() in ("true", "false", "yes", "no", "on", "off"):
        raise Rejected(f"expected {option.expects}, got {text}; quote it if that word is meant")
    return option.info.value_aliases.get(text, text)


def _boolean(option: Option, text: str) -> bool:
    word = text.lower()
    if word in ("true", "false"):
        return word == "true"
    hint = {"yes": "true", "on": "true", "1": "true", "y": "true", "no": "false", "off": "false", "0": "false", "n": "false"}
    raise Rejected(f"expected {option.expects}, got {shown(text)}" + (f"; write {hint[word]}" if word in hint else ""))


def _refuse_number(option: Option, text: str) -> Rejected:
    hint = ""
    if _LEADING_ZERO.match(text) or _OTHER_BASE.match(text):
        hint = "; numbers are decimal, without leading zeros"
    elif ":" in text:
        hint = "; base-60 numbers are not accepted"
    elif "," in text:
        hint = "; group digits with _ or not at all"
    return Rejected(f"expected {option.expects}, got {shown(text)}{hint}")


def _integer(option: Option, text: str) -> int:
    if _LEADING_ZERO.match(text) or not _NUMBER.match(text) or len(text) > 60:
        raise _refuse_number(option, text)
    number = Decimal(text.replace("_", ""))
    if number.adjusted() > 20 or abs(number) > _LARGEST:
        raise Rejected(f"expected {option.expects}, got {shown(text)}, which is too large (at most 2**63 - 1)")
    if number != number.to_integral_value():
        raise Rejected(f"expected {option.expects}, got {shown(text)}, which is not whole")
    return int(number)


def _number(option: Option, text: str) -> float:
    if _LEADING_ZERO.match(text) or not _NUMBER.match(text) or len(text) > 100:
        raise _refuse_number(option, text)
    number = float(text.replace("_", ""))
    if math.isinf(number):
        raise Rejected(f"expected {option.expects}, got {shown(text)}, which is too large")
    return number


def _python_scalar(option: Option, value: Any) -> Any:
    if option.scalar is str and isinstance(value, str):
        return option.info.value_aliases.get(value, str(value))
    if option.scalar is bool and isinstance(value, bool):
        return value
    if option.scalar in (int, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value) or (isinstance(value, int) and abs(value) > _LARGEST):
            raise Rejected(f"expected {option.expects}, got {shown(str(value))}")
        if option.scalar is float:
            return float(value)
        if isinstance(value, int):
            return value
    raise Rejected(f"expected {option.expects}, got {shown(str(value))} ({type(value).__name__})")


def _bounded(option: Option, value: Any) -> Any:
    for item in value if option.many else (value,):
        reason = bounds_violation(option.info, item)
        if reason is not None:
            near = did_you_mean(item, map(str, option.info.choices)) if isinstance(item, str) and option.info.choices else ""
            raise Rejected((reason if len(reason) < 400 else reason[:397] + "...") + near)
    return value
