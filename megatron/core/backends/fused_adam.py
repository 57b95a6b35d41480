"""Adam kernels on lists of tensors, behind one call: torch's fused one, Apex's, Transformer Engine's.

All read and write the same state (exp_avg, exp_avg_sq, fp32; the step is given), so a checkpoint doesn't know which one ran.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core.backends.apex import apex_fused_adam
from megatron.core.backends.optional import probe
from megatron.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class AdamArguments:
    """Scalars of one Adam update. grads are divided by `divisor` first; `step` counts from 1.

    decoupled: weight decay acts on the parameter (AdamW), else it is added to the gradient.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    divisor: float
    decoupled: bool = True


Tensors = Sequence[torch.Tensor]
AdamKernel = Callable[[Tensors, Tensors, Tensors, Tensors, AdamArguments], None]
"""kernel(params, grads, exp_avgs, exp_avg_sqs, arguments): in place; grads may be overwritten by their scaled values."""


def choose_adam_kernel(choice: str, device: torch.device) -> tuple[str, AdamKernel]:
    """(name, kernel) for `optimizer_backend`: auto, te, apex or torch.

    auto: on CUDA Transformer Engine, Apex, torch in this order; on CPU torch. Raises ConfigError, with the reason, if a package
    was asked for by name and can't be used.
    """
    if choice == "torch" or (choice == "auto" and device.type != "cuda"):
        return "torch", torch_adam
    for name in ("te", "apex") if choice == "auto" else (choice,):
        found, reason = (_transformer_engine_fused_adam if name == "te" else apex_fused_adam)()
        if found is not None:
            return name, _multi_tensor_kernel(found, _APPLIERS[name])
        if choice != "auto":
            raise ConfigError(f"optimizer_backend={choice} can't be used ({reason}); use auto or torch")
    return "torch", torch_adam


def torch_adam(params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, arguments: AdamArguments) -> None:
    """torch's fused kernels, those behind `torch.optim.AdamW(fused=True)` and `torch.optim.Adam(fused=True)`; divide the gradients on the way."""
    device = params[0].device
    step = torch.tensor(float(arguments.step), dtype=torch.float32, device=device)
    divisor = kernel_divisor(grads, arguments.divisor)
    kernel = torch._fused_adamw_ if arguments.decoupled else torch._fused_adam_
    kernel(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        [step] * len(params),
        lr=arguments.lr,
        beta1=arguments.beta1,
        beta2=arguments.beta2,
        weight_decay=arguments.weight_decay,
        eps=arguments.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
        found_inf=None,
    )


def kernel_divisor(grads: Tensors, divisor: float) -> torch.Tensor | None:
    """`grad_scale` of a fused kernel of torch: fp32 whatever the gradients' dtype, so fp64 gradients are divided here instead."""
    if divisor == 1.0:
        return None
    if grads[0].dtype == torch.float64:
        torch._foreach_div_(list(grads), divisor)
        return None
    return torch.tensor(divisor, dtype=torch.float32, device=grads[0].device)


def _transformer_engine_fused_adam() -> tuple[type[Any] | None, str | None]:
    """(transformer_engine's FusedAdam, None), or (None, reason). The kernel itself is tried by constructing it on one CUDA element."""
    if not torch.cuda.is_available():
        return None, "Transformer Engine's FusedAdam needs a CUDA device"
    found = probe("transformer_engine.pytorch.optimizers")
    if found.module is None:
        return None, f"transformer_engine: {found.reason}"
    try:
        found.module.FusedAdam([torch.nn.Parameter(torch.zeros(1, device="cuda"))])
    except Exception as error:
        return None, f"transformer_engine: {type(error).__name__}: {error}"
    return found.module.FusedAdam, None


_APPLIERS = {"te": "transformer_engine.pytorch.optimizers", "apex": "apex.multi_tensor_apply"}


def _multi_tensor_kernel(optimizer_class: type[Any], applier_module: str) -> AdamKernel:
    """The multi-tensor kernel inside an Apex-style FusedAdam, without its parameter groups."""
    holder = optimizer_class([torch.nn.Parameter(torch.zeros(1, device="cuda"))], adam_w_mode=True)
    module = probe(applier_module).module
    assert module is not None, f"{applier_module} is missing beside {optimizer_class}"
    apply, kernel = module.multi_tensor_applier, holder.multi_tensor_adam
    overflow = torch.zeros(1, dtype=torch.int, device="cuda")

    def update(params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, arguments: AdamArguments) -> None:
        if arguments.divisor != 1.0:
            torch._foreach_div_(list(grads), arguments.divisor)
        lists = [list(grads), list(params), list(exp_avgs), list(exp_avg_sqs)]
        apply(
            kernel,
            overflow,
            lists,
            arguments.lr,
            arguments.beta1,
            arguments.beta2,
            arguments.eps,
            arguments.step,
            int(arguments.decoupled),
            1,  # bias correction
            arguments.weight_decay,
        )

    return update
