"""ParamMeta: what layers tell the engines (buffers, optimizer, checkpointing) about a parameter, in one frozen value.

Layers attach it with `set_param_meta`; engines read it with `param_meta`. A parameter of a toy module has the default: a
dense, replicated parameter.
"""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class ParamMeta:
    """Facts about one parameter.

    tp_dim: tensor dimension that is split over the tensor-parallel group; None = replicated there.
    is_expert: gradient is reduced over the expert-data-parallel group, not over data parallel.
    is_embedding_or_output: takes the decoupled learning rate.
    shared_embedding: a copy of the tied word embedding (present on first and last pipeline stage).
    tp_partial_grad: each tensor-parallel rank sees a part of the sequence or of the heads, so the gradient is summed over
        the group (an expert's over expert tensor parallelism).
    weight_decay: None = by the documented rule (tensors of 1 dimension are not decayed), else forced.
    logical_shape: global shape without vocabulary padding; None = the tensor's own shape.
    tp_blocks: equal blocks along tp_dim that are each split for themselves; 2 for a gated fc1, whose ranks hold
        [part of gate; part of up].
    is_table: rows are looked up, not multiplied (positions); with the embedding and the output layer it is no matrix to Muon.
    qkv_rows: rows of query, key and value in each group of a packed projection, whose rows are such groups.
    """

    tp_dim: int | None = None
    is_expert: bool = False
    is_embedding_or_output: bool = False
    shared_embedding: bool = False
    tp_partial_grad: bool = False
    weight_decay: bool | None = None
    logical_shape: tuple[int, ...] | None = None
    tp_blocks: int = 1
    is_table: bool = False
    qkv_rows: tuple[int, int, int] | None = None

    @property
    def replica_groups(self) -> tuple[str, ...]:
        """Process groups inside one copy of the model whose ranks hold the same part of the parameter."""
        tensor = ("expt_tp" if self.is_expert else "tp",) if self.tp_dim is None else ()
        return (*tensor, *(("embd",) if self.shared_embedding else ()))


_DEFAULT = ParamMeta()
_ATTRIBUTE = "_megatron_param_meta"


def set_param_meta(param: torch.nn.Parameter, meta: ParamMeta) -> torch.nn.Parameter:
    """Attach `meta` to `param`; returns the parameter."""
    setattr(param, _ATTRIBUTE, meta)
    return param


def param_meta(param: torch.Tensor) -> ParamMeta:
    """The parameter's meta; the default for a parameter without one."""
    return param.__dict__.get(_ATTRIBUTE, _DEFAULT)


def decays(param: torch.Tensor) -> bool:
    """Whether weight decay applies: as the meta says, else only to tensors of two or more dimensions."""
    forced = param_meta(param).weight_decay
    return param.dim() >= 2 if forced is None else forced
