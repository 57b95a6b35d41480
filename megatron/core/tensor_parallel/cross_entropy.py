"""Cross entropy per token, with one copy of the logits in memory.

    loss_i = logsumexp_j(x_ij) - x_i,t(i)          d loss_i / d x_ij = softmax(x_i)_j - [j = t(i)]

Forward walks over blocks of rows in at least fp32 and keeps two numbers per row. Backward recomputes the softmax block by block
and writes the gradient over the logits, so neither a softmax nor a second [tokens, vocabulary] array exists. With the vocabulary
cut over tensor parallelism the ranks exchange three numbers per token, never logits (Shoeybi et al. 2019, section 3).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core import collectives
from megatron.core.collectives import Group

# Elements of one block: small enough to stay in a core's cache on CPU, large enough to fill a GPU.
_CPU_BLOCK_ELEMENTS = 1 << 18
_GPU_BLOCK_ELEMENTS = 1 << 26


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    reuse_logits: bool = False,
    group: Group = None,
    compiled: bool = False,
) -> torch.Tensor:
    """Loss of each token over the true vocabulary.

    Args:
        logits: [..., V_padded/tp], any float dtype, this rank's columns; columns from `vocab_size` on (counted over all ranks)
            are padding, take no part and get gradient 0.
        targets: int64 [...], each in [0, vocab_size); anything else raises (on CUDA: a device assertion).
        vocab_size: true vocabulary size.
        reuse_logits: the backward overwrites the memory of `logits`. Only for logits that nobody reads afterwards; a second
            backward through the same graph is then an error.
        group: tensor-parallel group that the vocabulary is cut over.
        compiled: have torch.compile fuse the passes over the logits.

    Returns [...] losses in nats, fp32 (fp64 for fp64 logits).
    """
    if torch.compiler.is_compiling() and collectives.group_size(group) == 1:  # the compiler fuses this, and reuses what memory it can
        used = logits[..., :vocab_size].flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(used, targets.flatten(), reduction="none").view(targets.shape)
    return _CrossEntropy.apply(logits, targets, vocab_size, reuse_logits, group, compiled)  # type: ignore[no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    """With m = max_j x_ij and z = sum_j exp(x_ij - m): loss = log z - (x_it - m), which stays exact for large logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        vocab_size: int,
        reuse_logits: bool,
        group: Group,
        compiled: bool,
    ) -> torch.Tensor:
        flat, accumulate = logits.reshape(-1, logits.size(-1)), torch.promote_types(logits.dtype, torch.float32)
        first = collectives.group_rank(group) * flat.size(1)
        columns = max(0, min(vocab_size - first, flat.size(1)))  # this rank's part of the true vocabulary
        local, elsewhere = _local_targets(targets.reshape(-1, 1), first, columns, vocab_size, group)
        largest = torch.full((flat.size(0), 1), -torch.inf, dtype=accumulate, device=flat.device)
        total, picked = torch.zeros_like(largest), torch.zeros_like(largest)
        if columns:
            largest = flat[:, :columns].amax(1, keepdim=True).to(accumulate)
        collectives.all_reduce(largest, group, "max")
        if columns:
            (_compiled(_exp_sums) if compiled else _exp_sums_by_block)(flat[:, :columns], largest, total)
            picked = flat[:, :columns].gather(1, local).to(accumulate)
            if elsewhere is not None:
                picked.masked_fill_(elsewhere, 0)
        if collectives.group_size(group) > 1:
            both = torch.stack((total, picked))
            collectives.all_reduce(both, group)  # sum over tp, at least fp32
            total, picked = both.unbind(0)
        ctx.save_for_backward(logits, largest, total, local, elsewhere)
        ctx.columns, ctx.reuse_logits, ctx.overwritten, ctx.compiled = columns, reuse_logits, False, compiled
        return (total.log() - (picked - largest)).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.overwritten:
            raise RuntimeError("cross entropy with reuse_logits=True allows one backward; the first one overwrote the logits")
        logits, largest, total, local, elsewhere = ctx.saved_tensors
        ctx.overwritten = ctx.reuse_logits
        flat = logits.reshape(-1, logits.size(-1))
        out = flat if ctx.reuse_logits else torch.empty_like(flat)
        scale = grads[0].reshape(-1, 1) / total
        at_target = -total if elsewhere is None else (-total).masked_fill(elsewhere, 0)
        if ctx.columns:
            write = _compiled(_softmax_grads) if ctx.compiled else _softmax_grads_by_block
            write(flat[:, : ctx.columns], largest, local, at_target, scale, out[:, : ctx.columns])
        out[:, ctx.columns :] = 0
        return out.view(logits.shape), None, None, None, None, None


def _exp_sums(logits: torch.Tensor, largest: torch.Tensor, total: torch.Tensor) -> None:
    """total = sum_j exp(x_ij - m_i)."""
    total.copy_((logits - largest).exp().sum(1, keepdim=True))


def _exp_sums_by_block(logits: torch.Tensor, largest: torch.Tensor, total: torch.Tensor) -> None:
    for rows in _row_blocks(logits):
        torch.sum((logits[rows] - largest[rows]).exp_(), 1, keepdim=True, out=total[rows])


def _softmax_grads(
    logits: torch.Tensor,
    largest: torch.Tensor,
    local: torch.Tensor,
    at_target: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out = scale_i (exp(x_ij - m_i) + [j = t(i)] at_target_i); out may be the logits."""
    is_target = torch.arange(logits.size(1), device=logits.device) == local
    out.copy_(((logits - largest).exp() + torch.where(is_target, at_target, 0.0)) * scale)


def _softmax_grads_by_block(
    logits: torch.Tensor,
    largest: torch.Tensor,
    local: torch.Tensor,
    at_target: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    for rows in _row_blocks(logits):
        numerators = (logits[rows] - largest[rows]).exp_()
        numerators.scatter_add_(1, local[rows], at_target[rows])
        torch.mul(numerators, scale[rows], out=out[rows])


@functools.cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(function)


def _local_targets(
    targets: torch.Tensor, first: int, columns: int, vocab_size: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Targets as columns of this rank (0 for those of other ranks), and which are of other ranks (None: the rank is alone)."""
    if collectives.group_size(group) == 1:
        return targets, None
    in_vocabulary = (targets >= 0) & (targets < vocab_size)
    torch._assert_async(in_vocabulary.all(), f"a target is out of bounds: the vocabulary is 0 to {vocab_size}, exclusive")
    local = targets - first
    elsewhere = (local < 0) | (local >= columns)
    return local.masked_fill(elsewhere, 0), elsewhere


def _row_blocks(flat: torch.Tensor) -> list[slice]:
    """Slices of rows of about the block size of the device."""
    elements = _CPU_BLOCK_ELEMENTS if flat.device.type == "cpu" else _GPU_BLOCK_ELEMENTS
    step = max(1, elements // max(1, flat.size(1)))
    return [slice(start, start + step) for start in range(0, flat.size(0), step)]
