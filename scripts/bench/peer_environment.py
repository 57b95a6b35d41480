"""The peers' own virtual environment: torch of the product's version, DeepSpeed and megatron-core in pinned versions.

    python scripts/bench/peer_environment.py [--environment DIR]       # makes it, or completes it; says what is there

Kept apart because peers bring packages that the product must not depend on, and megatron-core's package has the product's name.
A peer that can't be installed or imported is reported with the reason; benchmarks then run without it and say so.
TORCH_INDEX_URL: package index for torch, for example that of PyTorch's CPU builds (as in the other scripts).
"""

import argparse
import os
import pathlib
import subprocess
import sys
import venv
from collections.abc import Sequence

PEERS = {"deepspeed": "0.19.8", "megatron-core": "0.19.2"}
MODULES = {"deepspeed": "deepspeed", "megatron-core": "megatron.core.distributed"}
TRITON = "triton==3.9.0"  # megatron-core imports it, also where there is no GPU
DEFAULT = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "megadlms" / "bench-peers"


def python_of(environment: pathlib.Path) -> pathlib.Path:
    """The environment's interpreter."""
    return environment / "bin" / "python"


def reason_against(environment: pathlib.Path, package: str) -> str | None:
    """Why the peer can't be used; None if it can. Doesn't import it: looks at what is installed."""
    python = python_of(environment)
    if not python.exists():
        return (
            f"no environment {environment}; make it with python scripts/bench/peer_environment.py --environment {environment}"
        )
    found = _output([str(python), "-c", f"import importlib.metadata as m; print(m.version({package!r}))"])
    if found is None:
        return f"{package} is not installed in {environment}; run scripts/bench/peer_environment.py"
    if found != PEERS[package]:
        return f"{package} {found} is installed in {environment}, expected {PEERS[package]}"
    return None


def create(environment: pathlib.Path, torch_version: str) -> dict[str, str]:
    """Make or complete the environment. Returns package -> "" or the reason why it isn't there."""
    python = python_of(environment)
    if not python.exists():
        venv.create(environment, with_pip=True)
    index = os.environ.get("TORCH_INDEX_URL")
    problems = {}
    failure = _install(python, f"torch=={torch_version}", "numpy", *(["--index-url", index] if index else []))
    if failure:
        return dict.fromkeys(PEERS, f"torch {torch_version}: {failure}")
    for package, version in PEERS.items():
        if package == "megatron-core":
            # Its metadata may ask for a newer Python than it needs; triton comes without what it would pull in.
            failure = _install(python, f"{package}=={version}", "--ignore-requires-python") or _install(
                python, TRITON, "--no-deps"
            )
        else:
            failure = _install(python, f"{package}=={version}")
        problems[package] = failure or _import_failure(python, MODULES[package])
    return problems


def _install(python: pathlib.Path, *arguments: str) -> str:
    """Empty, or why pip failed."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, env=os.environ | {"DS_BUILD_OPS": "0"}, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else _last_line(done.stderr)


def _import_failure(python: pathlib.Path, module: str) -> str:
    done = subprocess.run([str(python), "-c", f"import {module}"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"import {module}: {_last_line(done.stderr)}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def _output(command: Sequence[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def add_environment_argument(parser: argparse.ArgumentParser) -> None:
    """--environment."""
    parser.add_argument(
        "--environment", type=pathlib.Path, default=DEFAULT, help=f"the peers' virtual environment (default {DEFAULT})"
    )


def main(argv: Sequence[str]) -> int:
    """Make the environment, say what is in it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_environment_argument(parser)
    options = parser.parse_args(argv)
    import torch

    problems = create(options.environment, torch.__version__.split("+")[0])
    for package, problem in problems.items():
        print(f"{package} {PEERS[package]}: {problem or 'ready'}")
    return 1 if any(problems.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
