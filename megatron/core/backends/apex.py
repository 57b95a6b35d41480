"""NVIDIA Apex: where its fused Adam is found. The package of that name on PyPI is something else and counts as absent."""

from typing import Any

import torch

from megatron.core.backends.optional import probe


def apex_fused_adam() -> tuple[type[Any] | None, str | None]:
    """(apex.optimizers.FusedAdam, None), or (None, reason). The kernel itself is tried by constructing it on one CUDA element."""
    if not torch.cuda.is_available():
        return None, "Apex's FusedAdam needs a CUDA device"
    found = probe("apex.optimizers")
    if found.module is None:
        return None, f"apex: {found.reason}"
    try:
        found.module.FusedAdam([torch.nn.Parameter(torch.zeros(1, device="cuda"))])
    except Exception as error:
        return None, f"apex: {type(error).__name__}: {error}"
    return found.module.FusedAdam, None
