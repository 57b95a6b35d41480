"""Steps on given gradients, the same on every rank: what tells update rules apart from everything else."""

import torch

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.optimizer.toy import Toy, build


def given_grads(module, steps, dtype):
    """A name -> gradient per step."""
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    generator = torch.Generator().manual_seed(7)
    return [
        {name: torch.randn(param.shape, generator=generator, dtype=torch.float64).to(dtype) for name, param in named}
        for _ in range(steps)
    ]


def step_with(model, optimizer, gradient):
    """One step with these values as the reduced gradients."""
    model.zero_grad_buffer()
    for param, name in model.param_to_name.items():
        param.main_grad.copy_(gradient[name])
    assert optimizer.step()[0]


def train_given(ddp, opt, steps, dtype=torch.float64, module=None, conditions=None, groups=None):
    """(parameters, this rank's states by name) after `steps` steps of the engine, clipping off."""
    module = module or Toy(dtype)
    opt = {"clip_grad": 0.0, **opt}
    model, optimizer = build(ddp, opt, dtype, module=module, groups=groups)
    if conditions:
        config = OptimizerConfig(**{"weight_decay": 0.1, "lr": 1e-2, **opt}, use_distributed_optimizer=bool(ddp))
        optimizer = get_megatron_optimizer(config, [model], **conditions)
    for gradient in given_grads(module, steps, dtype):
        step_with(model, optimizer, gradient)
    optimizer.finish_param_sync()
    params = {name: param.detach().clone() for name, param in module.named_parameters() if param.requires_grad}
    states = {main.name: {key: value.clone() for key, value in main.state.items()} for main in optimizer.main_params()}
    return params, states
