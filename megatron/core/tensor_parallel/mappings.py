"""How activations cross the border of tensor parallelism: autograd functions over the tp group, [s, b, ...] tensors.

    function                                        forward                    backward
    copy_to_tensor_model_parallel_region            identity                   all-reduce
    reduce_from_tensor_model_parallel_region        all-reduce                 identity
    gather_from_tensor_model_parallel_region        all-gather, last dim       own part
    with sequence parallelism (Korthikanti et al. 2022, section 4.2.2), along s:
    scatter_to_sequence_parallel_region             own part                   all-gather
    gather_from_sequence_parallel_region            all-gather                 reduce-scatter
    reduce_scatter_to_sequence_parallel_region      reduce-scatter             all-gather

Over a group of one rank all of them return their input.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron.core import collectives
from megatron.core.collectives import Group, Work

Started = tuple[torch.Tensor, Work | None]


def start_all_reduce(tensor: torch.Tensor, group: Group) -> Started:
    """Sum over the group, in place; valid after the work's wait."""
    tensor = tensor.contiguous()
    return tensor, collectives.all_reduce(tensor, group, async_op=True)  # sum over tp, dtype of the activations


def start_gather_sequence(tensor: torch.Tensor, group: Group) -> Started:
    """[s/tp, ...] -> [s, ...] in rank order; valid after the work's wait."""
    tensor = tensor.contiguous()
    whole = tensor.new_empty((tensor.size(0) * collectives.group_size(group), *tensor.shape[1:]))
    return whole, collectives.all_gather(whole.view(-1), tensor.view(-1), group, async_op=True)


def start_reduce_scatter_sequence(tensor: torch.Tensor, group: Group) -> Started:
    """[s, ...] -> the sum's own part [s/tp, ...]; valid after the work's wait."""
    size, tensor = collectives.group_size(group), tensor.contiguous()
    assert tensor.size(0) % size == 0, (tensor.shape, size)
    part = tensor.new_empty((tensor.size(0) // size, *tensor.shape[1:]))
    return part, collectives.reduce_scatter(part.view(-1), tensor.view(-1), group, async_op=True)  # sum over tp


def finished(started: Started) -> torch.Tensor:
    """The result, when it is there."""
    tensor, work = started
    if work is not None:
        work.wait()
    return tensor


def _own_part(tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return tensor.chunk(collectives.group_size(group), dim)[collectives.group_rank(group)].contiguous()


def _gather_last(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """[..., n/tp] -> [..., n]."""
    stacked = finished(start_gather_sequence(tensor[None], group))
    return torch.cat(list(stacked.unbind(0)), dim=-1)


class _Mapping(torch.autograd.Function):
    """`there` in the forward, `back` in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, there: Callable[..., Any], back: Callable[..., Any]) -> Any:
        ctx.group, ctx.back = group, back
        return there(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.back(grads[0], ctx.group), None, None, None


def _identity(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return tensor.view_as(tensor)


def _all_reduce(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return finished(start_all_reduce(tensor.clone(), group))


def _gather_sequence(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return finished(start_gather_sequence(tensor, group))


def _reduce_scatter_sequence(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return finished(start_reduce_scatter_sequence(tensor, group))


def _own_sequence(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return _own_part(tensor, group, 0)


def _own_last(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return _own_part(tensor, group, -1)


def _map(tensor: torch.Tensor, group: Group, there: Callable[..., Any], back: Callable[..., Any]) -> torch.Tensor:
    if collectives.group_size(group) == 1:
        return tensor
    return _Mapping.apply(tensor, group, there, back)  # type: ignore[no-untyped-call]


def copy_to_tensor_model_parallel_region(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """A replica that each rank uses for its part: its gradient is the sum of all."""
    return _map(tensor, group, _identity, _all_reduce)


def reduce_from_tensor_model_parallel_region(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of the ranks' parts, on every rank."""
    return _map(tensor, group, _all_reduce, _identity)


def gather_from_tensor_model_parallel_region(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """[..., n/tp] -> [..., n] on every rank."""
    return _map(tensor, group, _gather_last, _own_last)


def scatter_to_sequence_parallel_region(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """[s, ...], equal on all ranks -> own [s/tp, ...]."""
    return _map(tensor, group, _own_sequence, _gather_sequence)


def gather_from_sequence_parallel_region(
    tensor: torch.Tensor, group: Group, tensor_parallel_output_grad: bool = True
) -> torch.Tensor:
    """[s/tp, ...] -> [s, ...], which each rank uses for its part; or with tensor_parallel_output_grad=False as a replica."""
    return _map(tensor, group, _gather_sequence, _reduce_scatter_sequence if tensor_parallel_output_grad else _own_sequence)


def reduce_scatter_to_sequence_parallel_region(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The ranks' parts [s, ...] -> own [s/tp, ...] of their sum."""
    return _map(tensor, group, _reduce_scatter_sequence, _gather_sequence)
