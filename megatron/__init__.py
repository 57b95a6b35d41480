"""MegaDLMs: pretraining of deep language models. Import package `megatron`, distribution `megadlms`."""

import importlib.metadata
import os
import sys

__version__ = "0.1.0"


def _foreign_megatron() -> str | None:
    """What to say when NVIDIA's megatron-core is installed beside this package, which then hides parts of it or is hidden."""
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None
    return (
        f"warning: NVIDIA's megatron-core {version} is installed in this environment too. Both provide the package 'megatron'; this one "
        f"is used, from {os.path.dirname(os.path.abspath(__file__))}. Use a separate virtual environment for each."
    )


_message = _foreign_megatron()
if _message is not None and (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0":
    print(_message, file=sys.stderr)
