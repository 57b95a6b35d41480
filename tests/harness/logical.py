"""Logical tensors from the parts that ranks hold: what layouts are compared by."""

import torch

from megatron.core import collectives
from megatron.core.dist_checkpointing.mapping import ShardedTensor, logical_shape, param_placements, placed_pieces
from megatron.core.param_meta import param_meta
from megatron.core.process_groups_config import ProcessGroupCollection


def logical_tensors(local: dict[str, ShardedTensor], groups: ProcessGroupCollection) -> dict[str, torch.Tensor]:
    """Whole logical tensors on every rank. Replicas must hold the same bits, and the parts must cover each tensor."""
    whole: dict[str, torch.Tensor] = {}
    parts = {n: (t.global_shape, [(p.box, p.shaped().clone()) for p in t.pieces]) for n, t in local.items()}
    filled: dict[str, torch.Tensor] = {}
    for rank, theirs in enumerate(collectives.gather_objects(parts, groups.world)):
        for name, (shape, pieces) in theirs.items():
            for box, data in pieces:
                target = whole.setdefault(name, torch.zeros(shape, dtype=data.dtype))
                seen = filled.setdefault(name, torch.zeros(shape, dtype=torch.bool))
                here = seen[box.slices()]
                assert torch.equal(target[box.slices()][here], data[here]), f"rank {rank} holds other bits of {name}"
                target[box.slices()].copy_(data)
                here.fill_(True)
    for name, seen in filled.items():
        assert seen.all(), f"nobody holds all of {name}"
    return whole


def logical_grads(module: torch.nn.Module, groups: ProcessGroupCollection) -> dict[str, torch.Tensor]:
    """Whole `main_grad` (or `grad`) of every parameter."""
    local = {}
    for name, param in module.named_parameters():
        grad = getattr(param, "main_grad", param.grad)
        if grad is not None:
            tensor = "expt_tp" if param_meta(param).is_expert else "tp"
            where = param_placements(param, groups.rank(tensor), groups.size(tensor))
            shape = logical_shape(param, groups.size(tensor))
            local[name] = ShardedTensor(name, shape, placed_pieces(where, grad))
    return logical_tensors(local, groups)
