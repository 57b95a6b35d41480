"""GPTModel: embedding, decoder, output head and loss. Hidden states are [s, b, h]; what goes in and comes out is [b, s, ...].

The vocabulary is padded inside only: logits, loss, gradients and sampled ids know the true vocabulary alone.
"""

import math

import torch

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.embedding import GPTEmbedding
from megatron.core.param_init import InitRule, initialize_parameters
from megatron.core.param_meta import ParamMeta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, linear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.batch_inputs import BatchInputs
from megatron.core.transformer.inference_context import InferenceContext
from megatron.core.transformer.rope import RotaryTable
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig


class GPTModel(torch.nn.Module):
    """Decoder-only transformer.

    Args:
        config: architecture, parallel sizes and precision.
        vocab_size: true vocabulary size; the embedding is padded to a multiple of
            config.make_vocab_size_divisible_by x tensor-parallel size.
        max_sequence_length: number of positions.
        seed: initial weights depend on it and on each parameter's logical name only.
        pg_collection: process groups; default: those that initialize_model_parallel installed.
        pre_process, post_process: whether this pipeline stage holds the embedding / the head.
        device: where parameters live; default: torch's default device.

    Raises ConfigError for a parallel size or attention backend that cannot be used.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        max_sequence_length: int,
        seed: int = 1234,
        pg_collection: ProcessGroupCollection | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        groups = ProcessGroupCollection.resolve(pg_collection)
        _check_layout(config, groups, pre_process and post_process)
        self.groups = groups
        self.config, self.vocab_size, self.max_sequence_length = config, vocab_size, max_sequence_length
        self._padded_vocab_size = padded_vocab_size(vocab_size, config)
        self.rotary = RotaryTable(config, max_sequence_length) if config.position_embedding_type == "rope" else None
        self.embedding = GPTEmbedding(
            config,
            vocab_size=vocab_size,
            padded_vocab_size=self._padded_vocab_size,
            max_sequence_length=max_sequence_length,
            device=device,
            pg_collection=groups,
        )
        self.decoder = TransformerBlock(config, device=device, pg_collection=groups)
        if config.untie_embeddings_and_output_weights:
            self.output_layer: ColumnParallelLinear | None = self._build_head(device, groups)
        else:
            self.output_layer = None
        initialize_parameters(self, seed, groups.rank("tp"), groups.size("tp"))

    def _build_head(self, device: torch.device | None, groups: ProcessGroupCollection) -> ColumnParallelLinear:
        config = self.config
        logical_shape = (self.vocab_size, config.hidden_size)
        return ColumnParallelLinear(
            config.hidden_size,
            self._padded_vocab_size,
            rule=InitRule(std=config.init_method_std),
            bias=False,
            weight_meta=ParamMeta(tp_dim=0, is_embedding_or_output=True, logical_shape=logical_shape),
            dtype=config.params_dtype,
            device=device,
            pg_collection=groups,
            sequence_parallel=config.sequence_parallel,
        )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the output matrix, over all tensor-parallel ranks."""
        return self._padded_vocab_size

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        *,
        labels: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        inference_context: InferenceContext | None = None,
    ) -> torch.Tensor:
        """Logits, or the loss of each token.

        Args:
            input_ids: int64 [b, s], each below vocab_size.
            position_ids: int64 [b, s] below max_sequence_length; default 0..s-1 in each row.
            labels: int64 [b, s], the token that follows each input.
            document_ids: int64 [b, s], equal inside a document; attention stays inside documents. Default: a row is one.
            inference_context: key/value cache; then input_ids are the new tokens and position_ids is required.

        Returns logits [b, s, vocab_size] in the model's dtype without labels, else losses [b, s] in nats, fp32 (fp64 for an
        fp64 model), neither masked nor reduced.
        """
        batch = self._batch_inputs(input_ids, position_ids, document_ids, inference_context)
        hidden = self.decoder(self.embedding(input_ids, position_ids), batch)
        logits = self._logits(hidden)
        if labels is None:
            logits = gather_from_tensor_model_parallel_region(logits, self.groups.tp)
            return logits[..., : self.vocab_size].transpose(0, 1)
        losses = vocab_parallel_cross_entropy(
            logits,
            labels.t(),
            vocab_size=self.vocab_size,
            reuse_logits=True,
            group=self.groups.tp,
            compiled=self.config.torch_compile,
        )
        return losses.t()

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[s, b, h], [s/tp, b, h] with sequence parallelism -> this rank's columns [s, b, padded vocabulary / tp]."""
        if self.output_layer is not None:
            return self.output_layer(hidden)
        return linear(
            hidden,
            self.embedding.word_embeddings.weight,
            copied_over=self.groups.tp,
            sequence_parallel=self.config.sequence_parallel,
            fuse_accumulation=False,  # the embedding's gradient is added first: the sums of a model without buffers
        )

    def _batch_inputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        document_ids: torch.Tensor | None,
        inference_context: InferenceContext | None,
    ) -> BatchInputs:
        batch_size, length = input_ids.shape
        device, dtype = input_ids.device, self.embedding.word_embeddings.weight.dtype
        if inference_context is not None and (position_ids is None or document_ids is not None):
            raise ValueError("with an inference_context pass position_ids, and no document_ids")
        if length > self.max_sequence_length:
            raise ValueError(f"sequence of {length} tokens, the model has max_position_embeddings={self.max_sequence_length}")
        attention = None
        if inference_context is None:
            attention = self.decoder.backend.prepare(batch_size, length, document_ids, device)
        rotary = None if self.rotary is None else self.rotary.cos_sin(position_ids, length, device, dtype)
        return BatchInputs(rotary, attention, position_ids, inference_context)


def padded_vocab_size(vocab_size: int, config: TransformerConfig) -> int:
    """vocab_size rounded up to a multiple of make_vocab_size_divisible_by x tensor-parallel size."""
    unit = config.make_vocab_size_divisible_by * config.tensor_model_parallel_size
    return math.ceil(vocab_size / unit) * unit


def _check_layout(config: TransformerConfig, groups: ProcessGroupCollection, both_ends: bool) -> None:
    """Raise ConfigError for groups that are not the configuration's, and for axes that this version does not cut the model along."""
    sizes = {
        "pipeline_model_parallel_size": max(config.pipeline_model_parallel_size, groups.size("pp")),
        "context_parallel_size": max(config.context_parallel_size, groups.size("cp")),
    }
    problems = [f"{name}={size} is not supported in this version; set it to 1" for name, size in sizes.items() if size > 1]
    if not both_ends:
        problems.append("pre_process=False or post_process=False (a pipeline stage) is not supported in this version")
    if config.tensor_model_parallel_size != groups.size("tp"):
        problems.append(
            f"tensor_model_parallel_size={config.tensor_model_parallel_size}, but the tensor-parallel group has "
            f"{groups.size('tp')} rank(s); pass the same size to initialize_model_parallel"
        )
    if problems:
        raise ConfigError("; ".join(problems))
