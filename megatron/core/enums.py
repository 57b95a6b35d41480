"""Enumerations shared by all layers, under Megatron's names."""

from enum import Enum, StrEnum


class ModelType(Enum):
    """Kinds of model that the training loop knows."""

    encoder_or_decoder = 1


class AttnMaskType(Enum):
    """Which key positions a query may see."""

    causal = 1
    no_mask = 2
    document_causal = 3  # causal, and never into another document of the packed sample


class PositionEmbeddingType(StrEnum):
    """How positions enter the model."""

    learned_absolute = "learned_absolute"
    rope = "rope"
    none = "none"
