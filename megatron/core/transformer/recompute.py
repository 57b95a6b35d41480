"""Activation recomputation: run a function now, keep its inputs only, and run it again in the backward.

    selective   core_attn: the attention kernel      layernorm: a norm together with the matrix after it (whose saved input is the
                norm's output; the matrix product itself is not repeated)      mlp: the MLP      moe: norm, router and experts
    full        whole layers: uniform = chunks of N layers, block = the first N layers one by one

The random state is restored, so dropout repeats its mask and results are bit-equal with recomputation on or off.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.tensor_parallel.random import get_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig


def recomputed(config: TransformerConfig, module: str, function: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
    """function(*inputs), recomputed in the backward if selective recomputation names this part of the layer."""
    named = config.recompute_granularity == "selective" and module in config.recompute_modules
    if (named or (module == "moe" and config.moe_layer_recompute)) and torch.is_grad_enabled():
        return checkpoint_function(config, function, *inputs)
    return function(*inputs)


def checkpoint_function(config: TransformerConfig, function: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
    """function(*inputs), of which only the inputs are kept for the backward."""
    if config.tensor_model_parallel_size > 1 or config.num_experts is not None:  # named random streams; figures counted once
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=_contexts)
    return checkpoint(function, *inputs, use_reentrant=False)


_recomputing = 0


def is_recomputing() -> bool:
    """Whether what runs now has run before, in a forward whose inputs only were kept."""
    return _recomputing > 0


def _contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    first, again = get_rng_tracker().recompute_contexts()
    return first, _marked(again)


@contextlib.contextmanager
def _marked(context: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    global _recomputing
    with context:
        _recomputing += 1
        try:
            yield
        finally:
            _recomputing -= 1


def layer_chunks(config: TransformerConfig, num_layers: int) -> list[tuple[int, int, bool]]:
    """How a stack of layers is run: half-open (start, end, recomputed as one piece), covering 0..num_layers in order."""
    count = config.recompute_num_layers
    if config.recompute_granularity != "full" or count is None:
        return [(0, num_layers, False)]
    if config.recompute_method == "uniform":
        return [(start, min(start + count, num_layers), True) for start in range(0, num_layers, count)]
    single = [(index, index + 1, True) for index in range(min(count, num_layers))]
    return single + ([(len(single), num_layers, False)] if len(single) < num_layers else [])
