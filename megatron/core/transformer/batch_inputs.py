"""BatchInputs: what all layers share about one batch, computed once per forward."""

import dataclasses
from typing import Any

import torch

from megatron.core.transformer.inference_context import InferenceContext


@dataclasses.dataclass(frozen=True)
class BatchInputs:
    """Read by the attention of every layer.

    rotary: (cos, sin) as `RotaryTable.cos_sin` gives them, or None without rotary positions.
    attention: the attention backend's prepared form of the masks; None while generating.
    position_ids: int64 [b, s], or None for positions 0..s-1 in each row.
    inference_context: key/value cache while generating, else None.
    """

    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    attention: Any = None
    position_ids: torch.Tensor | None = None
    inference_context: InferenceContext | None = None
