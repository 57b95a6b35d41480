"""KVCache: keys and values of the tokens seen so far, left-aligned per row, for rows of different length.

    slot     0  1  2  3  4          a row's token at position p lies in slot p; behind a row's end lies padding (.) from the
    row 0    a  b  .  .  .          prompt batch, which no query of that row may see (causal), until a new token takes the slot
    row 1    a  b  c  d  .
"""

import torch


class KVCache:
    """Implements `megatron.core.transformer.inference_context.InferenceContext`.

    capacity: slots per row (longest prompt + new tokens). Memory is taken at a layer's first update: per layer
    2 x capacity x batch x kv heads x head size elements of the keys' dtype.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._slots: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None
        self._visible = 0

    def begin(self, positions: torch.Tensor) -> None:
        """Announce a forward pass. positions: int64 [b, s_new], below `capacity`; each row's new tokens go to these slots."""
        self._visible = int(positions.max()) + 1
        if self._visible > self.capacity:
            raise ValueError(f"position {self._visible - 1} is outside of the cache, which has {self.capacity} slots per row")
        keys = torch.arange(self._visible, device=positions.device)
        self._mask = (keys <= positions.unsqueeze(-1)).unsqueeze(1)  # [b, 1, s_new, s_k]
        self._slots = positions.t()

    def update(
        self, layer_index: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `InferenceContext.update`; key, value: [s_new, b, kv heads, head size]."""
        assert self._slots is not None and self._mask is not None, "update before begin"
        if layer_index not in self._layers:
            shape = (self.capacity, *key.shape[1:])
            self._layers[layer_index] = (key.new_zeros(shape), value.new_zeros(shape))
        keys, values = self._layers[layer_index]
        rows = torch.arange(key.shape[1], device=key.device)
        keys[self._slots, rows] = key
        values[self._slots, rows] = value
        return keys[: self._visible], values[: self._visible], self._mask
