"""Bytes of model state per rank, counted from the tensors that hold it."""

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer, UpdateUnit


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank, alignment padding included. `padding` says how many of the device's are padding.

    params, grads: whole, on every rank. main_params: what lies beside the parameters (nothing for fp32 ones). main_grads: fp32 copies of
    16-bit gradients. moments: the optimizer's states. host: all that optimizer_cpu_offload keeps in host memory, none of which is in the
    other figures: main params, moments, copies of parameters and gradients.
    """

    params: int
    grads: int
    main_params: int
    main_grads: int
    moments: int
    padding: int
    host: int = 0

    @property
    def total(self) -> int:
        """All of it but what is on the host."""
        return self.params + self.grads + self.main_params + self.main_grads + self.moments

    def __str__(self) -> str:
        names = [field.name for field in dataclasses.fields(self) if field.name != "host"]
        parts = [f"{name} {getattr(self, name) / 2**20:.1f}" for name in names]
        text = f"model state per rank, MiB: total {self.total / 2**20:.1f} = " + ", ".join(parts[:-1]) + f" (of it {parts[-1]})"
        return text + (f"; in host memory {self.host / 2**20:.1f}" if self.host else "")


def memory_report(model_chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> MemoryReport:
    """Count what this rank holds."""
    buffers = [buffer for chunk in model_chunks for buffer in chunk.all_buffers()]
    frozen = sum(param.nbytes for chunk in model_chunks for param in chunk.module.parameters() if not param.requires_grad)
    params = frozen + sum(
        sum(param.nbytes for param in buffer.params) if buffer.param_data is None else buffer.param_data.nbytes
        for buffer in buffers
    )
    padding = sum(
        (buffer.numel - buffer.numel_unpadded)
        * (buffer.grad_data.itemsize + (0 if buffer.param_data is None else buffer.param_data.itemsize))
        for buffer in buffers
    )
    main_params = main_grads = moments = host = 0
    for unit in optimizer.units:
        if unit.offload:
            host += _host_bytes(unit)
            continue
        main_params += _bytes(source for _, source in unit.param_copies)
        main_grads += _bytes(target for target, _ in unit.grad_copies)
        if unit.stored:
            mains = sum(flats.nbytes["main_param"] for flats in unit.stored)
            states = sum(sum(flats.nbytes.values()) for flats in unit.stored) - mains
            main_params, moments = main_params + mains, moments + states
            if unit.bucket_group is not None:
                held = sum(stored.nbytes for main in unit.main_params for stored in main.stored().values())
                held += _bytes(main.grad for main in unit.main_params if unit.grad_copies)
                padding += mains + states + _bytes(target for target, _ in unit.grad_copies) - held
        elif unit.flats:
            states = _bytes(tensor for flats in unit.flats for name, tensor in flats.items() if name != "main_param")
            moments += states
            held = sum(main.main.numel() for main in unit.main_params)
            copies = _bytes_per_element(unit.param_copies, 1) + _bytes_per_element(unit.grad_copies, 0)
            padding += (sum(flats["main_param"].numel() for flats in unit.flats) - held) * copies
            padding += states - _bytes(tensor for main in unit.main_params for tensor in main.state.values())
        else:
            moments += _bytes(tensor for main in unit.main_params for tensor in main.state.values())
    return MemoryReport(
        params, sum(buffer.grad_data.nbytes for buffer in buffers), main_params, main_grads, moments, padding, host
    )


def _host_bytes(unit: UpdateUnit) -> int:
    copies = sum(shard.nbytes for shard in unit.offload)
    copies += _bytes(source for _, source in unit.param_copies) + _bytes(target for target, _ in unit.grad_copies)
    if unit.stored:
        return copies + sum(sum(flats.nbytes.values()) for flats in unit.stored)
    return copies + _bytes(tensor for flats in unit.flats for name, tensor in flats.items() if name != "main_param")


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _bytes_per_element(copies: Sequence[tuple[torch.Tensor, torch.Tensor]], index: int) -> int:
    return copies[0][index].itemsize if copies else 0
