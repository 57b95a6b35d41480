"""How evenly a step's tokens were spread over the experts: figures of each router, their sum over ranks, and the expert bias.

A rank adds up what its own tokens gave; `balance_metrics` and `update_expert_bias` are the two reductions over ranks. Auxiliary losses
are means over the microbatches of a step, each with the weight of its counted tokens, as in the gradient.
"""

from collections.abc import Iterable, Sequence

import torch

from megatron.core import collectives
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.router_stats import SUMS
from megatron.core.transformer.transformer_config import ModelArchitectureConfig


def routers_of(model_chunks: Iterable[torch.nn.Module]) -> dict[int, Router]:
    """This rank's routers by global layer number."""
    return {module.layer_index: module for chunk in model_chunks for module in chunk.modules() if isinstance(module, Router)}


def reset_balance(model_chunks: Iterable[torch.nn.Module]) -> None:
    """Begin a step."""
    for router in routers_of(model_chunks).values():
        router.stats.reset()


@torch.no_grad()
def update_expert_bias(model_chunks: Iterable[torch.nn.Module], groups: ProcessGroupCollection) -> None:
    """After a step: raise the bias of experts with fewer tokens than the mean, lower that of the others (a collective of a stage)."""
    routers = [router for router in routers_of(model_chunks).values() if router.expert_bias is not None]
    if not routers:
        return
    device = routers[0].weight.device
    zeros = torch.zeros(routers[0].num_experts, dtype=torch.int64, device=device)
    counts = torch.stack([zeros if router.stats.counts is None else router.stats.counts for router in routers])
    collectives.all_reduce(counts, groups.tp_dp_cp)  # sum over tp, dp and cp, int64
    for router, own in zip(routers, counts.double(), strict=True):
        assert router.expert_bias is not None
        router.expert_bias += torch.sign(own.mean() - own).to(router.expert_bias.dtype) * router.config.moe_router_bias_update_rate


@torch.no_grad()
def balance_metrics(
    config: ModelArchitectureConfig, model_chunks: Sequence[torch.nn.Module], groups: ProcessGroupCollection, device: torch.device
) -> dict[str, float]:
    """Figures of the step, the same on every rank (a collective of all ranks); empty for a model without experts.

    load_balancing_loss (seq_load_balancing_loss), z_loss: means over the layers with experts, without coefficients, if there are
    such losses. max_over_mean_tokens_per_expert: of the layer where it is largest. dropped_tokens: share of the chosen places, with a
    capacity. With moe_per_layer_logging each also as moe/<name>_layer_<number>.
    """
    if config.num_experts is None:
        return {}
    layers = [index for index in range(config.num_layers) if config.is_moe_layer(index)]
    table = torch.zeros((len(layers), len(SUMS) + config.num_experts), dtype=torch.float64, device=device)
    for index, router in routers_of(model_chunks).items():
        if index in layers and router.stats.counts is not None:
            sums = [router.stats.sums.get(name, table.new_zeros(())) for name in SUMS]
            table[layers.index(index)] = torch.cat([torch.stack(sums), router.stats.counts.double()])
    collectives.all_reduce(table, groups.world)  # sum over all ranks, each of which has its own tokens, fp64
    copies = groups.size("tp") * groups.size("cp")  # ranks that count one microbatch's weight
    by_layer = {layer: _figures(config, row, copies) for layer, row in zip(layers, table.tolist(), strict=True)}
    metrics = {}
    for name in next(iter(by_layer.values()), {}):
        values = [figures[name] for figures in by_layer.values()]
        metrics[name] = max(values) if name.startswith("max_") else sum(values) / len(values)
    if config.moe_per_layer_logging:
        metrics |= {f"moe/{name}_layer_{layer}": value for layer, own in by_layer.items() for name, value in own.items()}
    return metrics


def _figures(config: ModelArchitectureConfig, row: Sequence[float], copies: int) -> dict[str, float]:
    sums, counts = dict(zip(SUMS, row, strict=False)), row[len(SUMS) :]
    weight, chosen = max(sums["weight"] / copies, 1e-300), max(sum(counts), 1.0)
    found = {}
    if config.moe_aux_loss_coeff:
        kind = "seq_load_balancing_loss" if config.moe_router_load_balancing_type == "seq_aux_loss" else "load_balancing_loss"
        found[kind] = sums["balancing"] / weight
    if config.moe_z_loss_coeff:
        found["z_loss"] = sums["z"] / weight
    found["max_over_mean_tokens_per_expert"] = max(counts) * len(counts) / chosen
    if config.moe_expert_capacity_factor is not None and config.moe_router_load_balancing_type != "expert_choice":
        found["dropped_tokens"] = sums["dropped"] / chosen
    return found
