"""Update rules on lists of flat tensors, element by element: Adam, SGD, Lion. The state's layout doesn't depend on the kernel.

`rule_name` chooses a parameter's rule, as `OptimizerConfig.optimizer` says. Muon works on whole matrices: see `matrix_round`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from megatron.core.backends.fused_adam import AdamArguments, choose_adam_kernel, kernel_divisor
from megatron.core.optimizer.muon import Muon
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.param_meta import param_meta

_BATCH = 1 << 16  # elements that several kernels in a row work on, so that they stay in the cache


class Rule(Protocol):
    """What a rule keeps; its states are zero at first."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the kept tensors."""
        ...

    def hyperparameters(self) -> dict[str, Any]:
        """JSON-able entries for each parameter group."""
        ...


@runtime_checkable
class UpdateRule(Rule, Protocol):
    """How main params follow from gradients, element by element."""

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


class Adam:
    """Adam (Kingma and Ba, 2015), the maths of `torch.optim.AdamW` (Loshchilov and Hutter, 2019) or, with a weight decay that
    is added to the gradient, of `torch.optim.Adam`."""

    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: OptimizerConfig, device: torch.device) -> None:
        self.betas, self.eps, self.decoupled = (config.adam_beta1, config.adam_beta2), config.adam_eps, config.decoupled_weight_decay
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
        """One step."""
        decay, (beta1, beta2) = group["weight_decay"], self.betas
        arguments = AdamArguments(group["lr"], beta1, beta2, self.eps, decay, group["step"], divisor, self.decoupled)
        self.kernel(mains, grads, states["exp_avg"], states["exp_avg_sq"], arguments)


class SGD:
    """`torch.optim.SGD`: momentum without dampening; weight decay is added to the gradient."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.momentum = config.sgd_momentum
        self.state_names = state_names(config, "sgd")

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
            grad_scale=kernel_divisor(grads, divisor),
            found_inf=None,
        )


class Lion:
    """Lion (Chen et al., 2023, arXiv 2302.06675, algorithm 2): the sign of an interpolated momentum, decoupled weight decay."""

    state_names: tuple[str, ...] = ("exp_avg",)

    def __init__(self, config: OptimizerConfig) -> None:
        self.betas = (config.lion_beta1, config.lion_beta2)

    def hyperparameters(self) -> dict[str, Any]:
        """betas."""
        return {"betas": list(self.betas)}

    def update(
        self,
        mains: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Mapping[str, Sequence[torch.Tensor]],
        group: Mapping[str, Any],
        divisor: float,
    ) -> None:
        """One step: main -= lr x (sign(beta1 m + (1 - beta1) g) + weight_decay x main); m = beta2 m + (1 - beta2) g."""
        lr, (beta1, beta2) = group["lr"], self.betas
        for main, grad, momentum in _batches(mains, grads, states["exp_avg"]):
            if divisor != 1.0:
                torch._foreach_div_(grad, divisor)
            direction = torch._foreach_mul(momentum, beta1)
            torch._foreach_add_(direction, grad, alpha=1.0 - beta1)
            torch._foreach_sign_(direction)
            torch._foreach_mul_(main, 1.0 - lr * group["weight_decay"])
            torch._foreach_add_(main, direction, alpha=-lr)
            torch._foreach_mul_(momentum, beta2)
            torch._foreach_add_(momentum, grad, alpha=1.0 - beta2)


def _batches(*lists: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], ...]]:
    """The tensors of parallel lists in batches of about `_BATCH` elements; a longer tensor is cut into views."""
    batch: list[tuple[torch.Tensor, ...]] = []
    held = 0
    for tensors in zip(*lists, strict=True):
        for start in range(0, tensors[0].numel(), _BATCH):
            batch.append(tuple(tensor[start : start + _BATCH] for tensor in tensors))
            held += batch[-1][0].numel()
            if held >= _BATCH:
                yield tuple(list(column) for column in zip(*batch, strict=True))
                batch, held = [], 0
    if batch:
        yield tuple(list(column) for column in zip(*batch, strict=True))


def rule_name(config: OptimizerConfig, param: torch.Tensor) -> str:
    """Which of `build_update_rules` updates the parameter."""
    if config.optimizer != "muon":
        return config.optimizer
    meta = param_meta(param)
    table = meta.is_embedding_or_output or meta.shared_embedding or meta.is_table
    return "muon" if param.dim() == 2 and not table else config.muon_scalar_optimizer


def state_names(config: OptimizerConfig, rule: str) -> tuple[str, ...]:
    """What a rule keeps beside the main params, one value per element each."""
    if rule == "sgd":
        return ("momentum_buffer",) if config.sgd_momentum else ()
    return {"adam": Adam.state_names, "lion": Lion.state_names, "muon": Muon.state_names}[rule]


def build_update_rules(config: OptimizerConfig, device: torch.device) -> dict[str, Rule]:
    """The rules that `config.optimizer` (checked there) needs, by name."""
    names = ("muon", config.muon_scalar_optimizer) if config.optimizer == "muon" else (config.optimizer,)
    makers: dict[str, Callable[[], Rule]] = {
        "adam": lambda: Adam(config, device),
        "sgd": lambda: SGD(config),
        "lion": lambda: Lion(config),
        "muon": lambda: Muon(config),
    }
    return {name: makers[name]() for name in names}
