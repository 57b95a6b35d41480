"""TransformerBlock: the stack of layers, the final norm, and recomputation of whole layers."""

import torch
from torch.utils._pytree import tree_leaves

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.activation_offload import ActivationOffload
from megatron.core.transformer.attention import attention_backend
from megatron.core.transformer.batch_inputs import BatchInputs
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.recompute import checkpoint_function, layer_chunks
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer


class TransformerBlock(torch.nn.Module):
    """A run of layers, and after the last part's the final norm. `backend` is the attention backend its layers share.

    layers: global numbers; a layer's name is its number, whatever part of the model it is in.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        layers: range,
        final_norm: bool,
        device: torch.device | None,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        self._config = config
        self.backend = attention_backend(config, device)
        self.layers = torch.nn.ModuleDict(
            {
                str(index): TransformerLayer(config, index, backend=self.backend, device=device, pg_collection=pg_collection)
                for index in layers
            }
        )
        self.final_layernorm = build_norm(config.hidden_size, config, device=device) if final_norm else None
        self._chunks = layer_chunks(config, len(layers))
        self.offload = ActivationOffload() if config.cpu_offloading else None

    def forward(self, hidden: torch.Tensor, batch: BatchInputs) -> torch.Tensor:
        """hidden: [s, b, h], [s/tp, b, h] with sequence parallelism -> the same, normalised by the last part."""
        if self.offload is not None and torch.is_grad_enabled():
            return self._finished(self._run_offloaded(self.offload, hidden, batch))
        for start, end, recompute in self._chunks:
            if recompute and torch.is_grad_enabled():
                hidden = checkpoint_function(self._config, self._run, start, end, hidden, batch)
            else:
                hidden = self._run(start, end, hidden, batch)
        return self._finished(hidden)

    def _finished(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)

    def _run_offloaded(self, offload: ActivationOffload, hidden: torch.Tensor, batch: BatchInputs) -> torch.Tensor:
        """The first layers with their saved activations in host memory, then the others."""
        layers = list(self.layers.values())
        first = layers[: self._config.cpu_offloading_num_layers]
        passing = offload.forward_pass(hidden.device)
        shared = [leaf for leaf in tree_leaves((batch.rotary, batch.attention)) if isinstance(leaf, torch.Tensor)]
        for layer in first:
            with passing.layer(layer, shared):
                hidden = layer(hidden, batch)
        for index, layer in enumerate(layers[len(first) :]):
            hidden = layer(hidden, batch)
            if index == 0:
                passing.fetch_before_backward_of(hidden)
        if len(first) == len(layers):
            passing.fetch_before_backward_of(hidden)
        return hidden

    def _run(self, start: int, end: int, hidden: torch.Tensor, batch: BatchInputs) -> torch.Tensor:
        for layer in list(self.layers.values())[start:end]:
            hidden = layer(hidden, batch)
        return hidden
