"""megatron.core: the engine. `OptimizerParamScheduler` and `mpu` are imported when first asked for."""

import importlib
from typing import Any

_LAZY = {
    "OptimizerParamScheduler": ("megatron.core.optimizer_param_scheduler", "OptimizerParamScheduler"),
    "mpu": ("megatron.core.parallel_state", None),
}

__all__ = ["OptimizerParamScheduler", "mpu"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'megatron.core' has no attribute {name!r}")
    module_name, attribute = _LAZY[name]
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value
