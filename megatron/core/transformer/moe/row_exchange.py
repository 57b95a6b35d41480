"""How rows [m, h] cross between ranks that hold experts: autograd functions, each with its mirror image as the backward.

    exchange_rows           all-to-all with sizes      back: all-to-all
    gather_rows             all-gather with sizes      back: reduce-scatter with sizes
    reduce_scatter_rows     reduce-scatter with sizes  back: all-gather with sizes

Sizes are numbers of rows by rank, 0 included; every rank of the group takes part whether it has rows or not. Over a group of one
rank the input is the result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core import collectives
from megatron.core.collectives import Group

Sizes = Sequence[int]


def exchange_rows(rows: torch.Tensor, send: Sizes, receive: Sizes, group: Group) -> torch.Tensor:
    """The p-th part of `rows`, send[p] of them, goes to rank p. Returns the parts that came, in rank order."""
    if collectives.group_size(group) == 1:
        return rows
    return _Mirrored.apply(rows, _exchange, _exchange, (send, receive, group), (receive, send, group))  # type: ignore[no-untyped-call]


def gather_rows(rows: torch.Tensor, sizes: Sizes, group: Group) -> torch.Tensor:
    """All ranks' rows, in rank order."""
    if collectives.group_size(group) == 1:
        return rows
    return _Mirrored.apply(rows, _gather, _reduce_scatter, (sizes, group), (sizes, group))  # type: ignore[no-untyped-call]


def reduce_scatter_rows(rows: torch.Tensor, sizes: Sizes, group: Group) -> torch.Tensor:
    """rows: [sum of sizes, h] on every rank -> own part of their sum."""
    if collectives.group_size(group) == 1:
        return rows
    return _Mirrored.apply(rows, _reduce_scatter, _gather, (sizes, group), (sizes, group))  # type: ignore[no-untyped-call]


class _Mirrored(torch.autograd.Function):
    """`there` in the forward, `back` in the backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, there: Callable[..., Any], back: Callable[..., Any], forth: tuple[Any, ...], home: tuple[Any, ...]
    ) -> Any:
        ctx.back, ctx.home = back, home
        return there(rows, *forth)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.back(grads[0], *ctx.home), None, None, None, None


def _exchange(rows: torch.Tensor, send: Sizes, receive: Sizes, group: Group) -> torch.Tensor:
    width, rows = rows.size(1), rows.contiguous()
    out = rows.new_empty((sum(receive), width))
    collectives.all_to_all(out.view(-1), rows.view(-1), [n * width for n in receive], [n * width for n in send], group)
    return out


def _gather(rows: torch.Tensor, sizes: Sizes, group: Group) -> torch.Tensor:
    ranks = collectives.group_size(group)
    if len(set(sizes)) > 1:
        return _exchange(rows.repeat(ranks, 1), [rows.size(0)] * ranks, sizes, group)
    rows = rows.contiguous()
    out = rows.new_empty((sum(sizes), rows.size(1)))
    collectives.all_gather(out.view(-1), rows.view(-1), group)
    return out


def _reduce_scatter(rows: torch.Tensor, sizes: Sizes, group: Group) -> torch.Tensor:
    own, ranks, width = sizes[collectives.group_rank(group)], collectives.group_size(group), rows.size(1)
    if len(set(sizes)) > 1:
        return _exchange(rows, sizes, [own] * ranks, group).view(ranks, own, width).sum(0)
    out = rows.new_empty((own, width))
    collectives.reduce_scatter(out.view(-1), rows.contiguous().view(-1), group)  # sum, dtype of the activations
    return out
