"""Tensor and sequence parallelism: losses, logits and every gradient equal one process's (R01, R10), in float64."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.mapping import logical_shape, param_placements
from megatron.core.dist_checkpointing.model_state import model_sharded_tensors
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection, create_process_groups
from megatron.core.rank_grid import RankGrid
from megatron.core.tensor_parallel.random import model_parallel_seed
from tests.harness.distributed import run_distributed
from tests.harness.logical import logical_grads, logical_tensors
from tests.harness.t0 import t0_transformer_config

VOCABULARY = 101
VARIANTS: dict[str, dict[str, Any]] = {
    "T0": {},
    "biases, QK-norm, LayerNorm": {"add_bias_linear": True, "qk_layernorm": True, "normalization": "LayerNorm"},
    "GPT-2": {
        "position_embedding_type": "learned_absolute", "activation_func": "gelu", "add_bias_linear": True,
        "normalization": "LayerNorm", "untie_embeddings_and_output_weights": False,
    },
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selectively recomputed": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")},
}  # fmt: skip


@dataclasses.dataclass
class Outcome:
    """Losses [b, s], logits [b, s, V], logical weights and gradients; gradient norm's inputs are compared elsewhere."""

    losses: torch.Tensor
    logits: torch.Tensor
    weights: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]


def outcome(variant: dict[str, Any], tp: int, sequence_parallel: bool, poison: bool = False) -> Outcome:
    """One forward and backward of the same batch over this rank's layout (tp x data parallel ranks)."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    groups = create_process_groups(RankGrid(tp=tp, dp=world // tp)) if world > 1 else ProcessGroupCollection.single_process()
    model_parallel_seed(1234, groups)
    config = t0_transformer_config(
        tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel, make_vocab_size_divisible_by=8, **variant
    )
    model = GPTModel(config, vocab_size=VOCABULARY, max_sequence_length=16, pg_collection=groups).double()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                _count_up(param, groups)
        if poison:
            _poison(model, groups)
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(), model, pg_collection=groups, reduce_op="sum"
    )
    tokens = torch.randint(VOCABULARY, (4, 17), generator=torch.Generator().manual_seed(3))
    mine = tokens.chunk(groups.size("dp"))[groups.rank("dp")]
    losses = ddp(mine[:, :-1], labels=mine[:, 1:])
    losses.sum().backward()
    finalize_model_grads(ddp, torch.tensor(losses.numel()))
    ddp.eval()
    with torch.no_grad():
        logits = ddp(mine[:, :-1])
    return Outcome(
        losses.detach(), logits, logical_tensors(model_sharded_tensors(model, groups), groups), logical_grads(model, groups)
    )


def _count_up(param: torch.nn.Parameter, groups: ProcessGroupCollection) -> None:
    """0.01 x the logical index, so that a bias that is added twice, or shifted, shows."""
    values = 0.01 * torch.arange(logical_shape(param, groups.size("tp"))[0], dtype=param.dtype)
    for place in param_placements(param, groups.rank("tp"), groups.size("tp")):
        param[place.local.slices()] = values[place.logical.slices()]


def _poison(model: GPTModel, groups: ProcessGroupCollection) -> None:
    """+50 in every row of vocabulary padding."""
    rows = model.embedding.word_embeddings.weight.size(0)
    first = groups.rank("tp") * rows
    for weight in (model.embedding.word_embeddings.weight, model.output_layer.weight):  # type: ignore[union-attr]
        weight[max(0, VOCABULARY - first) :] = 50.0


def assert_same(expected: Outcome, got: Outcome, part: slice) -> None:
    """Within rounding of float64 sums of another order."""
    torch.testing.assert_close(got.losses, expected.losses[part], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got.logits, expected.logits[part], rtol=1e-10, atol=1e-10)
    assert got.weights.keys() == expected.weights.keys() and got.grads.keys() == expected.grads.keys()
    for name, weight in expected.weights.items():
        assert torch.equal(got.weights[name], weight), name
    for name, grad in expected.grads.items():
        error = float((got.grads[name] - grad).abs().max()) / float(grad.abs().max())
        assert error <= 1e-10, f"{name}: relative error {error}, norm ratio {float(got.grads[name].norm() / grad.norm())}"


def assert_layout(name: str, world_size: int, tp: int, sequence_parallel: bool) -> None:
    """All ranks of the layout against one process."""
    expected = outcome(VARIANTS[name], 1, False)
    for rank, got in enumerate(run_distributed(outcome, world_size, VARIANTS[name], tp, sequence_parallel)):
        share = 4 // (world_size // tp)
        index = rank // tp
        assert_same(expected, got, slice(index * share, (index + 1) * share))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_two_tensor_ranks_equal_one_process(name: str, sequence_parallel: bool) -> None:
    assert_layout(name, 2, 2, sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_and_data_parallelism_together_equal_one_process(sequence_parallel: bool) -> None:
    assert_layout("biases, QK-norm, LayerNorm", 4, 2, sequence_parallel)


def test_vocabulary_padding_is_invisible_in_every_layout() -> None:
    clean = outcome({}, 1, False)
    assert_same(clean, outcome({}, 1, False, poison=True), slice(None))
    for got in run_distributed(outcome, 2, {}, 2, False, poison=True):
        assert_same(clean, got, slice(None))
        assert got.logits.size(-1) == VOCABULARY


def _refused() -> str:
    groups = create_process_groups(RankGrid(tp=2, dp=1))
    with pytest.raises(ConfigError) as error:
        GPTModel(t0_transformer_config(), vocab_size=VOCABULARY, max_sequence_length=16, pg_collection=groups)
    return str(error.value)


def test_a_model_of_another_tensor_parallel_size_than_the_groups_is_refused() -> None:
    assert all("tensor_model_parallel_size=1" in text and "2 rank(s)" in text for text in run_distributed(_refused, 2))
