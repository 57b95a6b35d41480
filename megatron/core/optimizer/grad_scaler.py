"""Loss scales: a constant one, and the dynamic one that fp16 needs (halved on overflow, doubled after a quiet window)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from megatron.core.errors import ConfigError
from megatron.core.optimizer.optimizer_config import OptimizerConfig


class MegatronGradScaler(ABC):
    """The factor on the loss, kept on every rank alike.

    spent: after an overflow that no smaller scale will follow, why none will; else None.
    """

    def __init__(self, initial_scale: float) -> None:
        if initial_scale <= 0.0:
            raise ConfigError(f"the initial loss scale must be greater than 0, got {initial_scale:g}")
        self.value = float(initial_scale)
        self.spent: str | None = None

    @property
    def scale(self) -> torch.Tensor:
        """fp32 tensor [1]."""
        return torch.tensor([self.value], dtype=torch.float32)

    @property
    def inv_scale(self) -> torch.Tensor:
        """fp32 tensor [1]."""
        return torch.tensor([1.0 / self.value], dtype=torch.float32)

    @abstractmethod
    def update(self, found_inf: bool) -> None:
        """Tell the scaler whether any rank's gradients of this step overflowed."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""


class ConstantGradScaler(MegatronGradScaler):
    """Never changes; a checkpoint does not change it either."""

    def update(self, found_inf: bool) -> None:
        """Nothing to adapt."""
        self.spent = f"the loss scale is constant (loss_scale={self.value:g})" if found_inf else None

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Nothing to take."""


class DynamicGradScaler(MegatronGradScaler):
    """Megatron's rule.

    Args:
        initial_scale, min_scale: first and smallest scale.
        growth_factor, growth_interval: multiply by the factor after so many steps without overflow.
        backoff_factor, hysteresis: multiply by the factor at an overflow, once `hysteresis` of them came since the last growth.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int,
    ) -> None:
        super().__init__(initial_scale)
        if not 0.0 < min_scale <= initial_scale:
            raise ConfigError(f"min_loss_scale={min_scale:g} must be above 0 and <= initial_loss_scale={initial_scale:g}")
        if growth_factor <= 1.0 or not 0.0 < backoff_factor < 1.0 or growth_interval < 1 or hysteresis < 1:
            raise ConfigError("growth_factor > 1, 0 < backoff_factor < 1, loss_scale_window >= 1, hysteresis >= 1 are needed")
        self.min_scale, self.growth_factor, self.backoff_factor = min_scale, growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self._growth_tracker, self._hysteresis_tracker = 0, hysteresis

    def update(self, found_inf: bool) -> None:
        """Adapt the scale."""
        self.spent = None
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                if self.value <= self.min_scale:
                    self.spent = f"the loss scale is at its minimum (min_loss_scale={self.min_scale:g})"
                self.value = max(self.value * self.backoff_factor, self.min_scale)
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self._growth_tracker, self._hysteresis_tracker = 0, self.hysteresis
            self.value *= self.growth_factor

    def state_dict(self) -> dict[str, Any]:
        """Scale and both counters."""
        return {"scale": self.value, "growth_tracker": self._growth_tracker, "hysteresis_tracker": self._hysteresis_tracker}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the saved scale; a checkpoint of a run without dynamic scaling has none and changes nothing."""
        if state_dict:
            self.value = float(state_dict["scale"])
            self._growth_tracker = int(state_dict["growth_tracker"])
            self._hysteresis_tracker = int(state_dict["hysteresis_tracker"])


def build_grad_scaler(config: OptimizerConfig) -> MegatronGradScaler:
    """Constant where `loss_scale` is set or the precision needs none; dynamic for fp16."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return ConstantGradScaler(1.0)
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
