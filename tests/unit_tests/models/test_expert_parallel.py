"""Expert parallelism: losses and every gradient, with auxiliary losses, equal one process's in float64; dispatch of any routing."""

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection, create_process_groups
from megatron.core.rank_grid import RankGrid
from megatron.core.tensor_parallel.random import model_parallel_seed
from megatron.core.transformer.batch_inputs import AuxLossWeight
from megatron.core.transformer.moe.balance import balance_metrics
from megatron.core.transformer.moe.router import Routing
from megatron.core.transformer.moe.token_dispatcher import AllGatherDispatcher, AllToAllDispatcher
from tests.harness.distributed import run_distributed
from tests.harness.logical import logical_grads
from tests.harness.t0 import t0_transformer_config

LOSSES = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
MODELS: dict[str, dict[str, Any]] = {
    "top-2": LOSSES,
    "sigmoid, shared, biases": {
        **LOSSES, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "add_bias_linear": True,
        "moe_shared_expert_intermediate_size": 16, "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "capacity by probability, padded": {**LOSSES, "moe_expert_capacity_factor": 0.7, "moe_pad_expert_input_to_capacity": True},
    "capacity by position": {**LOSSES, "moe_expert_capacity_factor": 0.7, "moe_token_drop_policy": "position"},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_z_loss_coeff": 0.01},
    "expert choice": {"moe_router_load_balancing_type": "expert_choice", "moe_z_loss_coeff": 0.01},
    "recomputed": {**LOSSES, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}  # fmt: skip
GRIDS: dict[str, dict[str, int]] = {  # ranks, and sizes of the axes
    "ep2": {"ranks": 2, "ep": 2},
    "tp2": {"ranks": 2, "tp": 2},
    "tp2, whole experts": {"ranks": 2, "tp": 2, "expert_tp": 1},
    "tp2 as ep2": {"ranks": 2, "tp": 2, "expert_tp": 1, "ep": 2},
    "cut experts only": {"ranks": 2, "expert_tp": 2},
    "dp4ep2": {"ranks": 4, "ep": 2},
    "tp2ep2": {"ranks": 4, "tp": 2, "ep": 2},
    "etp2ep2": {"ranks": 4, "expert_tp": 2, "ep": 2},
}
VOCABULARY, ROWS = 101, 4


@dataclasses.dataclass
class Outcome:
    """Losses [own rows, s], logical gradients, balance metrics."""

    losses: torch.Tensor
    grads: dict[str, torch.Tensor]
    metrics: dict[str, float]


def outcome(model: str, grid: dict[str, int], length: int, **options: Any) -> Outcome:
    """Microbatches of one row each, dealt out over data parallelism."""
    sizes = {name: size for name, size in grid.items() if name != "ranks"}
    alone = not dist.is_initialized()
    groups = ProcessGroupCollection.single_process() if alone else create_process_groups(RankGrid.for_world(dist.get_world_size(), **sizes))
    model_parallel_seed(1234, groups)
    config = t0_transformer_config(
        num_layers=2, num_experts=4, moe_ffn_hidden_size=24, tensor_model_parallel_size=groups.size("tp"),
        expert_model_parallel_size=groups.size("ep"), expert_tensor_parallel_size=groups.size("expt_tp"), **MODELS[model], **options,
    )  # fmt: skip
    gpt = GPTModel(config, vocab_size=VOCABULARY, max_sequence_length=16, pg_collection=groups, seed=5).double()
    with torch.no_grad():
        for name, param in gpt.named_parameters():
            if name.endswith("router.weight"):
                param.mul_(30.0)
            if name.endswith("linear_fc2.bias"):
                param.copy_(0.01 * torch.arange(param.numel()))
        for name, buffer in gpt.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt, pg_collection=groups, reduce_op="sum")
    tokens = torch.randint(VOCABULARY, (ROWS, length + 1), generator=torch.Generator().manual_seed(3))
    mine = tokens.chunk(groups.size("dp"))[groups.rank("dp")]
    losses = []
    for index, row in enumerate(mine.split(1)):
        ddp_context = ddp.no_sync() if index < len(mine) - 1 else torch.enable_grad()
        with ddp_context:
            loss = ddp(row[:, :-1], labels=row[:, 1:], aux_loss=AuxLossWeight(float(length), float(length)))
            loss.sum().backward()
        losses.append(loss.detach())
    finalize_model_grads(ddp, torch.tensor(mine.size(0) * length))
    metrics = balance_metrics(config, [ddp], groups, torch.device("cpu"))
    return Outcome(torch.cat(losses), logical_grads(gpt, groups), metrics)


def assert_same(expected: Outcome, got: Outcome, part: slice) -> None:
    """Within rounding of float64 sums of another order."""
    torch.testing.assert_close(got.losses, expected.losses[part], rtol=1e-10, atol=1e-10)
    assert got.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        error = float((got.grads[name] - grad).abs().max()) / max(float(grad.abs().max()), 1e-300)
        assert error <= 1e-10, f"{name}: relative error {error}, norm ratio {float(got.grads[name].norm() / grad.norm())}"
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-10)


def check(model: str, grid: str, length: int = 16, **options: Any) -> None:
    """All ranks of the layout against one process."""
    expected = outcome(model, {}, length)
    ranks = GRIDS[grid]["ranks"]
    tp = GRIDS[grid].get("tp", 1)
    share = ROWS // (ranks // tp)
    for rank, got in enumerate(run_distributed(outcome, ranks, model, GRIDS[grid], length, **options)):
        assert_same(expected, got, slice(rank // tp * share, (rank // tp + 1) * share))


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("grid", list(GRIDS))
def test_every_layout_equals_one_process(grid: str, dispatcher: str) -> None:
    check("top-2", grid, moe_token_dispatcher_type=dispatcher)


@pytest.mark.parametrize("grid", ["ep2", "tp2", "tp2ep2"])
@pytest.mark.parametrize("model", [name for name in MODELS if name != "top-2"])
def test_every_kind_of_routing_is_the_same_in_every_layout(model: str, grid: str) -> None:
    check(model, grid, moe_token_dispatcher_type="alltoall")


@pytest.mark.parametrize("model", ["top-2", "capacity by probability, padded"])
@pytest.mark.parametrize("grid", ["tp2", "tp2 as ep2", "tp2ep2"])
def test_sequence_parallelism_equals_one_process(model: str, grid: str) -> None:
    check(model, grid, sequence_parallel=True, moe_token_dispatcher_type="alltoall")
    check(model, grid, sequence_parallel=True, moe_token_dispatcher_type="allgather")


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_tokens_that_tensor_parallelism_does_not_divide_are_routed_too(dispatcher: str) -> None:
    check("top-2", "tp2ep2", length=15, moe_token_dispatcher_type=dispatcher)


# ---------------------------------------------------------------------------------------------------------- any routing


def dispatched(kind: str, grid: dict[str, int], routings: list[list[list[bool]]], capacity: int | None) -> None:
    """Runs on each rank: outputs and gradients of toy experts (x -> factor x) against the dense formula."""
    sizes = {name: size for name, size in grid.items() if name != "ranks"}
    groups = create_process_groups(RankGrid.for_world(dist.get_world_size(), **sizes))
    config = t0_transformer_config(
        num_experts=4, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=capacity is not None,
        expert_model_parallel_size=groups.size("ep"), expert_tensor_parallel_size=groups.size("expt_tp"),
    )  # fmt: skip
    dispatcher = (AllGatherDispatcher if kind == "allgather" else AllToAllDispatcher)(config, groups)
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(dist.get_rank())
    chosen = torch.tensor(routings[rank], dtype=torch.bool).view(-1, 4)
    hidden = torch.randn(chosen.size(0), 3, dtype=torch.float64, generator=generator).requires_grad_()
    probs = (torch.rand(chosen.shape, dtype=torch.float64, generator=generator) * chosen).requires_grad_()
    factor = torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3)
    block = 4 // groups.size("ep")
    own = factor[groups.rank("ep") * block :][:block] / groups.size("expt_tp")

    def compute(rows: torch.Tensor, counts: Any) -> torch.Tensor:
        assert sum(counts) == rows.size(0) and len(counts) == block
        return rows * own.repeat_interleave(torch.tensor(counts), dim=0)

    out = dispatcher(hidden, Routing(probs, chosen, None, False, capacity), compute)
    expected = hidden * (probs @ factor)
    torch.testing.assert_close(out, expected)
    seed = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    got = torch.autograd.grad((out * seed).sum(), (hidden, probs))
    wanted = torch.autograd.grad((expected * seed).sum(), (hidden, probs))
    torch.testing.assert_close(got[0], wanted[0])
    torch.testing.assert_close(got[1] * chosen, wanted[1] * chosen)


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
@pytest.mark.parametrize("grid", [{"ep": 4}, {"ep": 2, "expert_tp": 2}, {"ep": 2}])
@settings(max_examples=12, deadline=None)
@given(data=st.data(), padded=st.booleans())
def test_any_routing_is_dispatched_and_comes_home(kind: str, grid: dict[str, int], data: st.DataObject, padded: bool) -> None:
    """Also ranks and experts without a token."""
    token = st.lists(st.booleans(), min_size=4, max_size=4)
    routings = [data.draw(st.lists(token, max_size=5)) for _ in range(4)]
    run_distributed(dispatched, 4, kind, grid, routings, 5 if padded else None)
