"""Linear layers put their weights' gradients straight into the gradient buffer: the same bits as through autograd."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.param_init import ZEROS
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear


class Twice(torch.nn.Module):
    """One layer with bias, used twice, and one that is only used in even calls."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.shared, self.sometimes = self._linear(bias=True), self._linear(bias=False)
        self.calls = 0

    @staticmethod
    def _linear(bias: bool) -> ColumnParallelLinear:
        groups = ProcessGroupCollection.single_process()
        layer = ColumnParallelLinear(
            24, 24, rule=ZEROS, bias=bias, dtype=torch.float32, device=None, pg_collection=groups
        )
        with torch.no_grad():
            for param in layer.parameters():
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(param.dim())))
        return layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.recompute:
            hidden = checkpoint(self._twice, hidden, use_reentrant=False)
        else:
            hidden = self._twice(hidden)
        return self.sometimes(hidden) if self.calls % 2 == 0 else hidden

    def _twice(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.shared(torch.tanh(self.shared(hidden)))


def main_grads(fusion: bool, microbatches: int, overwrite: bool, recompute: bool = False) -> dict[str, torch.Tensor]:
    """Gradients of two steps (the second one's are returned)."""
    groups = ProcessGroupCollection.single_process()
    config = ModelParallelConfig(gradient_accumulation_fusion=fusion)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), Twice(recompute), pg_collection=groups)
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        ddp.zero_grad_buffer(overwrite)
        for _ in range(microbatches):
            ddp(torch.randn(7, 3, 24, generator=generator)).square().sum().backward()
        assert all(param.grad is None for param in ddp.parameters())
    return {name: param.main_grad.clone() for name, param in ddp.module.named_parameters()}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_have_the_same_bits_with_and_without_fusion(microbatches: int, overwrite: bool) -> None:
    plain, fused = (main_grads(fusion, microbatches, overwrite) for fusion in (False, True))
    for name, grad in plain.items():
        # A weight that is used twice adds its two products to the sum one by one: exact only for the first microbatch.
        if microbatches == 1 or not name.startswith("shared.weight"):
            assert torch.equal(fused[name], grad), name
        else:
            torch.testing.assert_close(fused[name], grad, rtol=1e-5, atol=1e-5 * float(grad.abs().max()))
    assert fused["sometimes.weight"].abs().sum() > 0


def test_recomputation_leaves_the_gradients_alone() -> None:
    plain, recomputed = (main_grads(True, 1, True, recompute) for recompute in (False, True))
    for name, grad in plain.items():
        assert torch.equal(recomputed[name], grad), name


def test_a_weight_that_takes_no_part_in_the_second_step_has_a_zero_gradient() -> None:
    groups = ProcessGroupCollection.single_process()
    ddp = DistributedDataParallel(ModelParallelConfig(), DistributedDataParallelConfig(), Twice(), pg_collection=groups)
    for call in range(3):
        ddp.zero_grad_buffer(overwrite=True)
        ddp(torch.ones(2, 24)).sum().backward()
        ddp.finish_grad_sync()
        grad = ddp.module.sometimes.weight.main_grad
        assert bool(grad.any()) == (call == 1)


class FreshProducts(TorchDispatchMode):
    """Counts matrix products that went into a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_no_product_of_the_backward_goes_into_a_tensor_of_its_own() -> None:
    groups = ProcessGroupCollection.single_process()
    counted: dict[bool, int] = {}
    for fusion in (False, True):
        config = ModelParallelConfig(gradient_accumulation_fusion=fusion)
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), Twice._linear(False), pg_collection=groups)
        ddp.zero_grad_buffer(overwrite=True)
        loss = ddp(torch.ones(2, 24)).sum()
        with FreshProducts() as products:
            loss.backward()
        counted[fusion] = products.count
    assert counted == {False: 1, True: 0}
