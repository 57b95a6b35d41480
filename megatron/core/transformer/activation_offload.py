"""Activation offload: what autograd saves of the first layers goes to host memory in the forward, and comes back before the backward.

    forward    layer 0 |layer 1 |layer 2 ...      backward   ... layer 2 |layer 1 |layer 0
    to host            |0       |1                to device      1       |0       |

Whole storages are moved, each once, so that every saved tensor comes back with its strides: results are bit-equal. Parameters,
masks and rotary tables, which live on anyway, stay where they are; so does what is small.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.errors import ConfigError
from megatron.core.host_memory import CudaTransfers, Transfers

_SMALLEST = 1 << 16  # bytes


def activation_offload_problem(device: torch.device) -> str | None:
    """Why activations cannot be offloaded from this device; None if they can."""
    if device.type == "cuda":
        return None
    return f"cpu_offloading=True needs a CUDA device; the device is {device.type}, so activations lie in host memory already; leave it False"


class ActivationOffload:
    """For a stack of layers on one device.

    Args:
        transfers: how copies are made; None = as fits the device of the first forward. Raises ConfigError there if there is none.
        smallest: bytes of a storage from which on it is moved.
    """

    def __init__(self, transfers: Transfers | None = None, smallest: int = _SMALLEST) -> None:
        self._transfers, self.smallest = transfers, smallest

    def forward_pass(self, device: torch.device) -> "OffloadedPass":
        """Begin a forward through the layers."""
        if self._transfers is None:
            problem = activation_offload_problem(device)
            if problem is not None:
                raise ConfigError(problem)
            self._transfers = CudaTransfers(device)
        return OffloadedPass(self._transfers, self.smallest)


class OffloadedPass:
    """One microbatch's forward, and later its backward."""

    def __init__(self, transfers: Transfers, smallest: int) -> None:
        self._transfers, self._smallest = transfers, smallest
        self._layers: list[_Layer] = []

    @contextlib.contextmanager
    def layer(self, module: torch.nn.Module, shared: Sequence[torch.Tensor]) -> Iterator[None]:
        """Around the forward of the next layer. shared: tensors that other layers use too."""
        kept = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers(), *shared)}
        before = self._layers[-1] if self._layers else None
        layer = _Layer(self._transfers, self._smallest, kept, before)
        self._layers.append(layer)
        with torch.autograd.graph.saved_tensors_hooks(layer.pack, layer.unpack):
            yield

    def fetch_before_backward_of(self, hidden: torch.Tensor) -> None:
        """Let the last layer's tensors come back when the gradient of `hidden`, which was computed after it, is there."""
        if self._layers and hidden.requires_grad:
            last = self._layers[-1]
            hidden.register_hook(lambda grad: last.fetch())


@dataclasses.dataclass(eq=False)
class _Stored:
    """A storage in host memory."""

    host: torch.Tensor
    device: torch.device
    copied: Any
    back: torch.Tensor | None = None
    coming: Any = None


@dataclasses.dataclass(frozen=True)
class _View:
    """What autograd holds in a saved tensor's place."""

    stored: _Stored
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Layer:
    def __init__(self, transfers: Transfers, smallest: int, kept: set[int], before: "_Layer | None") -> None:
        self.transfers, self.smallest, self.kept, self.before = transfers, smallest, kept, before
        self._known: dict[tuple[int, int, torch.dtype], tuple[StorageWeakRef, weakref.ref[_Stored]]] = {}
        self._stored: list[weakref.ref[_Stored]] = []
        self._fetched = False

    def pack(self, tensor: torch.Tensor) -> Any:
        """A saved tensor -> its place in host memory, or the tensor itself."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.smallest or storage.data_ptr() in self.kept or tensor.is_sparse:
            return tensor
        key = storage.data_ptr(), tensor._version, tensor.dtype
        reference, known = self._known.get(key, (None, None))
        stored = None if reference is None or reference.expired() or known is None else known()
        if stored is None:
            stored = self._move(tensor)
            self._known[key] = StorageWeakRef(storage), weakref.ref(stored)
            self._stored.append(weakref.ref(stored))
        return _View(stored, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Any) -> torch.Tensor:
        """Back on the device. The first one asked for brings this layer's others, and those of the layer before, on their way."""
        if isinstance(saved, torch.Tensor):
            return saved
        self.fetch()
        if self.before is not None:
            self.before.fetch()
        self._start(saved.stored)
        if saved.stored.coming is not None:
            self.transfers.join(saved.stored.coming)
            saved.stored.coming = None
        assert saved.stored.back is not None
        return saved.stored.back.as_strided(saved.size, saved.stride, saved.offset)

    def fetch(self) -> None:
        """Start bringing everything back."""
        if self._fetched:
            return
        self._fetched, self._known = True, {}
        for reference in self._stored:
            stored = reference()
            if stored is not None:
                self._start(stored)
        self._stored = []

    def _move(self, tensor: torch.Tensor) -> _Stored:
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
        host = self.transfers.host_like(whole)
        return _Stored(host, tensor.device, self.transfers.to_host(host, whole))

    def _start(self, stored: _Stored) -> None:
        if stored.back is None:
            self.transfers.join(stored.copied)
            stored.back = torch.empty_like(stored.host, device=stored.device, pin_memory=False)
            stored.coming = self.transfers.to_device(stored.back, stored.host)
