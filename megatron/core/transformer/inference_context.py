"""InferenceContext: what attention asks of a key/value cache while text is generated."""

from typing import Protocol

import torch


class InferenceContext(Protocol):
    """A key/value cache. One forward pass calls `update` once per layer, each time for the same new tokens.

    Rows are left-aligned (padded on the right): a row's token at position p lies at cache index p, so the key index is the
    key's position. The model gets the new tokens' positions explicitly (`position_ids`), which may differ between rows.
    """

    def update(
        self, layer_index: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Store the new tokens of a layer and return everything that they may look at.

        Args:
            layer_index: layer number from 0.
            key, value: [s_new, b, kv heads, head size]; keys are already rotated and normalised.

        Returns:
            keys, values: [s_k, b, kv heads, head size], old and new.
            mask: bool [b, 1, s_new, s_k], True where the query may see the key: causal and inside the row's length. The model
                adds the sliding window itself, from `position_ids` and the key index.
        """
        ...
