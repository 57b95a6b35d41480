"""A small complete configuration, as flags and as a file, for the tests of this folder."""

import pathlib

from megatron.training.config import Resolved, load_run_config

REQUIRED = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "micro_batch_size": 2}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in REQUIRED.items()]
RUNNABLE = [*FLAGS, "--train-iters=10", "--lr=1e-3", "--mock-data", "--vocab-size=100"]


def write(path: pathlib.Path, text: str) -> str:
    """Write a file and return its path as users type it."""
    path.write_text(text, encoding="utf-8")
    return str(path)


def load_text(tmp_path: pathlib.Path, text: str, *flags: str, environment: dict[str, str] | None = None) -> Resolved:
    """Load a file with that text, plus the required options as flags and `flags`."""
    return load_run_config(["--config", write(tmp_path / "c.yaml", text), *FLAGS, *flags], environment or {})
