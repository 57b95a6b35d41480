"""BatchInputs: what all layers share about one batch, computed once per forward."""

import dataclasses
from typing import Any

import torch

from megatron.core.transformer.inference_context import InferenceContext


@dataclasses.dataclass(frozen=True)
class AuxLossWeight:
    """How much the auxiliary losses of a microbatch count, which are means over its tokens.

    tokens: weight in the step's mean: the microbatch's counted tokens, over context parallelism too.
    gradient: of what backward is called on, by such a loss; `tokens` times the loss scale where losses are summed over tokens.
    """

    tokens: torch.Tensor | float = 1.0
    gradient: torch.Tensor | float = 1.0


@dataclasses.dataclass(frozen=True)
class BatchInputs:
    """Read by the attention of every layer.

    rotary: (cos, sin) as `RotaryTable.cos_sin` gives them, or None without rotary positions.
    attention: the attention backend's prepared form of the masks; None while generating.
    position_ids: int64 [b, s], or None for positions 0..s-1 in each row.
    inference_context: key/value cache while generating, else None.
    aux_loss: weight of the auxiliary losses of layers with experts; default 1.
    """

    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    attention: Any = None
    position_ids: torch.Tensor | None = None
    inference_context: InferenceContext | None = None
    aux_loss: AuxLossWeight | None = None
