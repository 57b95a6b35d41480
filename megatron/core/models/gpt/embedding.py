"""GPTEmbedding: token ids (and learned positions) to the first hidden states."""

import torch
import torch.nn.functional as F

from megatron.core.param_init import InitRule, new_parameter
from megatron.core.param_meta import ParamMeta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.random import rng_fork
from megatron.core.transformer.transformer_config import TransformerConfig


class LearnedPositions(torch.nn.Module):
    """One trained vector per position, [max_sequence_length, h]."""

    def __init__(self, config: TransformerConfig, max_sequence_length: int, *, device: torch.device | None) -> None:
        super().__init__()
        self.weight = new_parameter(
            (max_sequence_length, config.hidden_size),
            rule=InitRule(std=config.init_method_std),
            meta=ParamMeta(is_table=True),
            dtype=config.params_dtype,
            device=device,
        )

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """position_ids: int64 [...] -> [..., h]."""
        return F.embedding(position_ids, self.weight)


def _word_embeddings(
    config: TransformerConfig,
    vocab_size: int,
    padded_vocab_size: int,
    device: torch.device | None,
    pg_collection: ProcessGroupCollection,
    *,
    shared: bool,
) -> VocabParallelEmbedding:
    return VocabParallelEmbedding(
        vocab_size,
        padded_vocab_size,
        config.hidden_size,
        rule=InitRule(std=config.init_method_std),
        dtype=config.params_dtype,
        device=device,
        pg_collection=pg_collection,
        shared=shared,
    )


class TiedEmbedding(torch.nn.Module):
    """The last part's copy of the word embedding, where the head shares its weight: the same name and the same values."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        device: torch.device | None,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        self.word_embeddings = _word_embeddings(config, vocab_size, padded_vocab_size, device, pg_collection, shared=True)


class GPTEmbedding(torch.nn.Module):
    """Word embedding, plus learned positions where configured, then dropout. shared: the last part has a copy of the weight."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        max_sequence_length: int,
        device: torch.device | None,
        pg_collection: ProcessGroupCollection,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.dropout, self.sequence_parallel, self.group = config.hidden_dropout, config.sequence_parallel, pg_collection.tp
        self.word_embeddings = _word_embeddings(config, vocab_size, padded_vocab_size, device, pg_collection, shared=shared)
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings: LearnedPositions | None = LearnedPositions(config, max_sequence_length, device=device)
        else:
            self.position_embeddings = None

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        """input_ids: int64 [b, s]; position_ids: int64 [b, s] or None for 0..s-1 -> [s, b, h], own [s/tp, b, h] with
        sequence parallelism."""
        alone = self.position_embeddings is None
        hidden = self.word_embeddings(input_ids.t(), reduce_scatter=self.sequence_parallel and alone)
        if self.position_embeddings is not None:
            if position_ids is None:
                position_ids = torch.arange(input_ids.size(1), device=input_ids.device)[None]
            hidden = hidden + self.position_embeddings(position_ids.t())
            if self.sequence_parallel:
                hidden = scatter_to_sequence_parallel_region(hidden, self.group)
        with rng_fork(self.sequence_parallel and self.training and self.dropout > 0):
            return F.dropout(hidden, self.dropout, self.training) if self.dropout else hidden
