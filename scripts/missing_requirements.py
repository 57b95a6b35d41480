"""Prints, one a line, the requirements of pyproject.toml (with the named extras) that this Python does not meet; torch is left out.

    python scripts/missing_requirements.py pyproject.toml dev,plot

Reads installed metadata only: imports none of the packages, changes nothing.
"""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(\[[^\]]*\])?\s*(?P<versions>[^;]*)")


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Dependencies and those of `extras`, as written, each once. Ends the program for an extra that is not there."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    unknown = set(extras) - set(project["optional-dependencies"])
    if unknown:
        sys.exit(f"no extra named {', '.join(sorted(unknown))}; {pyproject} has {', '.join(sorted(project['optional-dependencies']))}")
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return list(dict.fromkeys(requirement for one in lists for requirement in one))


def is_met(requirement: str) -> bool:
    """Whether the package is installed, in a version that fits (any version where `packaging` is not there to compare)."""
    match = _REQUIREMENT.match(requirement)
    assert match, requirement
    try:
        version = importlib.metadata.version(match["name"])
    except importlib.metadata.PackageNotFoundError:
        return False
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return True
    return SpecifierSet(match["versions"].strip()).contains(version, prereleases=True)


def main() -> None:
    """Command line: pyproject.toml, then the extras separated by commas (may be empty)."""
    wanted = requirements(Path(sys.argv[1]), [extra for extra in sys.argv[2].split(",") if extra])
    print("\n".join(one for one in wanted if not re.match(r"torch\b(?!-)", one) and not is_met(one)))


if __name__ == "__main__":
    main()
