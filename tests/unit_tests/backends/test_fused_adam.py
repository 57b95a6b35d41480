"""Which Adam kernel is taken, and that it gets the right arguments: with stand-ins for the packages that need CUDA."""

import dataclasses
import sys
import types

import pytest
import torch

from megatron.core.backends.fused_adam import AdamArguments, choose_adam_kernel
from megatron.core.backends.optional import probe
from megatron.core.errors import ConfigError

CUDA = torch.device("cuda")
ARGUMENTS = AdamArguments(lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, step=3, divisor=4.0)


def package(calls, broken=False):
    """A module with the two names that both packages have; its kernel is the formula, one tensor at a time."""

    class FusedAdam:
        def __init__(self, params, adam_w_mode=True):
            if broken:
                raise RuntimeError("no CUDA extension")

        @staticmethod
        def multi_tensor_adam(overflow, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay):
            calls.append((mode, bias_correction))
            for g, p, m, v in zip(*lists, strict=True):
                if not mode:
                    g = g + weight_decay * p
                m.mul_(beta1).add_(g, alpha=1 - beta1)
                v.mul_(beta2).add_(g * g, alpha=1 - beta2)
                update = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps)
                p.sub_(lr * (update + weight_decay * p if mode else update))

    def multi_tensor_applier(kernel, overflow, lists, *arguments):
        kernel(overflow, lists, *arguments)

    return {"FusedAdam": FusedAdam, "multi_tensor_applier": multi_tensor_applier}


@pytest.fixture
def install(monkeypatch):
    """A function that makes stand-ins for packages importable, on a machine that seems to have CUDA."""
    real = torch.zeros
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **kwargs: real(*size, **kwargs))
    probe.cache_clear()

    def put(package_name, calls, broken=False):
        probe.cache_clear()
        names = {"te": ["transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"],
                 "apex": ["apex", "apex.optimizers", "apex.multi_tensor_apply"]}[package_name]  # fmt: skip
        for name in names:
            module = types.ModuleType(name)
            module.__dict__.update(package(calls, broken))
            monkeypatch.setitem(sys.modules, name, module)
        probe.cache_clear()

    yield put
    probe.cache_clear()


def test_on_cuda_the_order_is_transformer_engine_apex_torch(install):
    assert choose_adam_kernel("auto", CUDA)[0] == "torch"
    install("apex", [])
    assert choose_adam_kernel("auto", CUDA)[0] == "apex"
    install("te", [])
    assert choose_adam_kernel("auto", CUDA)[0] == "te"
    assert choose_adam_kernel("apex", CUDA)[0] == "apex"
    assert choose_adam_kernel("torch", CUDA)[0] == "torch"
    assert choose_adam_kernel("auto", torch.device("cpu"))[0] == "torch"


def test_a_package_whose_extension_is_missing_is_passed_over_and_named_when_asked_for(install):
    install("te", [], broken=True)
    install("apex", [])
    assert choose_adam_kernel("auto", CUDA)[0] == "apex"
    with pytest.raises(ConfigError, match=r"optimizer_backend=te can't be used .*no CUDA extension"):
        choose_adam_kernel("te", CUDA)
    install("apex", [], broken=True)
    assert choose_adam_kernel("auto", CUDA)[0] == "torch"


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("name", ["te", "apex"])
def test_packages_take_the_step_that_torch_takes(install, name, decoupled):
    calls = []
    install(name, calls)
    generator = torch.Generator().manual_seed(0)
    values = [[torch.rand(40, generator=generator, dtype=torch.float64) for _ in range(2)] for _ in range(4)]
    arguments = dataclasses.replace(ARGUMENTS, decoupled=decoupled, divisor=0.3)  # no fp32 number
    results = []
    for choice in (name, "torch"):
        lists = [[tensor.clone() for tensor in row] for row in values]
        choose_adam_kernel(choice, CUDA)[1](*lists, arguments)
        results.append([lists[0], lists[2], lists[3]])
    assert calls == [(int(decoupled), 1)]
    for ours, torchs in zip(*results, strict=True):
        for one, other in zip(ours, torchs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)
