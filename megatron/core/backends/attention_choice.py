"""Which attention backend a model gets: the one asked for, or the first usable one, with the reasons in one log line."""

import functools
import logging

import torch

from megatron.core.backends.base import AttentionBackend
from megatron.core.backends.flash_attention import FlashAttention
from megatron.core.backends.torch_backend import FlexAttention, TorchAttention, UnfusedAttention
from megatron.core.backends.transformer_engine import TransformerEngineAttention
from megatron.core.errors import ConfigError
from megatron.core.transformer.transformer_config import TransformerConfig

logger = logging.getLogger(__name__)

ATTENTION_BACKENDS: dict[str, type[AttentionBackend]] = {
    "torch": TorchAttention,
    "flex": FlexAttention,
    "unfused": UnfusedAttention,
    "flash": FlashAttention,
    "te": TransformerEngineAttention,
}
AUTOMATIC_ORDER = ("flash", "te", "torch")


def choose_attention_backend(config: TransformerConfig, device: torch.device) -> AttentionBackend:
    """The backend for config.attention_backend on `device`.

    Raises ConfigError when the one asked for cannot run; "auto" takes the first of AUTOMATIC_ORDER that can.
    """
    if config.attention_backend != "auto":
        backend = ATTENTION_BACKENDS[config.attention_backend]
        reason = backend.supports(config, device)
        if reason is not None:
            raise ConfigError(f"attention_backend={config.attention_backend} cannot be used: {reason}; use auto or torch")
        return backend(config)
    reasons: list[str] = []
    for name in AUTOMATIC_ORDER:
        reason = ATTENTION_BACKENDS[name].supports(config, device)
        if reason is None:
            _log_once(f"attention backend: {name}" + (f" ({'; '.join(reasons)})" if reasons else ""))
            return ATTENTION_BACKENDS[name](config)
        reasons.append(reason)
    raise AssertionError("the torch backend supports everything")


@functools.cache
def _log_once(text: str) -> None:
    logger.info(text)
