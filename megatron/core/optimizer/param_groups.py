"""Parameter groups: which parameters decay, which have a learning rate of their own.

A group is a dict with Megatron's keys, live for the scheduler: params (this rank's main params), param_names (of all its
parameters), lr, weight_decay, lr_mult, wd_mult, max_lr, min_lr, is_decoupled_lr, is_expert_parallel, step, optimizer (the
update rule's name) and the rule's hyperparameters. Its identity is `group_identity`, never its position.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from megatron.core.errors import ConfigError
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.update_rules import Rule, rule_name
from megatron.core.param_meta import decays, param_meta

Condition = Callable[[str, torch.nn.Parameter], bool]

_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "optimizer")


def build_param_groups(
    config: OptimizerConfig,
    named_params: Iterable[tuple[str, torch.nn.Parameter]],
    rules: Mapping[str, Rule],
    *,
    no_weight_decay_cond: Condition | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
) -> tuple[list[dict[str, Any]], dict[torch.nn.Parameter, dict[str, Any]]]:
    """Sort trainable parameters into groups; returns the groups and each parameter's group.

    Args:
        rules: by name, as `rule_name` chooses them.
        no_weight_decay_cond: True for parameters that are not decayed; default: as `param_meta.decays` says (tensors of one
            dimension are not).
        scale_lr_cond: True for parameters whose learning rate is multiplied by `lr_mult`.

    Raises ConfigError without a learning rate.
    """
    if config.lr is None:
        raise ConfigError("the optimizer needs a learning rate; set lr")
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    group_of = {}
    for name, param in named_params:
        meta = param_meta(param)
        decay = decays(param) if no_weight_decay_cond is None else not no_weight_decay_cond(name, param)
        scaled = scale_lr_cond is not None and scale_lr_cond(name, param)
        decoupled = config.decoupled_lr is not None and meta.is_embedding_or_output
        rule = rule_name(config, param)
        key = (1.0 if decay else 0.0, lr_mult if scaled else 1.0, meta.is_expert, decoupled, rule)
        if key not in groups:
            groups[key] = _new_group(config, key, rules[rule].hyperparameters())
        groups[key]["param_names"].append(name)
        group_of[param] = groups[key]
    return [groups[key] for key in sorted(groups)], group_of


def _new_group(config: OptimizerConfig, key: tuple[Any, ...], hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    wd_mult, lr_mult, is_expert, decoupled, rule = key
    max_lr = config.decoupled_lr if decoupled else config.lr
    min_lr = config.decoupled_min_lr if decoupled and config.decoupled_min_lr is not None else config.min_lr
    assert max_lr is not None
    return {
        "params": [],
        "param_names": [],
        "lr": max_lr * lr_mult,
        "weight_decay": config.weight_decay * wd_mult,
        "wd_mult": wd_mult,
        "lr_mult": lr_mult,
        "is_expert_parallel": is_expert,
        "is_decoupled_lr": decoupled,
        "max_lr": max_lr,
        "min_lr": min_lr,
        "step": 0,
        "optimizer": rule,
        **hyperparameters,
    }


def group_identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a group the same one in another run or layout."""
    return tuple(group[key] for key in _IDENTITY)


def group_label(group: Mapping[str, Any]) -> str:
    """A group's identity in words, for logs: `adam, decayed`, `adam, not decayed, decoupled lr` ..."""
    parts = [group["optimizer"], "decayed" if group["wd_mult"] else "not decayed"]
    parts += ["decoupled lr"] * group["is_decoupled_lr"] + ["experts"] * group["is_expert_parallel"]
    parts += [f"lr x {group['lr_mult']:g}"] * (group["lr_mult"] != 1.0)
    return ", ".join(parts)


def group_scalars(group: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON-able entries of a group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def load_group_scalars(groups: Iterable[dict[str, Any]], saved: Iterable[Mapping[str, Any]], step: int) -> None:
    """Give each group its step and its saved learning rate and weight decay.

    Hyperparameters and the ends of the schedule are this run's, not the saved ones. A group that the checkpoint doesn't know
    (another pipeline stage wrote it) keeps its own values and takes `step`.
    """
    by_identity = {group_identity(scalars): scalars for scalars in saved}
    for group in groups:
        scalars = by_identity.get(group_identity(group), {"step": step})
        group.update({key: scalars[key] for key in ("step", "lr", "weight_decay") if key in scalars})


def describe_param_groups(groups: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Names by treatment, for printing: decayed, not decayed, and those with a learning rate of their own."""
    listed: dict[str, list[str]] = {"decayed": [], "not decayed": [], "separate learning rate": [], "orthogonalised": []}
    for group in groups:
        listed["decayed" if group["wd_mult"] else "not decayed"] += group["param_names"]
        if group["is_decoupled_lr"] or group["lr_mult"] != 1.0:
            listed["separate learning rate"] += group["param_names"]
        if group["optimizer"] == "muon":
            listed["orthogonalised"] += group["param_names"]
    return listed
