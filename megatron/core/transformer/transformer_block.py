"""TransformerBlock: the stack of layers, the final norm, and recomputation of whole layers."""

import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import attention_backend
from megatron.core.transformer.batch_inputs import BatchInputs
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.recompute import checkpoint_function, layer_chunks
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer


class TransformerBlock(torch.nn.Module):
    """config.num_layers layers and the final norm. `backend` is the attention backend its layers share."""

    def __init__(
        self, config: TransformerConfig, *, device: torch.device | None, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self._config = config
        self.backend = attention_backend(config, device)
        self.layers = torch.nn.ModuleList(
            TransformerLayer(config, index, backend=self.backend, device=device, pg_collection=pg_collection)
            for index in range(config.num_layers)
        )
        self.final_layernorm = build_norm(config.hidden_size, config, device=device)
        self._chunks = layer_chunks(config, config.num_layers)

    def forward(self, hidden: torch.Tensor, batch: BatchInputs) -> torch.Tensor:
        """hidden: [s, b, h], [s/tp, b, h] with sequence parallelism -> the same, normalised."""
        for start, end, recompute in self._chunks:
            if recompute and torch.is_grad_enabled():
                hidden = checkpoint_function(self._config, self._run, start, end, hidden, batch)
            else:
                hidden = self._run(start, end, hidden, batch)
        return self.final_layernorm(hidden)

    def _run(self, start: int, end: int, hidden: torch.Tensor, batch: BatchInputs) -> torch.Tensor:
        for layer in self.layers[start:end]:
            hidden = layer(hidden, batch)
        return hidden
