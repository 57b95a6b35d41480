"""Copies between a device and the host's memory that run beside the device's work. Streams and pinned memory on CUDA."""

from typing import Any, Protocol

import torch


class Transfers(Protocol):
    """Copies between device and host memory. A copy comes after what the device was asked to do before it."""

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Uninitialised host memory for the content of a device tensor."""
        ...

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> Any:
        """Start a copy; returns what `wait` takes."""
        ...

    def wait(self, copy: Any) -> None:
        """Return when the host's memory holds what was copied."""
        ...

    def to_device(self, device: torch.Tensor, host: torch.Tensor) -> Any:
        """Start a copy; returns what `join` takes. The host's memory stays as it is until the device has used the copy."""
        ...

    def join(self, copy: Any) -> None:
        """What the device is asked to do from now on comes after the copy."""
        ...


class CudaTransfers:
    """Pinned memory, and a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Transfers`."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> torch.cuda.Event:
        """See `Transfers`."""
        return self._copy(self._down, host, device)

    def wait(self, copy: torch.cuda.Event) -> None:
        """See `Transfers`."""
        copy.synchronize()

    def to_device(self, device: torch.Tensor, host: torch.Tensor) -> torch.cuda.Event:
        """See `Transfers`."""
        return self._copy(self._up, device, host)

    def join(self, copy: torch.cuda.Event) -> None:
        """See `Transfers`."""
        torch.cuda.current_stream(self.device).wait_event(copy)

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(stream)  # it may be freed before the copy has run
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event
