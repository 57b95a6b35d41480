"""One schema: by file (nested, flat, Megatron's section), flag, dotted flag or --set, a value gives the same result."""

import dataclasses
import pathlib
from typing import Any

import pytest

from megatron.core.config_field import field_info
from megatron.core.transformer.moe.moe_config import MoEConfig
from megatron.training.config import Resolved, load_run_config
from megatron.training.config.dump import format_value
from megatron.training.config.options import MEGATRON_SECTIONS, OPTIONS, OWNERS, SECTIONS, Option

from .base_config import REQUIRED, write

# Fields whose value follows no general rule, or that need others.
VALUES: dict[str, Any] = {
    "model.num_attention_heads": 8,
    "model.kv_channels": 16,
    "model.num_query_groups": 2,
    "model.recompute_method": "uniform",
    "model.moe_layer_freq": "2",
    "model.moe_router_topk": 3,
    "model.moe_router_num_groups": 4,
    "model.moe_router_group_topk": 2,
    "training.rampup_batch_size": (2, 2, 12),
    "model.recompute_modules": ("mlp", "layernorm"),
    "model.attention_softmax_in_fp32": True,
    "model.cpu_offloading_num_layers": 2,
    "optimizer.min_lr": 0.0,
    "optimizer.decoupled_weight_decay": False,
    "optimizer.muon_num_ns_steps": 10,
    "optimizer.muon_coefficient_type": "simple",
}
COMPANIONS: dict[str, dict[str, Any]] = {
    **{f"model.{field.name}": {"num_experts": 8} for field in dataclasses.fields(MoEConfig) if field.name != "num_experts"},
    "model.moe_router_enable_expert_bias": {"num_experts": 8, "moe_router_score_function": "sigmoid"},
    "model.moe_router_num_groups": {"num_experts": 8, "moe_router_group_topk": 2},
    "model.moe_router_group_topk": {"num_experts": 8, "moe_router_num_groups": 4},
    "model.moe_pad_expert_input_to_capacity": {"num_experts": 8, "moe_expert_capacity_factor": 1.0},
    "model.group_query_attention": {"num_query_groups": 2},
    "model.recompute_method": {"recompute_granularity": "full", "recompute_num_layers": 1},
    "model.cpu_offloading": {"cpu_offloading_num_layers": 1},
    "model.cpu_offloading_num_layers": {"cpu_offloading": True},
    "model.recompute_granularity": {"recompute_method": "uniform", "recompute_num_layers": 1},
    "ddp.overlap_param_gather": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "ddp.num_distributed_optimizer_instances": {"use_distributed_optimizer": True},
    **{
        f"optimizer.{name}": {"use_precision_aware_optimizer": True, "bf16": True}
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "store_param_remainders")
    },
    "optimizer.optimizer_cpu_offload": {"use_distributed_optimizer": True},
    "optimizer.optimizer_offload_fraction": {"optimizer_cpu_offload": True, "use_distributed_optimizer": True},
    "optimizer.stochastic_rounding": {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"},
    "optimizer.overlap_param_gather_with_optimizer_step": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}


def sample_value(option: Option) -> Any:
    """A value other than the default, where the field has one."""
    if option.path in VALUES:
        return VALUES[option.path]
    info = option.info
    if option.many:
        return ("a b", "c:d")
    if info.choices is not None:
        return next((choice for choice in reversed(info.choices) if choice != option.default), info.choices[0])
    if option.scalar is bool:
        return not option.default
    if option.scalar is str:
        return "/runs/no: #1 'x' ${y}"
    if option.scalar is int:
        return 2 if info.maximum == 2 else max(int(info.minimum or 0), 1) * 96
    return 0.125 if info.maximum or info.exclusive_maximum else 65536.5


def from_file(tmp_path: pathlib.Path, text: str, flags: list[str]) -> Resolved:
    return load_run_config(["--config", write(tmp_path / "c.yaml", text), *flags], {})


@pytest.mark.parametrize("path", OPTIONS)
def test_every_way_gives_the_same_typed_value(tmp_path: pathlib.Path, path: str) -> None:
    option = OPTIONS[path]
    value = sample_value(option)
    others = {name: v for name, v in {**REQUIRED, **COMPANIONS.get(path, {})}.items() if name != option.name}
    flags = [f"--set={name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in others.items()]
    yaml = format_value(value)
    literal = yaml if option.many else str(value).lower() if option.scalar is bool else str(value)
    ways = {
        "nested": from_file(tmp_path, f"{option.section}:\n  {option.name}: {yaml}\n", flags),
        "flat": from_file(tmp_path, f"{option.name}: {yaml}\n", flags),
        "--set": load_run_config([*flags, "--set", f"{path}={literal}".replace("$${", "${")], {}),
        "dotted": load_run_config(
            [
                *flags,
                f"--{path}",
                *(value if option.many and option.scalar is str else [literal] if not option.many else map(str, value)),
            ],
            {},
        ),
    }
    for theirs, ours in MEGATRON_SECTIONS.items():
        if ours == option.section:
            ways[theirs] = from_file(tmp_path, f"{theirs}:\n  {option.name}: {yaml}\n", flags)
    for alias in option.info.aliases:
        ways[alias] = from_file(tmp_path, f"{alias}: {yaml}\n", flags)
    flag = OPTIONS[option.owner].flag
    if option.scalar is not bool:
        ways["flag"] = load_run_config([*flags, flag, *(map(str, value) if option.many else [str(value)])], {})
    else:
        ways["flag"] = load_run_config([*flags, f"{flag}={str(value).lower()}"], {})
    expected = next(iter(ways.values())).config
    for way, resolved in ways.items():
        got = getattr(getattr(resolved.config, option.section), option.name)
        assert got == value and type(got) is type(value), way
        assert resolved.config == expected, way
        assert resolved.origins[path] != "default", way


def test_the_table_holds_every_field_once() -> None:
    fields = {f"{section}.{field.name}" for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)}
    assert set(OPTIONS) == fields
    assert all(field_info(field).help for cls in SECTIONS.values() for field in dataclasses.fields(cls))
    assert {option.owner for option in OPTIONS.values()} == {option.path for option in OWNERS}


@pytest.mark.parametrize("option", [o for o in OWNERS if not o.required], ids=lambda o: o.path)
def test_the_default_of_every_field_is_a_value_of_its_type(option: Option) -> None:
    kinds = (tuple,) if option.many else (option.scalar,)
    assert type(option.default) in kinds or (option.optional and option.default is None)
