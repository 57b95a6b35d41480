"""Model state as logical tensors: `model.<name>` for every parameter and persistent buffer of a module."""

import torch

from megatron.core.dist_checkpointing.mapping import ShardedTensor, placed_pieces, placements, whole
from megatron.core.param_meta import param_meta
from megatron.core.process_groups_config import ProcessGroupCollection

_WRAPPERS = ("_orig_mod.",)  # torch.compile


def logical_name(name: str) -> str:
    """A parameter's or buffer's name without the parts that wrappers add."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def model_sharded_tensors(module: torch.nn.Module, groups: ProcessGroupCollection) -> dict[str, ShardedTensor]:
    """This rank's part of a module's state, by name `model.<logical name>`; pieces view the live memory.

    Parameters lie in the logical tensor as their `ParamMeta` says (tensor-parallel split, padding left out). Persistent buffers
    are taken as equal on all ranks that hold the module. A parameter that is tied to another is listed once.
    """
    replicas, index = groups.size("dp_cp"), groups.rank("dp_cp")
    tensors = {}
    for full_name, param in module.named_parameters():
        meta = param_meta(param)
        shape = tuple(param.shape) if meta.logical_shape is None else meta.logical_shape
        where = placements(tuple(param.shape), shape, meta.tp_dim, groups.rank("tp"), groups.size("tp"), meta.tp_blocks)
        name = f"model.{logical_name(full_name)}"
        tensors[name] = ShardedTensor(name, shape, placed_pieces(where, param), replicas, index)
    for full_name, buffer in _persistent_buffers(module).items():
        name = f"model.{logical_name(full_name)}"
        tensors[name] = whole(name, buffer, replicas=replicas, replica_index=index)
    return tensors


def _persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
