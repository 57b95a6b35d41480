"""megatron.training: the loop around the engine. Megatron's names are imported when first asked for."""

import importlib
from typing import Any

_LAZY = {
    "pretrain": "megatron.training.training",
    "get_args": "megatron.training.global_vars",
    "get_timers": "megatron.training.global_vars",
    "get_tokenizer": "megatron.training.global_vars",
    "print_rank_0": "megatron.training.initialize",
    "initialize_megatron": "megatron.training.initialize",
}

__all__ = ["get_args", "get_timers", "get_tokenizer", "initialize_megatron", "pretrain", "print_rank_0"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'megatron.training' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
