"""Problems: collects everything wrong with a configuration, to report it all at once; and the nearest known name."""

import difflib
from collections.abc import Iterable

from megatron.core.errors import ConfigError

LIMIT = 100
_LONGEST_GUESSED = 80


class Problems:
    """Lines `where: what`, in the order found. At `LIMIT` of them it gives up at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, where: str, text: str) -> None:
        """Record one problem. Raises ConfigError with all of them when the limit is reached."""
        self.lines.append(f"{where}: {text}" if where else text)
        if len(self.lines) >= LIMIT:
            self.lines.append(f"... stopped after {LIMIT} problems")
            self.raise_if_any()

    def raise_if_any(self) -> None:
        """Raise ConfigError naming all problems, one a line, if there are any."""
        if len(self.lines) == 1:
            raise ConfigError(self.lines[0])
        if self.lines:
            raise ConfigError("\n  ".join([f"{len(self.lines)} problems in the configuration:", *self.lines]))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing. An abbreviation is answered with what it may stand for."""
    known = list(known)
    if not name or len(name) > _LONGEST_GUESSED:
        return ""
    if name.replace("-", "_") in known:
        return f"; names have underscores here: write {name.replace('-', '_')}"
    longer = [candidate for candidate in known if candidate.startswith(name)]
    if len(name.lstrip("-")) >= 3 and longer:
        return f"; abbreviations are not accepted, did you mean {' or '.join(longer[:3])}?"
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most resembles, if any does."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7) if len(name) <= _LONGEST_GUESSED else []
    return near[0] if near else None


def shown(text: str) -> str:
    """A user's text in a message: quoted, control characters escaped, not longer than a line."""
    return repr(text if len(text) <= 80 else text[:77] + "...")
