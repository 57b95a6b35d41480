"""Cross entropy per token, with one copy of the logits in memory.

    loss_i = logsumexp_j(x_ij) - x_i,t(i)          d loss_i / d x_ij = softmax(x_i)_j - [j = t(i)]

Forward walks over blocks of rows in at least fp32 and keeps two numbers per row. Backward recomputes the softmax block by block
and writes the gradient over the logits, so neither a softmax nor a second [tokens, vocabulary] array exists.
"""

from typing import Any

import torch

# Elements of one block: small enough to stay in a core's cache on CPU, large enough to fill a GPU.
_CPU_BLOCK_ELEMENTS = 1 << 18
_GPU_BLOCK_ELEMENTS = 1 << 26


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, vocab_size: int, reuse_logits: bool = False
) -> torch.Tensor:
    """Loss of each token over the true vocabulary.

    Args:
        logits: [..., V_padded], any float dtype; columns from `vocab_size` on are padding, take no part and get gradient 0.
        targets: int64 [...], each in [0, vocab_size); anything else raises (on CUDA: a device assertion).
        vocab_size: true vocabulary size.
        reuse_logits: the backward overwrites the memory of `logits`. Only for logits that nobody reads afterwards; a second
            backward through the same graph is then an error.

    Returns [...] losses in nats, fp32 (fp64 for fp64 logits).
    """
    return _CrossEntropy.apply(logits, targets, vocab_size, reuse_logits)  # type: ignore[no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    """With m = max_j x_ij and z = sum_j exp(x_ij - m): loss = log z - (x_it - m), which stays exact for large logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, reuse_logits: bool) -> torch.Tensor:
        flat, flat_targets = logits.reshape(-1, logits.size(-1)), targets.reshape(-1, 1)
        true_logits, accumulate = flat[:, :vocab_size], torch.promote_types(logits.dtype, torch.float32)
        largest = true_logits.amax(1, keepdim=True).to(accumulate)
        total = torch.empty_like(largest)
        for rows in _row_blocks(flat):
            torch.sum((true_logits[rows] - largest[rows]).exp_(), 1, keepdim=True, out=total[rows])
        picked = true_logits.gather(1, flat_targets).to(accumulate)
        ctx.save_for_backward(logits, targets, largest, total)
        ctx.vocab_size, ctx.reuse_logits, ctx.overwritten = vocab_size, reuse_logits, False
        return (total.log() - (picked - largest)).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.overwritten:
            raise RuntimeError("cross entropy with reuse_logits=True allows one backward; the first one overwrote the logits")
        logits, targets, largest, total = ctx.saved_tensors
        ctx.overwritten = ctx.reuse_logits
        flat = logits.reshape(-1, logits.size(-1))
        out = flat if ctx.reuse_logits else torch.empty_like(flat)
        scale, flat_targets = grads[0].reshape(-1, 1) / total, targets.reshape(-1, 1)
        for rows in _row_blocks(flat):
            numerators = (flat[rows, : ctx.vocab_size] - largest[rows]).exp_()
            numerators.scatter_add_(1, flat_targets[rows], -total[rows])
            torch.mul(numerators, scale[rows], out=out[rows, : ctx.vocab_size])
        out[:, ctx.vocab_size :] = 0
        return out.view(logits.shape), None, None, None


def _row_blocks(flat: torch.Tensor) -> list[slice]:
    """Slices of rows of about the block size of the device."""
    elements = _CPU_BLOCK_ELEMENTS if flat.device.type == "cpu" else _GPU_BLOCK_ELEMENTS
    step = max(1, elements // max(1, flat.size(1)))
    return [slice(start, start + step) for start in range(0, flat.size(0), step)]
