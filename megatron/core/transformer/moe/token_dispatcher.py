"""Token dispatchers: tokens to the ranks of their experts and back. [n, h] of this rank's tokens -> [n, h], the weighted expert outputs.

    ranks of a tp_ep group hold all experts once: expert parallelism cuts their numbers, expert tensor parallelism each expert

    alltoall    chosen rows only         rank -- all-to-all over ep --> rank of the expert -- all-gather over etp --> compute
                                         and back: reduce-scatter over etp, all-to-all over ep, weighted sum at home
    allgather   all tokens to all ranks  all-gather over tp_ep, each rank computes its experts' part, reduce-scatter

Every rank takes part in every collective of forward and backward, whether it has tokens or not.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from megatron.core import collectives
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import Routing
from megatron.core.transformer.moe.row_exchange import exchange_rows, gather_rows, reduce_scatter_rows
from megatron.core.transformer.moe.row_plan import combine_rows, plan_rows, take_rows, take_weights
from megatron.core.transformer.transformer_config import TransformerConfig

# (rows [m, h] in the order of the local experts, number of rows of each) -> [m, h]
Compute = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


class TokenDispatcher(Protocol):
    """One way to bring tokens and experts together."""

    def __call__(self, hidden: torch.Tensor, routing: Routing, compute: Compute) -> torch.Tensor:
        """hidden: [n, h] of this rank -> [n, h]."""
        ...


def build_dispatcher(config: TransformerConfig, groups: ProcessGroupCollection) -> TokenDispatcher:
    """The one named by config.moe_token_dispatcher_type; with all experts on one rank there is nothing to send."""
    if config.moe_token_dispatcher_type == "allgather" and groups.size("tp_ep") > 1:
        return AllGatherDispatcher(config, groups)
    return AllToAllDispatcher(config, groups)


class AllToAllDispatcher:
    """Sends each chosen row to its expert. The weights stay at home."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        self.config, self.groups = config, groups
        self.ep, self.etp = groups.size("ep"), groups.size("expt_tp")

    def __call__(self, hidden: torch.Tensor, routing: Routing, compute: Compute) -> torch.Tensor:
        """See `TokenDispatcher`."""
        pad_to = padding(self.config, routing, hidden.size(0))
        plan = plan_rows(routing.chosen, most=routing.most, pad_to=pad_to, complete=routing.complete)
        rows, weights = take_rows(hidden, plan), take_weights(routing.probs, plan)
        if self.groups.size("tp_ep") == 1:
            return combine_rows(compute(rows, plan.counts.tolist()), weights, plan)
        return combine_rows(self._at_experts(rows, plan.counts, compute), weights, plan)

    def _at_experts(self, rows: torch.Tensor, counts: torch.Tensor, compute: Compute) -> torch.Tensor:
        groups, block = self.groups, counts.numel() // self.ep
        every = self._counts_of_all_ranks(counts)  # [ep, etp, E]
        send = counts.view(self.ep, block).sum(1).tolist()
        ep_rank, etp_rank = groups.rank("ep"), groups.rank("expt_tp")
        runs = every[:, :, ep_rank * block : (ep_rank + 1) * block].transpose(0, 1).contiguous()  # [etp, ep, E/ep], as rows arrive
        receive, gathered = runs[etp_rank].sum(1).tolist(), runs.sum((1, 2)).tolist()
        order, back = _by_expert(runs.flatten(0, 1), rows.device)
        rows = exchange_rows(rows, send, receive, groups.ep)
        rows = gather_rows(rows, gathered, groups.expt_tp)
        out = _reordered(compute(_reordered(rows, order, back), runs.sum((0, 1)).tolist()), back, order)
        out = reduce_scatter_rows(out, gathered, groups.expt_tp)
        return exchange_rows(out, receive, send, groups.ep)

    def _counts_of_all_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        """int64 [ep, etp, E] on the CPU: rows that each rank of the tp_ep group has for each expert."""
        every = counts.new_empty(self.ep * self.etp * counts.numel())
        collectives.all_gather(every, counts.contiguous(), self.groups.tp_ep)
        return every.view(self.ep, self.etp, -1).cpu()


class AllGatherDispatcher:
    """Brings every token of the group to every rank; each computes what its experts add."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        self.config, self.groups = config, groups

    def __call__(self, hidden: torch.Tensor, routing: Routing, compute: Compute) -> torch.Tensor:
        """See `TokenDispatcher`."""
        group, ep = self.groups.tp_ep, self.groups.size("ep")
        sizes = self._sizes(hidden)
        block = routing.chosen.size(1) // ep
        own = slice(self.groups.rank("ep") * block, (self.groups.rank("ep") + 1) * block)
        probs = gather_rows(routing.probs, sizes, group)[:, own]
        chosen = gather_rows(routing.chosen.to(torch.uint8), sizes, group)[:, own].bool()
        pads = [padding(self.config, routing, size) for size in sizes]
        pad_to = None if pads[0] is None else sum(pad for pad in pads if pad is not None)
        plan = plan_rows(chosen, most=None if routing.most is None else min(routing.most, block), pad_to=pad_to)
        rows = take_rows(gather_rows(hidden, sizes, group), plan)
        part = combine_rows(compute(rows, plan.counts.tolist()), take_weights(probs, plan), plan)
        return reduce_scatter_rows(part, sizes, group)

    def _sizes(self, hidden: torch.Tensor) -> list[int]:
        """Tokens of each rank of the group."""
        sizes = torch.empty(self.groups.size("tp_ep"), dtype=torch.int64, device=hidden.device)
        collectives.all_gather(sizes, sizes.new_tensor([hidden.size(0)]), self.groups.tp_ep)
        return sizes.tolist()


def padding(config: TransformerConfig, routing: Routing, tokens: int) -> int | None:
    """Rows that a rank with so many tokens sends to each expert, zeros among them; None = as many as were chosen."""
    if routing.capacity is None or not config.moe_pad_expert_input_to_capacity:
        return None
    return min(routing.capacity, tokens)


def _by_expert(runs: torch.Tensor, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """runs: [sources, E/ep], lengths of the runs in which rows lie -> (order that sorts them by expert, its inverse), int64 [m].

    None where they are sorted already.
    """
    sources, experts = runs.shape
    if sources == 1 or experts == 1:
        return None, None
    expert = torch.arange(experts).repeat(sources).repeat_interleave(runs.flatten())
    order = torch.argsort(expert, stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel())
    return order.to(device), back.to(device)


def _reordered(rows: torch.Tensor, order: torch.Tensor | None, back: torch.Tensor | None) -> torch.Tensor:
    return rows if order is None else _Reordered.apply(rows, order, back)  # type: ignore[no-untyped-call]


class _Reordered(torch.autograd.Function):
    """A permutation of rows; its gradient is the inverse one, a gather too."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.back = back
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0][ctx.back], None, None
