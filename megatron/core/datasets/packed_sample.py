"""From seq_length + 1 token ids to what the model is fed: tokens, labels, loss mask, positions, documents. NumPy, vectorised.

ids          5 6 E 7 8 9 E 4 3        an EOD belongs to the document that it ends
tokens       5 6 E 7 8 9 E 4
labels       6 E 7 8 9 E 4 3
positions    0 1 2 0 1 2 3 0          with reset_position_ids
document_ids 0 0 0 1 1 1 1 2          with reset_attention_mask: no attention across documents
loss_mask    1 1 0 1 1 1 0 1          with eod_mask_loss: nothing is learned from an EOD about the next document
"""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.errors import ConfigError

Sample = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SampleFormat:
    """How samples are laid out. Raises ConfigError if an option needs an EOD id and the tokenizer has none."""

    seq_length: int
    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        wanted = [name for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(self, name)]
        if wanted and self.eod is None:
            raise ConfigError(f"{', '.join(wanted)} needs an end-of-document token, and the tokenizer has none; unset it")

    def sample(self, ids: npt.NDArray[np.int64], sample_id: int) -> Sample:
        """The sample of `ids` int64 [<= seq_length + 1]; a shorter one is padded with 0, without loss on the padding.

        Returns tokens, labels, position_ids (and document_ids with reset_attention_mask) int64 [seq_length],
        loss_mask float32 [seq_length], sample_id int. All arrays are fresh: nothing is shared between samples.
        """
        length = self.seq_length
        known = len(ids) - 1
        if known < length:
            ids = np.concatenate([ids, np.zeros(length - known, dtype=np.int64)])
        tokens, labels = ids[:-1].copy(), ids[1:].copy()
        loss_mask = np.ones(length, dtype=np.float32)
        loss_mask[known:] = 0.0
        positions = np.arange(length, dtype=np.int64)
        sample: Sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}
        if self.eod is not None:
            ends = tokens == self.eod
            ends[known + 1 :] = False
            self._apply_documents(sample, ends)
        sample["sample_id"] = sample_id
        return sample

    def _apply_documents(self, sample: Sample, ends: npt.NDArray[np.bool_]) -> None:
        """What the options ask for, from `ends` bool [seq_length]: where the input token is an EOD."""
        if self.eod_mask_loss:
            sample["loss_mask"][ends] = 0.0
        begins = np.concatenate([[False], ends[:-1]])
        if self.reset_position_ids:
            positions = sample["position_ids"]
            sample["position_ids"] = positions - np.maximum.accumulate(np.where(begins, positions, 0))
        if self.reset_attention_mask:
            sample["document_ids"] = np.cumsum(begins, dtype=np.int64)
