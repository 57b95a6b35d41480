"""Writes docs/config_reference.md and docs/config.schema.json from the option table; `--check` only compares (exit code 1)."""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.training.config.reference import render_reference  # noqa: E402
from megatron.training.config.schema import json_schema  # noqa: E402


def documents() -> dict[pathlib.Path, str]:
    """File to text."""
    return {
        ROOT / "docs" / "config_reference.md": render_reference(),
        ROOT / "docs" / "config.schema.json": json.dumps(json_schema(), indent=1) + "\n",
    }


def main(argv: list[str]) -> int:
    """Write or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check = parser.parse_args(argv).check
    stale = [path for path, text in documents().items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if not check:
            path.write_text(documents()[path], encoding="utf-8")
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
