"""Builds the GPT model of a run: sizes from the configuration, frozen parameters, compiled layers."""

import dataclasses
import difflib
import fnmatch
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core.dist_checkpointing.mapping import logical_shape
from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedule_plan import part_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run_config import RunConfig


def build_gpt_model(
    config: RunConfig,
    *,
    vocab_size: int,
    device: torch.device,
    pg_collection: ProcessGroupCollection | None = None,
    pre_process: bool = True,
    post_process: bool = True,
    layers: range | None = None,
) -> GPTModel:
    """The model, or a part of the pipeline's, on `device`: initialised from config.training.seed, frozen and compiled as configured.

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
        layers=layers,
        device=device,
    )
    freeze_parameters(model, config.training.freeze, lambda: _all_names(config, vocab_size))
    if config.model.torch_compile:
        compile_model(model)
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


def build_model_chunks(
    config: RunConfig, builder: Callable[..., torch.nn.Module], *, pg_collection: ProcessGroupCollection, **arguments: Any
) -> list[torch.nn.Module]:
    """This rank's model chunks: the whole model, or with a pipeline the parts of its stage, by `builder`."""
    stages = config.parallel.pipeline_model_parallel_size
    if stages == 1:
        return [builder(config, pg_collection=pg_collection, **arguments)]
    parts, chunks = config.transformer_config().pipeline_parts, []
    for chunk in range(config.parallel.pipeline_chunks):
        part = parts[part_of(config.parallel.pipeline_schedule, stages, pg_collection.rank("pp"), chunk)]
        place = {"pre_process": part.embedding, "post_process": part.head, "layers": part.layers}
        chunks.append(builder(config, pg_collection=pg_collection, **place, **arguments))
    return chunks


def freeze_parameters(
    model: torch.nn.Module, patterns: Sequence[str], all_names: Callable[[], Sequence[str]] | None = None
) -> None:
    """Stop training the parameters whose logical name matches a shell-style pattern. A pattern without a match is an error.

    all_names: of the whole model, where `model` is a part of it.
    """
    parameters = dict(model.named_parameters())
    problems = []
    for pattern in patterns:
        matches = fnmatch.filter(parameters, pattern)
        known = parameters if matches or all_names is None else all_names()
        if not matches and not fnmatch.filter(known, pattern):
            near = difflib.get_close_matches(pattern, known, n=1, cutoff=0.0)
            problems.append(f"freeze={pattern!r} matches no parameter; the nearest name is {near[0] if near else 'none'}")
        for name in matches:
            parameters[name].requires_grad_(False)
    if problems:
        raise ConfigError("; ".join(problems))


def _all_names(config: RunConfig, vocab_size: int) -> list[str]:
    """Logical names of the whole model's parameters."""
    return [name for name, _ in whole_model(config, vocab_size).named_parameters()]


def count_parameters(config: RunConfig, vocab_size: int) -> int:
    """Of the whole model, without vocabulary padding; tied weights count once."""
    return sum(math.prod(logical_shape(param, 1)) for param in whole_model(config, vocab_size).parameters())


def whole_model(config: RunConfig, vocab_size: int) -> GPTModel:
    """The model in one piece, without memory (on the meta device)."""
    return GPTModel(
        TransformerConfig(**dataclasses.asdict(config.model)),
        vocab_size=vocab_size,
        max_sequence_length=config.model.max_position_embeddings or config.data.seq_length,
        pg_collection=ProcessGroupCollection.single_process(),
        device=torch.device("meta"),
    )


def compile_model(model: GPTModel, backend: str = "inductor") -> None:
    """Compile with torch.compile in the pieces that config.torch_compile_scope names: every decoder layer (they share one compiled
    function, as they differ in weights only) or the whole model."""
    pieces = [model] if model.config.torch_compile_scope == "model" else model.decoder.layers.values()
    for piece in pieces:
        piece.compile(backend=backend)
