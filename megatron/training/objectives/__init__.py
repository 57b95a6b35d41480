"""Objectives by name."""

from megatron.training.objectives.base import ModelBatch, Objective
from megatron.training.objectives.causal_lm import CausalLM

OBJECTIVES: dict[str, type[Objective]] = {"causal_lm": CausalLM}

__all__ = ["OBJECTIVES", "CausalLM", "ModelBatch", "Objective"]
