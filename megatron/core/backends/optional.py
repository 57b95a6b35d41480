"""Optional packages: one guarded import each, remembered with its reason and logged once.

A missing or broken package may raise anything on import (the empty `transformer-engine` wheel raises RuntimeError, a wrong
`apex` from PyPI raises ModuleNotFoundError deep inside), so every Exception counts as "not usable" and its text is kept.
"""

import dataclasses
import functools
import importlib
import logging
from types import ModuleType

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Probe:
    """Outcome of looking for an optional package: exactly one of `module` and `reason` is set."""

    name: str
    module: ModuleType | None
    reason: str | None

    @property
    def usable(self) -> bool:
        """Whether the import succeeded."""
        return self.module is not None


@functools.cache
def probe(name: str) -> Probe:
    """Import the module `name` (dotted), or say why not. Cached: one attempt and one debug line per process and name."""
    try:
        return Probe(name, importlib.import_module(name), None)
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
        logger.debug("optional package %s is not usable: %s", name, reason)
        return Probe(name, None, reason)
