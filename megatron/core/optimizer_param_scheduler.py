"""OptimizerParamScheduler: learning rate and weight decay as functions of the samples consumed (Megatron's semantic).

        lr
    max |     ______
        |    /      \\___
        |   /           \\___
    min |  /                \\________
        +--|-------|---------|-------> samples
          warm-up  decay ... lr_decay_steps

Everything is counted in samples, so a batch-size ramp or another data-parallel size changes nothing.
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol

from megatron.core.errors import ConfigError

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


class HasParamGroups(Protocol):
    """What the scheduler needs of an optimizer: the live parameter groups, read anew at each step."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class OptimizerParamScheduler:
    """Writes `lr` and `weight_decay` into the optimizer's parameter groups.

    Args:
        optimizer: owner of `param_groups`. A group's `max_lr` and `min_lr` replace the scheduler's (separate learning rate of
            embedding and output), `lr_mult` and `wd_mult` scale the result.
        init_lr: learning rate at 0 samples of the warm-up.
        max_lr, min_lr: ends of the decay.
        lr_warmup_steps, lr_decay_steps: in samples; the decay length includes the warm-up.
        lr_decay_style: constant, linear, cosine, inverse-square-root, WSD.
        start_wd, end_wd, wd_incr_steps, wd_incr_style: constant, linear or cosine way of weight decay from start to end.
        use_checkpoint_opt_param_scheduler: `load_state_dict` takes every value from the checkpoint.
        override_opt_param_scheduler: `load_state_dict` takes only the position from the checkpoint.
        wsd_decay_steps, lr_wsd_decay_style: length (samples) and shape of WSD's final annealing.

    Raises ConfigError for contradictory values.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = False,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.init_lr, self.max_lr, self.min_lr = float(init_lr), float(max_lr), float(min_lr)
        self.lr_warmup_steps, self.lr_decay_steps, self.lr_decay_style = lr_warmup_steps, lr_decay_steps, lr_decay_style
        self.start_wd, self.end_wd = float(start_wd), float(end_wd)
        self.wd_incr_steps, self.wd_incr_style = wd_incr_steps, wd_incr_style
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self.wsd_decay_steps, self.lr_wsd_decay_style = wsd_decay_steps, lr_wsd_decay_style
        self.num_steps = 0
        self._check()
        self.step(0)

    def step(self, increment: int) -> None:
        """Advance by `increment` samples and write the new values into the groups."""
        self.num_steps += increment
        weight_decay = self.get_wd()
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group) * group.get("lr_mult", 1.0)
            group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        """Learning rate of a group at the current position, before `lr_mult`."""
        max_lr = param_group.get("max_lr", self.max_lr)
        min_lr = param_group.get("min_lr", self.min_lr)
        at = self.num_steps
        if self.lr_warmup_steps > 0 and at <= self.lr_warmup_steps:
            return self.init_lr + (max_lr - self.init_lr) * at / self.lr_warmup_steps
        if self.lr_decay_style == "constant":
            return max_lr
        if at > self.lr_decay_steps or self.lr_decay_steps <= self.lr_warmup_steps:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(min_lr, max_lr * math.sqrt(max(self.lr_warmup_steps, 1)) / math.sqrt(max(at, 1)))
        return min_lr + self._decay_coefficient() * (max_lr - min_lr)

    def get_wd(self) -> float:
        """Weight decay at the current position, before `wd_mult`."""
        if self.wd_incr_style == "constant" or self.num_steps >= self.wd_incr_steps:
            return self.end_wd
        ratio = self.num_steps / self.wd_incr_steps
        coefficient = ratio if self.wd_incr_style == "linear" else 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
        return self.start_wd + coefficient * (self.end_wd - self.start_wd)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the position and the values that shape the curve."""
        return {"num_steps": self.num_steps, **{name: getattr(self, name) for name in _CURVE}, **self._decoupled()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the saved position.

        The values that shape the curve (with a constant rate the length of the decay does not, so such a run may be prolonged)
        must equal the saved ones, except with `override_opt_param_scheduler` (this configuration's are
        kept) or `use_checkpoint_opt_param_scheduler` (the saved ones are taken). Raises ConfigError naming each difference.
        """
        if not self.override_opt_param_scheduler:
            own = {**{name: getattr(self, name) for name in self._effective_curve()}, **self._decoupled()}
            different = {name: state_dict[name] for name in own if name in state_dict and state_dict[name] != own[name]}
            if different and not self.use_checkpoint_opt_param_scheduler:
                raise ConfigError(
                    "; ".join(f"{name} is {own[name]!r} but the checkpoint has {value!r}" for name, value in different.items())
                    + "; set override_opt_param_scheduler=True to take this configuration's schedule, or restore the old values"
                )
            for name, value in different.items():
                self._set(name, value)
        self.num_steps = 0
        self.step(int(state_dict["num_steps"]))

    def _effective_curve(self) -> list[str]:
        """The fields of `_CURVE` that have an effect with the styles in use."""
        idle = set()
        if self.lr_decay_style == "constant":
            idle |= {"lr_decay_steps", "min_lr"}
        if self.lr_decay_style != "WSD":
            idle |= {"wsd_decay_steps", "lr_wsd_decay_style"}
        if self.wd_incr_style == "constant":
            idle |= {"wd_incr_steps", "start_wd"}
        return [name for name in _CURVE if name not in idle]

    def _decay_coefficient(self) -> float:
        ratio = (self.num_steps - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)
        if self.lr_decay_style == "linear":
            return 1.0 - ratio
        if self.lr_decay_style == "cosine":
            return 0.5 * (math.cos(math.pi * ratio) + 1.0)
        assert self.wsd_decay_steps is not None
        anneal_start = self.lr_decay_steps - self.wsd_decay_steps
        if self.num_steps <= anneal_start:
            return 1.0
        ratio = (self.num_steps - anneal_start) / self.wsd_decay_steps
        if self.lr_wsd_decay_style == "linear":
            return 1.0 - ratio
        if self.lr_wsd_decay_style == "cosine":
            return 0.5 * (math.cos(math.pi * ratio) + 1.0)
        if self.lr_wsd_decay_style == "minus_sqrt":
            return 1.0 - math.sqrt(ratio)
        return 2.0 * math.pow(0.5, ratio) - 1.0

    def _decoupled(self) -> dict[str, Any]:
        """The separate learning rate of embedding and output, kept with the schedule since it shapes a curve as well."""
        for group in self.optimizer.param_groups:
            if group.get("is_decoupled_lr"):
                return {"decoupled_max_lr": group["max_lr"], "decoupled_min_lr": group["min_lr"]}
        return {}

    def _set(self, name: str, value: Any) -> None:
        if not name.startswith("decoupled_"):
            setattr(self, name, value)
            return
        for group in self.optimizer.param_groups:
            if group.get("is_decoupled_lr"):
                group[name.removeprefix("decoupled_")] = value

    def _check(self) -> None:
        problems = []
        if not 0.0 <= self.min_lr <= self.max_lr:
            problems.append(f"min_lr={self.min_lr:g} must be between 0 and lr={self.max_lr:g}")
        if self.init_lr > self.max_lr:
            problems.append(f"lr_warmup_init={self.init_lr:g} is above lr={self.max_lr:g}")
        if self.lr_warmup_steps < 0 or self.lr_decay_steps < 0 or self.wd_incr_steps < 0:
            problems.append("warm-up, decay and weight-decay lengths must be at least 0 samples")
        if self.lr_decay_style not in DECAY_STYLES:
            problems.append(f"lr_decay_style={self.lr_decay_style!r} must be one of {', '.join(DECAY_STYLES)}")
        if self.wd_incr_style not in ("constant", "linear", "cosine"):
            problems.append(f"weight_decay_incr_style={self.wd_incr_style!r} must be constant, linear or cosine")
        if not 0.0 <= self.start_wd <= self.end_wd:
            problems.append(f"start_weight_decay={self.start_wd:g} must be between 0 and end_weight_decay={self.end_wd:g}")
        if self.wd_incr_style == "constant" and self.start_wd != self.end_wd:
            problems.append("weight_decay_incr_style=constant needs start_weight_decay equal to end_weight_decay")
        if self.lr_decay_style == "WSD":
            if self.wsd_decay_steps is None or self.wsd_decay_steps < 1:
                problems.append("lr_decay_style=WSD needs lr_wsd_decay_iters or lr_wsd_decay_samples of at least 1")
            if self.lr_wsd_decay_style not in WSD_STYLES:
                problems.append(f"lr_wsd_decay_style={self.lr_wsd_decay_style!r} must be one of {', '.join(WSD_STYLES)}")
        if problems:
            raise ConfigError("; ".join(problems))


_CURVE = (
    "init_lr",
    "max_lr",
    "min_lr",
    "lr_warmup_steps",
    "lr_decay_steps",
    "lr_decay_style",
    "start_wd",
    "end_wd",
    "wd_incr_steps",
    "wd_incr_style",
    "wsd_decay_steps",
    "lr_wsd_decay_style",
)
