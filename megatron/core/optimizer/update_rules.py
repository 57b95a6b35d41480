"""Update rules: AdamW and SGD on lists of flat tensors, with a state layout that doesn't depend on the kernel."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from megatron.core.backends.fused_adam import AdamArguments, choose_adam_kernel
from megatron.core.optimizer.optimizer_config import OptimizerConfig


class UpdateRule(Protocol):
    """How main params follow from gradients. Its states are zero at first."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the kept tensors."""
        ...

    def hyperparameters(self) -> dict[str, Any]:
        """JSON-able entries for each parameter group."""
        ...

    def update(
        self,
        mains: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Mapping[str, Sequence[torch.Tensor]],
        group: Mapping[str, Any],
        divisor: float,
    ) -> None:
        """Update `mains` and `states` in place.

        group: lr, weight_decay, step (counts from 1, this update included). divisor: gradients are divided by it first; they
        may be overwritten.
        """
        ...


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), the maths of `torch.optim.AdamW`."""

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: OptimizerConfig, device: torch.device) -> None:
        self.betas, self.eps = (config.adam_beta1, config.adam_beta2), config.adam_eps
        self.kernel_name, self.kernel = choose_adam_kernel(config.optimizer_backend, device)

    def hyperparameters(self) -> dict[str, Any]:
        """betas and eps."""
        return {"betas": list(self.betas), "eps": self.eps}

    def update(
        self,
        mains: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Mapping[str, Sequence[torch.Tensor]],
        group: Mapping[str, Any],
        divisor: float,
    ) -> None:
        """One AdamW step."""
        beta1, beta2 = self.betas
        arguments = AdamArguments(group["lr"], beta1, beta2, self.eps, group["weight_decay"], group["step"], divisor)
        self.kernel(mains, grads, states["exp_avg"], states["exp_avg_sq"], arguments)


class SGD:
    """`torch.optim.SGD`: momentum without dampening; weight decay is added to the gradient."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.momentum = config.sgd_momentum
        self.state_names: tuple[str, ...] = ("momentum_buffer",) if self.momentum else ()

    def hyperparameters(self) -> dict[str, Any]:
        """momentum."""
        return {"momentum": self.momentum}

    def update(
        self,
        mains: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Mapping[str, Sequence[torch.Tensor]],
        group: Mapping[str, Any],
        divisor: float,
    ) -> None:
        """One SGD step. A zero momentum buffer gives the same first step as none."""
        torch._fused_sgd_(
            list(mains),
            list(grads),
            list(states["momentum_buffer"]) if self.momentum else [],
            weight_decay=group["weight_decay"],
            momentum=self.momentum,
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=None if divisor == 1.0 else torch.tensor(divisor, dtype=torch.float32, device=mains[0].device),
            found_inf=None,
        )


def build_update_rule(config: OptimizerConfig, device: torch.device) -> UpdateRule:
    """The rule that `config.optimizer` names (checked there)."""
    return AdamW(config, device) if config.optimizer == "adam" else SGD(config)
