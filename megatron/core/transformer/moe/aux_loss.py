"""Losses that keep experts equally loaded and the router's logits small, and how they enter the backward.

    balancing  E / (k T^2)  sum over experts e of  c_e  sum over tokens t of  p_te      Fedus et al. 2021, equation 4
    z-loss     1 / T        sum over tokens t of  logsumexp(logits_t)^2                  Zoph et al. 2022, equation 5

T tokens and counts c are those of the whole microbatch (or of each sequence, then the mean over them); a rank computes the terms of
its own tokens, so that the ranks' shares add up to the loss. A layer's loss does not travel to the last pipeline stage: `attach`
puts its gradient into the layer's own backward, once, whatever is recomputed.
"""

from typing import Any

import torch

from megatron.core.transformer.moe.microbatch_tokens import MicrobatchTokens


def balancing_loss(
    scores: torch.Tensor, chosen: torch.Tensor, tokens: MicrobatchTokens, *, topk: int, per_sequence: bool
) -> torch.Tensor:
    """This rank's share of the balancing loss, without its coefficient. scores, chosen: [n, E], the latter before any drop."""
    experts, parts = scores.size(1), tokens.rows if per_sequence else 1
    if per_sequence:
        zeros = scores.new_zeros((parts, experts))
        counts = zeros.index_add(0, tokens.sequence, chosen.to(scores.dtype))
        sums = zeros.index_add(0, tokens.sequence, scores)
    else:
        counts, sums = chosen.sum(0, keepdim=True).to(scores.dtype), scores.sum(0, keepdim=True)
    counts = tokens.sum_over_ranks(counts)
    per_part = tokens.total / parts
    return (counts * sums).sum() * (experts / (topk * per_part * per_part * parts))


def z_loss(logits: torch.Tensor, tokens: MicrobatchTokens) -> torch.Tensor:
    """This rank's share of the z-loss, without its coefficient. logits: [n, E]."""
    return torch.logsumexp(logits, dim=-1).square().sum() / tokens.total


def attach(carrier: torch.Tensor, loss: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """`carrier`, in whose backward d(scale x loss) is added to the gradients. loss: scalar."""
    return _Attached.apply(carrier, loss, scale)  # type: ignore[no-untyped-call]


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: torch.Tensor, loss: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
        ctx.scale, ctx.dtype = scale, loss.dtype
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        scale = torch.as_tensor(ctx.scale, dtype=ctx.dtype, device=grads[0].device)
        return grads[0], scale.reshape(()), None
