"""finalize_model_grads: what must happen to gradients between the last backward and the optimizer."""

from collections.abc import Sequence

import torch

from megatron.core import collectives
from megatron.core.collectives import Group
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel, ValidGrad
from megatron.core.param_meta import param_meta


def finalize_model_grads(
    model: DistributedDataParallel | Sequence[DistributedDataParallel], num_tokens: torch.Tensor | None = None
) -> None:
    """Finish the data-parallel reductions, add up what tensor- and pipeline-parallel copies hold, scale.

    Args:
        model: this rank's model chunks.
        num_tokens: scalar integer tensor, this rank's unmasked tokens of the step. Then the final gradient is the sum over
            all ranks divided by the tokens of all ranks (all-reduced over dp_cp here; 0 tokens count as 1). None: the final
            gradient is the mean over the data-parallel ranks.

    With the distributed optimizer only this rank's shards hold the result.
    """
    chunks = [model] if isinstance(model, DistributedDataParallel) else list(model)
    tokens = _global_tokens(chunks[0], num_tokens)
    for chunk in chunks:
        chunk.finish_grad_sync(_scale(chunk, tokens))
    groups = chunks[0].pg_collection
    valid = [grad for chunk in chunks for grad in chunk.valid_grads()]
    # A norm's weight is replicated over tp, but with sequence parallelism each rank saw its part of the sequence.
    partial = [grad for grad in valid if param_meta(grad.param).tp_partial_grad]
    _sum_over(groups.tp, [grad for grad in partial if not param_meta(grad.param).is_expert])
    _sum_over(groups.expt_tp, [grad for grad in partial if param_meta(grad.param).is_expert])
    # The tied embedding lives on the first and the last stage; both copies get the sum of both gradients.
    _sum_over(groups.embd, [grad for grad in valid if param_meta(grad.param).shared_embedding])


def _global_tokens(chunk: DistributedDataParallel, num_tokens: torch.Tensor | None) -> torch.Tensor | None:
    if num_tokens is None:
        return None
    tokens = num_tokens.detach().clone()
    collectives.all_reduce(tokens, chunk.pg_collection.dp_cp)
    return tokens.clamp(min=1)


def _scale(chunk: DistributedDataParallel, tokens: torch.Tensor | None) -> float | torch.Tensor | None:
    """What turns the chunk's reduced gradients into final ones."""
    if tokens is None:
        return None if chunk.reduce_op == "mean" else 1.0 / chunk.data_parallel_size
    factor = chunk.data_parallel_size if chunk.reduce_op == "mean" else 1
    if tokens.device.type == "cpu":
        return factor / tokens.item()
    return factor / tokens.to(torch.float32)


def _sum_over(group: Group, grads: Sequence[ValidGrad]) -> None:
    """Sum of the gradients over `group`, in one message per dtype. The ranks hold the same ranges of the same parameters."""
    if collectives.group_size(group) == 1:
        return
    for dtype in sorted({grad.grad.dtype for grad in grads}, key=str):
        parts = [grad.grad for grad in grads if grad.grad.dtype == dtype]
        flat = torch.cat(parts)
        collectives.all_reduce(flat, group)
        for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(total)
