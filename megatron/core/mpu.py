"""Facade: `megatron.core.mpu` is `megatron.core.parallel_state`, as Megatron users know it."""

from megatron.core.parallel_state import *  # noqa: F403
