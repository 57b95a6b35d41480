"""Activations in host memory between forward and backward: the same bits, everything that is large moved once, fetched in time."""

import dataclasses
import itertools
import math
import pathlib
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.activation_offload import ActivationOffload
from tests.harness.d0 import write_d0
from tests.harness.distributed import run_distributed
from tests.harness.jobs import make_trainer, weights
from tests.harness.t0 import t0_flags, t0_transformer_config


class LateTransfers:
    """CPU tensors as the device. What comes back is NaN until it is joined; the order of everything is written down."""

    def __init__(self) -> None:
        self.order: list[tuple[str, int]] = []
        self.numbers = itertools.count()
        self.bytes = 0

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> Any:
        host.copy_(device)
        self.bytes += host.nbytes
        return self._note("down", next(self.numbers)), None, None

    def wait(self, copy: Any) -> None:
        raise AssertionError("the host waits for nothing")

    def to_device(self, device: torch.Tensor, host: torch.Tensor) -> Any:
        if device.is_floating_point():
            device.fill_(math.nan)
        return self._note("up", next(self.numbers)), device, host

    def join(self, copy: Any) -> None:
        number, device, host = copy
        self._note("join", number)
        if device is not None:
            device.copy_(host)

    def _note(self, what: str, number: int) -> int:
        self.order.append((what, number))
        return number


CASES: dict[str, dict[str, Any]] = {
    "T0": {},
    "GPT-2 with dropout": {
        "position_embedding_type": "learned_absolute", "activation_func": "gelu", "add_bias_linear": True,
        "normalization": "LayerNorm", "hidden_dropout": 0.3, "attention_dropout": 0.2,
    },
    "QK-norm, window": {"qk_layernorm": True, "window_size": 5},
    "recomputed attention": {"recompute_granularity": "selective"},
    "recomputed parts": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")},
}  # fmt: skip


def gradients(case: str, layers: int, offload: ActivationOffload | None) -> dict[str, torch.Tensor]:
    """Of two microbatches whose forwards come first and whose backwards come in the same order, as in a pipeline."""
    changes = {"cpu_offloading": layers > 0, "cpu_offloading_num_layers": layers}
    config = t0_transformer_config(**CASES[case], **changes)
    model = GPTModel(config, vocab_size=101, max_sequence_length=16, pg_collection=ProcessGroupCollection.single_process())
    model.decoder.offload = offload
    tokens = torch.randint(101, (2, 2, 17), generator=torch.Generator().manual_seed(1))
    documents = torch.arange(16).div(5, rounding_mode="floor").expand(2, 16)
    torch.manual_seed(3)
    losses = [model(rows[:, :-1], labels=rows[:, 1:], document_ids=documents).sum() for rows in tokens]
    for loss in losses:
        loss.backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("case", list(CASES))
def test_gradients_are_bit_equal(case: str, layers: int) -> None:
    expected = gradients(case, 0, None)
    transfers = LateTransfers()
    got = gradients(case, layers, ActivationOffload(transfers, smallest=0))
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(got[name], grad), name
    downs, ups = ([n for what, n in transfers.order if what == kind] for kind in ("down", "up"))
    assert len(downs) == len(ups) and len(downs) >= 2 * layers


def test_layers_come_back_one_ahead_of_the_backward_and_small_things_stay() -> None:
    """3 of 4 layers: their storages go layer by layer, and come back last layer first, before they are joined."""
    transfers = LateTransfers()
    gradients("T0", 3, ActivationOffload(transfers, smallest=1024))
    words = [what for what, _ in transfers.order]
    half = words.count("down") // 2
    per_layer = half // 3
    assert half == 3 * per_layer and words[: 2 * half] == ["down"] * (2 * half)
    first_backward = transfers.order[2 * half :][: half * 3]
    ups = [index for index, (what, _) in enumerate(first_backward) if what == "up"]
    assert len(ups) == half
    joined = [number for what, number in first_backward if what == "join"]
    assert joined[:per_layer] == list(range(2 * per_layer, half))  # the third layer's copies down, before they come back
    needed = next(i for i, (what, n) in enumerate(first_backward) if what == "join" and n >= 2 * half)
    assert sum(index < needed for index in ups) >= 2 * per_layer - 1  # the layer before is on its way already


def test_a_large_limit_moves_nothing() -> None:
    transfers = LateTransfers()
    gradients("T0", 4, ActivationOffload(transfers, smallest=1 << 30))
    assert transfers.order == []


def trained(flags: list[str], layers: int) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Runs on each rank: a job with the first layers of each chunk offloaded; losses, weights, bytes that were moved."""
    trainer = make_trainer(flags)
    transfers = LateTransfers()
    for chunk in trainer.model_chunks:
        decoder: Any = chunk.module.decoder
        if layers:
            decoder._config = dataclasses.replace(decoder._config, cpu_offloading=True, cpu_offloading_num_layers=layers)
            decoder.offload = ActivationOffload(transfers, smallest=0)
    losses: list[float] = []
    trainer.callbacks.append(_Losses(losses))
    trainer.fit()
    trainer.optimizer.finish_param_sync()
    return losses, weights(trainer), transfers.bytes


class _Losses:
    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def on_step_end(self, trainer: Any, result: Any) -> None:
        self.losses.append(result.loss_sum)

    def __getattr__(self, name: str) -> Any:
        return lambda *unused: None


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb_h1"},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_granularity": "selective"},
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ],
    ids=str,
)
def test_training_in_parallel_is_bit_equal(tmp_path: pathlib.Path, options: dict[str, Any]) -> None:
    data = write_d0(str(tmp_path / "d0"))
    flags = t0_flags(data, train_iters=3, micro_batch_size=1, hidden_dropout=0.1, attention_dropout=0.1, **options)
    plain = run_distributed(trained, 2, flags, 0)
    moved = run_distributed(trained, 2, flags, 1)
    for (losses, final, _), (other_losses, other_final, size) in zip(plain, moved, strict=True):
        assert losses == other_losses and size > 0
        for name, value in final.items():
            assert torch.equal(value, other_final[name]), name


def test_a_run_on_the_cpu_refuses_it() -> None:
    with pytest.raises(ConfigError, match="cpu_offloading=True needs a CUDA device; the device is cpu"):
        make_trainer(t0_flags("unused", cpu_offloading=True, cpu_offloading_num_layers=2))
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        gradients("T0", 2, ActivationOffload())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cpu_offloading": True}, "needs cpu_offloading_num_layers"),
        ({"cpu_offloading_num_layers": 2}, "only used with cpu_offloading=True"),
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 5}, "above num_layers=4"),
        (
            {
                "cpu_offloading": True, "cpu_offloading_num_layers": 2, "recompute_granularity": "full", "recompute_method": "block",
                "recompute_num_layers": 1,
            },
            "excludes recompute_granularity=full",
        ),
    ],
)  # fmt: skip
def test_impossible_combinations_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        t0_transformer_config(**options)
