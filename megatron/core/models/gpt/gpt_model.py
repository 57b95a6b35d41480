"""GPTModel: embedding, decoder, output head and loss. Hidden states are [s, b, h]; what goes in and comes out is [b, s, ...].

The vocabulary is padded inside only: logits, loss, gradients and sampled ids know the true vocabulary alone.
"""

import math

import torch

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.embedding import GPTEmbedding, TiedEmbedding
from megatron.core.param_init import InitRule, initialize_parameters
from megatron.core.param_meta import ParamMeta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, linear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.batch_inputs import AuxLossWeight, BatchInputs
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
        pre_process, post_process: whether this part of the pipeline holds the embedding / the head.
        layers: global numbers of its layers; default: all of them for a model in one part, else what config.pipeline_parts
            gives the rank's only part.
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
        layers: range | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        groups = ProcessGroupCollection.resolve(pg_collection)
        _check_layout(config, groups)
        self.groups = groups
        self.pre_process, self.post_process = pre_process, post_process
        layers = _default_layers(config, groups, pre_process, post_process) if layers is None else layers
        self.config, self.vocab_size, self.max_sequence_length = config, vocab_size, max_sequence_length
        self._padded_vocab_size = padded_vocab_size(vocab_size, config)
        self.rotary = RotaryTable(config, max_sequence_length) if config.position_embedding_type == "rope" else None
        tied = not config.untie_embeddings_and_output_weights
        sizes = {"vocab_size": vocab_size, "padded_vocab_size": self._padded_vocab_size}
        self.embedding: GPTEmbedding | TiedEmbedding | None = None
        if pre_process:
            self.embedding = GPTEmbedding(
                config,
                **sizes,
                max_sequence_length=max_sequence_length,
                device=device,
                pg_collection=groups,
                shared=tied and not post_process,
            )
        elif post_process and tied:
            self.embedding = TiedEmbedding(config, **sizes, device=device, pg_collection=groups)
        self.decoder = TransformerBlock(
            config, layers=layers, final_norm=post_process, device=device, pg_collection=groups
        )
        self.output_layer = self._build_head(device, groups) if post_process and not tied else None
        self._input_tensor: torch.Tensor | None = None
        of_experts = groups.rank("expt_tp"), groups.size("expt_tp")
        initialize_parameters(self, seed, groups.rank("tp"), groups.size("tp"), of_experts)

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

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor] | None) -> None:
        """Megatron's way to give the next forward its `hidden`: before it is called."""
        self._input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        *,
        labels: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        inference_context: InferenceContext | None = None,
        hidden: torch.Tensor | None = None,
        aux_loss: AuxLossWeight | None = None,
    ) -> torch.Tensor:
        """Logits, or the loss of each token; of a part without the head, its hidden states.

        Args:
            input_ids: int64 [b, s], each below vocab_size.
            position_ids: int64 [b, s] below max_sequence_length; default 0..s-1 in each row.
            labels: int64 [b, s], the token that follows each input.
            document_ids: int64 [b, s], equal inside a document; attention stays inside documents. Default: a row is one.
            inference_context: key/value cache; then input_ids are the new tokens and position_ids is required.
            hidden: what the part before gave, [s, b, h], [s/tp, b, h] with sequence parallelism; only for a part without embedding.
            aux_loss: weight of the auxiliary losses of layers with experts, whose gradients join those of what is returned;
                default 1, which fits a mean over the tokens.

        Returns logits [b, s, vocab_size] in the model's dtype without labels, else losses [b, s] in nats, fp32 (fp64 for an
        fp64 model), neither masked nor reduced.
        """
        if hidden is None and not self.pre_process:
            hidden, self._input_tensor = self._input_tensor, None
        assert (hidden is None) == self.pre_process, "the first part takes tokens, the others take hidden states"
        self._check_inputs(input_ids, position_ids, document_ids, inference_context)
        if hidden is None:
            assert isinstance(self.embedding, GPTEmbedding)
            hidden = self.embedding(input_ids, position_ids)
        batch = self._batch_inputs(input_ids, position_ids, document_ids, inference_context, aux_loss, hidden.dtype)
        hidden = self.decoder(hidden, batch)
        if not self.post_process:
            return hidden
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
        assert self.embedding is not None
        return linear(
            hidden,
            self.embedding.word_embeddings.weight,
            copied_over=self.groups.tp,
            sequence_parallel=self.config.sequence_parallel,
            fuse_accumulation=not self.pre_process,  # else the embedding's gradient is added first: the sums of a model without buffers
        )

    def _check_inputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        document_ids: torch.Tensor | None,
        inference_context: InferenceContext | None,
    ) -> None:
        if inference_context is not None and (position_ids is None or document_ids is not None):
            raise ValueError("with an inference_context pass position_ids, and no document_ids")
        length = input_ids.size(1)
        if length > self.max_sequence_length:
            raise ValueError(f"sequence of {length} tokens, the model has max_position_embeddings={self.max_sequence_length}")

    def _batch_inputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        document_ids: torch.Tensor | None,
        inference_context: InferenceContext | None,
        aux_loss: AuxLossWeight | None,
        dtype: torch.dtype,
    ) -> BatchInputs:
        (batch_size, length), device = input_ids.shape, input_ids.device
        attention = None
        if inference_context is None:
            attention = self.decoder.backend.prepare(batch_size, length, document_ids, device)
        rotary = None if self.rotary is None else self.rotary.cos_sin(position_ids, length, device, dtype)
        return BatchInputs(rotary, attention, position_ids, inference_context, aux_loss)


def padded_vocab_size(vocab_size: int, config: TransformerConfig) -> int:
    """vocab_size rounded up to a multiple of make_vocab_size_divisible_by x tensor-parallel size."""
    unit = config.make_vocab_size_divisible_by * config.tensor_model_parallel_size
    return math.ceil(vocab_size / unit) * unit


def _default_layers(
    config: TransformerConfig, groups: ProcessGroupCollection, pre_process: bool, post_process: bool
) -> range:
    if pre_process and post_process:
        return range(config.num_layers)
    if config.pipeline_chunks > 1:
        raise ConfigError("with several model chunks per pipeline stage pass `layers` (see TransformerConfig.pipeline_parts)")
    return config.pipeline_parts[groups.rank("pp")].layers


def _check_layout(config: TransformerConfig, groups: ProcessGroupCollection) -> None:
    """Raise ConfigError for groups that are not the configuration's, and for axes that this version does not cut the model along."""
    problems = []
    cp = max(config.context_parallel_size, groups.size("cp"))
    if cp > 1:
        problems.append(f"context_parallel_size={cp} is not supported in this version; set it to 1")
    for name, axis in (("tensor_model_parallel_size", "tp"), ("pipeline_model_parallel_size", "pp")):
        if getattr(config, name) != groups.size(axis):
            problems.append(
                f"{name}={getattr(config, name)}, but the {axis} group has {groups.size(axis)} rank(s); pass the same size to "
                "initialize_model_parallel"
            )
    problems += _expert_layout_problems(config, groups) if config.num_experts is not None else []
    if problems:
        raise ConfigError("; ".join(problems))


def _expert_layout_problems(config: TransformerConfig, groups: ProcessGroupCollection) -> list[str]:
    tensor = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    wanted = {"expert_model_parallel_size": ("ep", config.expert_model_parallel_size), "expert_tensor_parallel_size": ("expt_tp", tensor)}
    return [
        f"{name}={size}, but the {axis} group has {groups.size(axis)} rank(s); pass the same size to initialize_model_parallel"
        for name, (axis, size) in wanted.items()
        if size != groups.size(axis)
    ]
