"""Megatron's `get_forward_backward_func` on toy modules: losses and gradients of plain torch, whatever the pipeline."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection, create_process_groups
from megatron.core.rank_grid import RankGrid
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.distributed import run_distributed
from tests.harness.t0 import t0_transformer_config

WIDTH, LENGTH, ROWS, MICROBATCHES, PARTS = 4, 3, 2, 4, 4


class Block(torch.nn.Module):
    """One part of a toy model of PARTS matrices: [s, b, WIDTH] -> the same; the last one also weighs its outputs."""

    def __init__(self, parts: range) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        every = torch.randn(PARTS, WIDTH, WIDTH, generator=generator, dtype=torch.float32)
        self.weights = torch.nn.ParameterDict({f"w{part}": torch.nn.Parameter(every[part].clone()) for part in parts})
        self.given: torch.Tensor | None = None

    def set_input_tensor(self, tensor: torch.Tensor) -> None:
        """As Megatron's models have it."""
        self.given = tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: the microbatch; a part that was given hidden states takes those."""
        hidden, self.given = (x if self.given is None else self.given), None
        for weight in self.weights.values():
            hidden = torch.tanh(hidden @ weight)
        return hidden


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """The same microbatches on every rank; each has another number of counted tokens."""
    generator = torch.Generator().manual_seed(6)
    for _ in range(MICROBATCHES):
        yield {"x": torch.randn(LENGTH, ROWS, WIDTH, generator=generator), "mask": (torch.rand(LENGTH, ROWS, generator=generator) < 0.7).float()}


def forward_step(iterator: Iterator[Any], model: torch.nn.Module) -> Any:
    """As a Megatron user writes it."""
    batch = next(iterator)

    def loss_func(output: torch.Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return output.detach().clone()
        loss = (output.square().sum(-1) * batch["mask"]).sum()
        return loss / batch["mask"].sum(), {"lm loss": loss.item()}

    return model(batch["x"]), loss_func


def per_token_step(iterator: Iterator[Any], model: torch.nn.Module) -> Any:
    """The same with the sum and the number of tokens."""
    output, loss_func = forward_step(iterator, model)

    def with_tokens(output: torch.Tensor) -> Any:
        mean, report = loss_func(output)
        mask = report["lm loss"] / mean.detach()
        return mean * mask, mask.round().to(torch.int64), report

    return output, with_tokens


def expected(per_token: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Reports and gradients in plain torch."""
    model, reports, total = Block(range(PARTS)), [], torch.zeros(())
    tokens = sum(float(batch["mask"].sum()) for batch in batches())
    for batch in batches():
        loss = (model(batch["x"]).square().sum(-1) * batch["mask"]).sum()
        reports.append(loss.item())
        total = total + loss / (tokens if per_token else batch["mask"].sum() * MICROBATCHES)
    total.backward()
    return reports, {name: weight.grad for name, weight in model.weights.items()}


def run(chunks: int, **options: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Runs on each rank: reports, and gradients of the own chunks."""
    stages = dist.get_world_size() if dist.is_initialized() else 1
    groups = create_process_groups(RankGrid(pp=stages)) if stages > 1 else ProcessGroupCollection.single_process()
    config = TransformerConfig(
        num_layers=PARTS, hidden_size=WIDTH, num_attention_heads=1, pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )  # fmt: skip
    size = PARTS // (stages * chunks)
    parts = [chunk * stages + groups.rank("pp") for chunk in range(chunks)]
    modules = [Block(range(part * size, (part + 1) * size)) for part in parts]
    wrapped = [
        DistributedDataParallel(config, DistributedDataParallelConfig(), module, pg_collection=groups, reduce_op="sum")
        for module in modules
    ]
    per_token = options.get("calculate_per_token_loss", False)
    reports = get_forward_backward_func()(
        forward_step_func=per_token_step if per_token else forward_step,
        data_iterator=[batches() for _ in range(chunks)] if chunks > 1 else batches(),
        model=wrapped if chunks > 1 else wrapped[0],
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=ROWS,
        pg_collection=groups,
        finalize_model_grads_func=finalize_model_grads,
        **options,
    )
    grads = {name: weight.main_grad.clone() for module in modules for name, weight in module.weights.items()}
    return reports, grads


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_losses_and_gradients_equal_plain_torch(stages: int, chunks: int, per_token: bool) -> None:
    wanted, grads = expected(per_token)
    options = {"calculate_per_token_loss": per_token, "forward_only": False}
    ranks = [run(chunks, **options)] if stages == 1 else run_distributed(run, stages, chunks, **options)
    assert [report["lm loss"] for report in ranks[-1][0]] == wanted
    assert all(reports == [] for reports, _ in ranks[:-1])
    got = {name: grad for _, own in ranks for name, grad in own.items()}
    for name, grad in grads.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 2)])
def test_forwards_alone_collect_what_the_loss_function_gives(stages: int, chunks: int) -> None:
    options = {"forward_only": True, "collect_non_loss_data": True}
    ranks = [run(chunks, **options)] if stages == 1 else run_distributed(run, stages, chunks, **options)
    with torch.no_grad():
        outputs = [Block(range(PARTS))(batch["x"]) for batch in batches()]
    for got, wanted in zip(ranks[-1][0], outputs, strict=True):
        assert not got.requires_grad
        torch.testing.assert_close(got, wanted)
    assert all(not grad.any() for _, own in ranks for grad in own.values())


def test_the_loss_scale_is_applied_to_what_is_differentiated_alone() -> None:
    reports, grads = run(1, grad_scale_func=lambda loss: 8 * loss)
    wanted, plain = expected()
    assert [report["lm loss"] for report in reports] == wanted
    for name, grad in plain.items():
        torch.testing.assert_close(grads[name], 8 * grad)


def gpt_losses(stages: int) -> list[float]:
    """Runs on each rank: the product's own model behind Megatron's call."""
    groups = create_process_groups(RankGrid(pp=stages)) if stages > 1 else ProcessGroupCollection.single_process()
    config = t0_transformer_config(pipeline_model_parallel_size=stages)
    first, last = groups.rank("pp") == 0, groups.rank("pp") == stages - 1
    model = GPTModel(config, vocab_size=101, max_sequence_length=16, pg_collection=groups, pre_process=first, post_process=last)
    tokens = torch.randint(101, (MICROBATCHES, ROWS, 17), generator=torch.Generator().manual_seed(8))

    def step(iterator: Iterator[torch.Tensor], chunk: torch.nn.Module) -> Any:
        batch = next(iterator)
        return chunk(batch[:, :-1], labels=batch[:, 1:]), lambda losses: (losses.mean(), losses.mean().item())

    return get_forward_backward_func()(
        forward_step_func=step, data_iterator=iter(tokens), model=model, num_microbatches=MICROBATCHES, seq_length=16,
        micro_batch_size=ROWS, forward_only=True, pg_collection=groups,
    )  # fmt: skip


def test_a_gpt_model_takes_its_hidden_states_by_set_input_tensor() -> None:
    assert run_distributed(gpt_losses, 2, 2) == [[], gpt_losses(1)]


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(ConfigError, match="forward_only=True"):
        run(1, collect_non_loss_data=True)
    with pytest.raises(ConfigError, match="2 entries, model has 1 chunk"):
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=[batches(), batches()], model=Block(range(4)), num_microbatches=1,
            seq_length=LENGTH, micro_batch_size=ROWS,
        )  # fmt: skip
