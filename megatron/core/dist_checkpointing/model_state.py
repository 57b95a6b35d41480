"""Model state as logical tensors: `model.<name>` for every parameter and persistent buffer of a module."""

import torch

from megatron.core.dist_checkpointing.mapping import ShardedTensor, logical_shape, param_placements, placed_pieces, whole
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
    tensors = {}
    for full_name, param in module.named_parameters():
        tensor, data = ("expt_tp", "expt_dp") if param_meta(param).is_expert else ("tp", "dp_cp")
        where = param_placements(param, groups.rank(tensor), groups.size(tensor))
        name, shape = f"model.{logical_name(full_name)}", logical_shape(param, groups.size(tensor))
        replicas = groups.place_among((data, *param_meta(param).replica_groups))
        tensors[name] = ShardedTensor(name, shape, placed_pieces(where, param), *replicas)
    for full_name, buffer in _persistent_buffers(module).items():
        name = f"model.{logical_name(full_name)}"
        copies, index = groups.place_among(("dp_cp", "tp"))
        tensors[name] = whole(name, buffer, replicas=copies, replica_index=index)
    return tensors


def _persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
