"""Messages between pipeline stages: activations to the next part of the model, their gradients back.

A message belongs to a channel: (forward or backward) x (to a higher or to a lower rank). On a channel a pair of ranks talks in one
direction only and in one order, which `schedule_plan.check_plan` proves. So nothing can be mistaken for anything else where two
stages are both neighbours of each other, and on NCCL, where a message blocks those behind it, no circle can form: each channel has
communicators of its own there. On gloo the channel is the message's tag.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron.core.pipeline_parallel.schedule_plan import Kind
from megatron.core.process_groups_config import ProcessGroupCollection, create_copies_of_group


class PipelineCommunicator:
    """Sends and receives for one rank's pipeline. Constructing it is a collective of all ranks.

    Tensors are [s, b, h]; sends are asynchronous and keep their tensor until they are done.
    """

    def __init__(self, groups: ProcessGroupCollection) -> None:
        self.group, self.rank = groups.pp, groups.rank("pp")
        nccl = self.group is not None and dist.get_backend(self.group) == "nccl"
        self._channel_groups = create_copies_of_group(groups, "pp", 4) if nccl else [self.group] * 4
        self._sends: list[tuple[Any, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, to: int, kind: Kind) -> None:
        """Start sending to the stage `to`."""
        channel = self._channel(kind, self.rank, to)
        tensor = tensor.detach().contiguous()
        handle = dist.isend(tensor, group=self._channel_groups[channel], group_dst=to, tag=channel)  # hidden states
        self._sends = [pair for pair in self._sends if not pair[0].is_completed()]
        self._sends.append((handle, tensor))

    def receive(self, buffer: torch.Tensor, source: int, kind: Kind) -> Any:
        """Start receiving into `buffer` from the stage `source`; returns the handle to wait for."""
        channel = self._channel(kind, source, self.rank)
        return dist.irecv(buffer, group=self._channel_groups[channel], group_src=source, tag=channel)

    def finish_sends(self) -> None:
        """Wait until everything that was sent has left."""
        for handle, _ in self._sends:
            handle.wait()
        self._sends = []

    @staticmethod
    def _channel(kind: Kind, source: int, target: int) -> int:
        return 2 * (kind is Kind.B) + (source > target)
