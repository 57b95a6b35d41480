"""Experts: the MLPs of this rank, each with parameters of its own under its global number.

    experts.<number>.linear_fc1.weight    [f or 2f (gate; up), h], of which an expert-tensor-parallel rank has f/etp
    experts.<number>.linear_fc2.weight    [h, f]

A rank of expert parallelism has the experts of one run of E/ep numbers.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.errors import ConfigError
from megatron.core.param_init import ZEROS, InitRule, new_parameter
from megatron.core.param_meta import ParamMeta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.activations import activation
from megatron.core.transformer.moe.grouped_linear import grouped_linear, grouped_problem
from megatron.core.transformer.transformer_config import TransformerConfig


class Experts(torch.nn.ModuleDict):
    """This rank's experts by number. Registered from the last to the first, so that in the gradient buffer, which is filled from the
    end, they lie in the order of their numbers."""

    def __init__(
        self, config: TransformerConfig, *, device: torch.device | None, pg_collection: ProcessGroupCollection
    ) -> None:
        numbers = local_experts(config, pg_collection)
        super().__init__({str(n): _Expert(config, device=device, groups=pg_collection) for n in reversed(numbers)})
        self.config, self.activation = config, activation(config)
        self._adds_bias = pg_collection.rank("expt_tp") == 0

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """rows: [m, h], counts[i] of them for the i-th expert -> [m, h]; with expert tensor parallelism this rank's part of the sum."""
        linears: list[Any] = [(expert.linear_fc1(), expert.linear_fc2()) for expert in self.values()][::-1]  # type: ignore[operator]
        first, second = zip(*linears, strict=True)
        wide = _apply(self.config, rows, counts, first)
        return _apply(self.config, self.activation(wide), counts, second, add_bias=self._adds_bias)


class _Expert(torch.nn.Module):
    def __init__(self, config: TransformerConfig, *, device: torch.device | None, groups: ProcessGroupCollection) -> None:
        super().__init__()
        ranks, width, hidden = groups.size("expt_tp"), config.moe_ffn_size, config.hidden_size
        if width % ranks:
            raise ConfigError(f"expert_tensor_parallel_size={ranks} does not divide moe_ffn_hidden_size={width}; use a divisor of it")
        blocks, width = 2 if config.gated else 1, width // ranks
        cut = ParamMeta(is_expert=True, tp_dim=0, tp_blocks=blocks)
        whole = ParamMeta(is_expert=True, tp_partial_grad=True)
        rules = InitRule(std=config.init_method_std), InitRule(std=config.output_init_std)
        self.linear_fc1 = _ExpertLinear(config, (blocks * width, hidden), rules[0], (cut, cut), device)
        second = ParamMeta(is_expert=True, tp_dim=1)
        self.linear_fc2 = _ExpertLinear(config, (hidden, width), rules[1], (second, whole), device)


class _ExpertLinear(torch.nn.Module):
    """Holds weight [out, in] and bias [out]; what is computed with them is computed for all experts together."""

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        shape: tuple[int, int],
        rule: InitRule,
        metas: tuple[ParamMeta, ParamMeta],
        device: torch.device | None,
    ) -> None:
        super().__init__()
        dtype = config.params_dtype
        self.weight = new_parameter(shape, rule=rule, meta=metas[0], dtype=dtype, device=device)
        if config.add_bias_linear:
            self.bias = new_parameter(shape[:1], rule=ZEROS, meta=metas[1], dtype=dtype, device=device)
        else:
            self.register_parameter("bias", None)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The parameters; a call, so that whoever watches modules (DistributedDataParallel) knows that they are about to be read."""
        return self.weight, self.bias


def local_experts(config: TransformerConfig, groups: ProcessGroupCollection) -> range:
    """Numbers of this rank's experts. Raises ConfigError if they can't be divided."""
    assert config.num_experts is not None
    ranks, rank = groups.size("ep"), groups.rank("ep")
    if config.num_experts % ranks:
        raise ConfigError(f"expert_model_parallel_size={ranks} does not divide num_experts={config.num_experts}; use a divisor of it")
    each = config.num_experts // ranks
    return range(rank * each, (rank + 1) * each)


def _apply(
    config: TransformerConfig,
    rows: torch.Tensor,
    counts: Sequence[int],
    linears: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    add_bias: bool = True,
) -> torch.Tensor:
    weights = [weight for weight, _ in linears]
    grouped = config.moe_grouped_gemm and grouped_problem(rows.device, rows.dtype, weights[0].shape) is None
    out = grouped_linear(rows, counts, weights, grouped=grouped)
    biases = [bias for _, bias in linears if bias is not None]
    if not biases:
        return out
    of_rows = torch.stack(biases).repeat_interleave(torch.tensor(counts, device=rows.device), dim=0, output_size=rows.size(0))
    return out + of_rows * float(add_bias)  # a product with 0 keeps the parameter in every rank's backward
