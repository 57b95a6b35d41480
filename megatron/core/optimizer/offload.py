"""Offload: main params and moments of some buckets in host memory, updated there.

    device   grad shard                                 param shard -> gather
                 | to_host, all buckets in a row             ^ to_device, as soon as the bucket is updated
    host     grad -----> wait, Adam on the CPU -----> param

While the CPU updates a bucket, the gradients of later ones come and the parameters of earlier ones go.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.errors import ConfigError
from megatron.core.host_memory import CudaTransfers, Transfers


def transfers_for(device: torch.device) -> Transfers:
    """Raises ConfigError where there is no device beside the host."""
    problem = offload_problem(device)
    if problem is not None:
        raise ConfigError(problem)
    return CudaTransfers(device)


def offload_problem(device: torch.device) -> str | None:
    """Why optimizer values can't be offloaded from this device; None if they can."""
    if device.type == "cuda":
        return None
    return f"optimizer_cpu_offload=True needs a CUDA device; the device is {device.type}, so optimizer values lie in host memory already; leave it False"


@dataclasses.dataclass
class OffloadedShard:
    """A bucket's shards on the device and their copies on the host."""

    transfers: Transfers
    param: torch.Tensor
    grad: torch.Tensor
    host_param: torch.Tensor
    host_grad: torch.Tensor
    _grad_copy: Any = None
    _param_copy: Any = None

    @classmethod
    def of(cls, transfers: Transfers, param: torch.Tensor, grad: torch.Tensor) -> "OffloadedShard":
        """With the parameters fetched."""
        shard = cls(transfers, param, grad, transfers.host_like(param), transfers.host_like(grad))
        shard.fetch_param()
        return shard

    @property
    def nbytes(self) -> int:
        """Of the host's copies."""
        return self.host_param.nbytes + self.host_grad.nbytes

    def start_grad(self) -> None:
        """Start fetching the gradients."""
        self._grad_copy = self.transfers.to_host(self.host_grad, self.grad)

    def wait_grad(self) -> None:
        """The gradients are on the host."""
        assert self._grad_copy is not None, "the gradients were not fetched"
        self.transfers.wait(self._grad_copy)
        self._grad_copy = None

    def fetch_param(self) -> None:
        """Device parameters -> host; returns when they are there."""
        self.transfers.wait(self.transfers.to_host(self.host_param, self.param))

    def send_param(self) -> None:
        """Start sending the host's parameters."""
        self._param_copy = self.transfers.to_device(self.param, self.host_param)

    def join_param(self) -> None:
        """What the device does next sees the parameters that were sent."""
        assert self._param_copy is not None, "the parameters were not sent"
        self.transfers.join(self._param_copy)
        self._param_copy = None


def offloaded(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Which buckets (elements, in the order of the updates) are offloaded: the last ones that make up at least `fraction` of all."""
    chosen = [False] * len(sizes)
    held, wanted = 0, fraction * sum(sizes)
    for index in reversed(range(len(sizes))):
        if held >= wanted:
            break
        chosen[index] = True
        held += sizes[index]
    return chosen
