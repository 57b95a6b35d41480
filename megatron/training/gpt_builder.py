"""Builds the GPT model of a run: sizes from the configuration, frozen parameters, compiled layers."""

import difflib
import fnmatch
from collections.abc import Callable, Sequence

import torch

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.config.run_config import RunConfig


def build_gpt_model(
    config: RunConfig,
    *,
    vocab_size: int,
    device: torch.device,
    pg_collection: ProcessGroupCollection | None = None,
    pre_process: bool = True,
    post_process: bool = True,
) -> GPTModel:
    """The model on `device`, initialised from config.training.seed, with training.freeze and model.torch_compile applied.

    vocab_size: true vocabulary size (the tokenizer's). Raises ConfigError for a size, backend or freeze pattern that does not fit.
    """
    model = GPTModel(
        config.transformer_config(),
        vocab_size=vocab_size,
        max_sequence_length=config.model.max_position_embeddings or config.data.seq_length,
        seed=config.training.seed,
        pg_collection=pg_collection,
        pre_process=pre_process,
        post_process=post_process,
        device=device,
    )
    freeze_parameters(model, config.training.freeze)
    if config.model.torch_compile:
        compile_layers(model)
    return model


def model_provider(
    config: RunConfig, *, vocab_size: int, device: torch.device, pg_collection: ProcessGroupCollection | None = None
) -> Callable[[bool, bool], GPTModel]:
    """Megatron's `model_provider(pre_process, post_process)` for this configuration."""

    def provide(pre_process: bool = True, post_process: bool = True) -> GPTModel:
        return build_gpt_model(
            config,
            vocab_size=vocab_size,
            device=device,
            pg_collection=pg_collection,
            pre_process=pre_process,
            post_process=post_process,
        )

    return provide


def freeze_parameters(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Stop training the parameters whose logical name matches a shell-style pattern. A pattern without a match is an error."""
    parameters = dict(model.named_parameters())
    problems = []
    for pattern in patterns:
        matches = fnmatch.filter(parameters, pattern)
        if not matches:
            near = difflib.get_close_matches(pattern, parameters, n=1, cutoff=0.0)
            problems.append(f"freeze={pattern!r} matches no parameter; the nearest name is {near[0] if near else 'none'}")
        for name in matches:
            parameters[name].requires_grad_(False)
    if problems:
        raise ConfigError("; ".join(problems))


def compile_layers(model: GPTModel, backend: str = "inductor") -> None:
    """Compile every decoder layer with torch.compile; they share one compiled function, as they differ in weights only."""
    for layer in model.decoder.layers:
        layer.compile(backend=backend)
