"""`${NAME}` and `${NAME:default}` in configuration files, replaced from the environment; `$${` stands for a literal `${`."""

import re
from collections.abc import Mapping

_REFERENCE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::([^${}]*))?\}|\$\{")


def expand(text: str, environment: Mapping[str, str]) -> str:
    """`text` with its references replaced. Raises ValueError with the reason for a missing variable or a malformed one."""

    def value(match: re.Match[str]) -> str:
        if match.group(0) == "$${":
            return "${"
        name, default = match.group(1), match.group(2)
        if name is None:
            raise ValueError("malformed ${...}; write ${NAME} or ${NAME:default}, and $${ for a literal ${")
        if default is not None and default.startswith("-"):
            raise ValueError(f"${{{name}:-...}} is the shell's form; write ${{{name}:default}} without the dash")
        if name in environment:
            return environment[name]
        if default is None:
            raise ValueError(f"environment variable {name} is not set; set it or write ${{{name}:default}}")
        return default

    return _REFERENCE.sub(value, text)


def escape(text: str) -> str:
    """The inverse of `expand` for literal text."""
    return text.replace("${", "$${")
