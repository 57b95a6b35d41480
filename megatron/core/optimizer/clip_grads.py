"""Norm of the gradients and what clipping makes of it.

    squares of 32 elements each   fp32, in rows that lie alike in every layout (shards begin at multiples of 32)
    sum of the rows               fp64

so that the norm, and with it the clip factor, doesn't depend on how buffers are cut into buckets and shards (up to the order of
an fp64 sum, far below fp32's last bit).
"""

from collections.abc import Iterable

import torch

from megatron.core.distributed.param_layout import SHARD_ALIGNMENT

_BLOCK = 1 << 20  # elements per kernel: a few MB of row norms at most


def sum_of_squares(flats: Iterable[torch.Tensor]) -> torch.Tensor:
    """fp64 scalar, on the tensors' device (CPU without tensors).

    flats: 1-D, contiguous, each a multiple of 32 elements long (pieces of a buffer, gaps zero). A non-finite element makes the
        result non-finite; so do fp32 magnitudes above 1e18, whose squares don't fit (an overflow like any other).
    """
    total = None
    for flat in flats:
        for block in flat.split(_BLOCK):
            rows = block.view(-1, SHARD_ALIGNMENT)
            dtype = torch.float32 if rows.itemsize == 2 else None
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=dtype).to(torch.float64)
            part = torch.dot(norms, norms)
            total = part if total is None else total + part
    return torch.zeros((), dtype=torch.float64) if total is None else total


def count_zeros(grads: Iterable[torch.Tensor]) -> torch.Tensor:
    """int64 scalar: elements that are exactly zero."""
    total = torch.zeros((), dtype=torch.int64)
    for grad in grads:
        total = total.to(grad.device) + (grad.numel() - torch.count_nonzero(grad))
    return total


def clip_coefficient(max_norm: float, norm: float) -> float:
    """Factor that brings gradients of this norm down to `max_norm` (torch's rule); 1 when they are below, or max_norm is 0."""
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + 1.0e-6))
