"""Initial values of parameters: a rule on each parameter, and one function that fills a model by logical name.

The value of a parameter depends on the run's seed, its logical name and its logical shape only, so every parallel layout, dtype
and device starts from the same numbers. Vocabulary padding is zero.
"""

import dataclasses

import torch

from megatron.core.dist_checkpointing.mapping import logical_shape, param_placements
from megatron.core.param_meta import ParamMeta, param_meta, set_param_meta
from megatron.core.seeding import derive_seed

_ATTRIBUTE = "_megatron_init_rule"


@dataclasses.dataclass(frozen=True)
class InitRule:
    """Constant `value` where `std` is None, else normal with mean 0 and this standard deviation."""

    std: float | None = None
    value: float = 0.0


ZEROS = InitRule(value=0.0)
ONES = InitRule(value=1.0)


def new_parameter(
    shape: tuple[int, ...], *, rule: InitRule, meta: ParamMeta, dtype: torch.dtype, device: torch.device | None
) -> torch.nn.Parameter:
    """An uninitialised parameter that carries its meta and its rule; `initialize_parameters` fills it."""
    param = set_param_meta(torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device)), meta)
    setattr(param, _ATTRIBUTE, rule)
    return param


@torch.no_grad()
def initialize_parameters(
    module: torch.nn.Module, seed: int, tp_rank: int = 0, tp_size: int = 1, expert_tp: tuple[int, int] | None = None
) -> None:
    """Fill every parameter of `module` that was made by `new_parameter`; its name in `module` is its logical name.

    tp_rank, tp_size: this rank's place in tensor parallelism; it takes its part of the logical values. expert_tp: the same for
    experts' parameters; default: as for all others.
    """
    for name, param in module.named_parameters():
        rule = param.__dict__.get(_ATTRIBUTE)
        if rule is not None and not param.is_meta:
            place = expert_tp if expert_tp is not None and param_meta(param).is_expert else (tp_rank, tp_size)
            _fill(param, rule, derive_seed(seed, "init", name), *place)


def _fill(param: torch.nn.Parameter, rule: InitRule, seed: int, tp_rank: int, tp_size: int) -> None:
    if rule.std is None:
        param.fill_(rule.value)
        return
    where = param_placements(param, tp_rank, tp_size)
    shape = logical_shape(param, tp_size)
    values = torch.empty(shape, dtype=torch.float32).normal_(0.0, rule.std, generator=torch.Generator().manual_seed(seed))
    param.zero_()
    for place in where:
        param[place.local.slices()].copy_(values[place.logical.slices()])

