"""MoELayer: the MLP of a layer with experts: router, dispatch, experts, and shared experts that every token passes.

    hidden --> own tokens [n, h] --> router --> dispatcher (experts) --> [n, h] --> + shared experts(hidden)

Inside, tensor-parallel ranks have different tokens: with sequence parallelism they have them anyway; without it each takes a part of
what all of them hold, and the parts are put together again.
"""

import torch
import torch.nn.functional as F

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.batch_inputs import AuxLossWeight, BatchInputs
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import Experts
from megatron.core.transformer.moe.microbatch_tokens import MicrobatchTokens
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.token_dispatcher import build_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig


class MoELayer(torch.nn.Module):
    """layer_index: global number of the layer."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_index: int,
        *,
        device: torch.device | None,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        self.config, self.groups = config, pg_collection
        self.router = Router(config, layer_index, device=device)
        self.experts = Experts(config, device=device, pg_collection=pg_collection)
        self.dispatcher = build_dispatcher(config, pg_collection)
        width = config.moe_shared_expert_intermediate_size
        self.shared_experts = None if width is None else MLP(config, ffn_size=width, device=device, pg_collection=pg_collection)

    def forward(self, hidden: torch.Tensor, batch: BatchInputs) -> torch.Tensor:
        """hidden: [s, b, h], [s/tp, b, h] with sequence parallelism -> the same."""
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()  # all ranks must take part in the backward's collectives, or none
        tokens = self._tokens(hidden.size(0), hidden.size(1), hidden.device)
        own = self._own(hidden.flatten(0, 1), tokens.place.numel())
        routing = self.router(own, tokens, batch.aux_loss or AuxLossWeight())
        out = self._whole(self.dispatcher(own, routing, self.experts), hidden.shape)
        if self.shared_experts is None:
            return out
        return out + self.shared_experts(self.shared_experts.linear_fc1(hidden))

    def _tokens(self, length: int, rows: int, device: torch.device) -> MicrobatchTokens:
        tp, rank, cp = self.groups.size("tp"), self.groups.rank("tp"), self.groups.size("cp")
        length = length * tp if self.config.sequence_parallel else length
        positions = torch.arange(length, device=device)
        place = (positions[:, None] * rows + torch.arange(rows, device=device)).flatten()
        each = -(-place.numel() // tp)
        return MicrobatchTokens(place[rank * each : (rank + 1) * each], length * cp * rows, rows, self.groups.tp_cp)

    def _splits(self) -> bool:
        """Whether the tensor-parallel ranks hold the same tokens outside."""
        return self.groups.size("tp") > 1 and not self.config.sequence_parallel

    def _own(self, flat: torch.Tensor, count: int) -> torch.Tensor:
        """[tokens, h] -> the `count` of them that this rank routes."""
        if not self._splits():
            return flat
        padded = F.pad(flat, (0, 0, 0, -flat.size(0) % self.groups.size("tp")))
        return scatter_to_sequence_parallel_region(padded, self.groups.tp)[:count]

    def _whole(self, own: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Inverse of `_own`, in the form of the layer's input."""
        if not self._splits():
            return own.view(shape)
        total, ranks = shape[0] * shape[1], self.groups.size("tp")
        padded = F.pad(own, (0, 0, 0, -(-total // ranks) - own.size(0)))
        whole = gather_from_sequence_parallel_region(padded, self.groups.tp, tensor_parallel_output_grad=False)
        return whole[:total].view(shape)
