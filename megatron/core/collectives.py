"""Collectives over a process group: the same numbers on every backend, in every run.

- `mean` is a true mean everywhere (gloo has none of its own: the sum is divided here).
- On CPU reduce-scatter, all-gather and all-to-all are exchanges of point-to-point messages, which move fewer bytes than gloo's own. Every
  rank receives its chunk from each peer and adds the chunks up **in rank order and in fp32**, so that a result depends
  neither on timing nor on whether it came from a reduce-scatter or an all-reduce:

      rank 0  [a0 a1 a2]        to 1: a1, to 2: a2      a0 + b0 + c0
      rank 1  [b0 b1 b2]        to 0: b0, to 2: b2      a1 + b1 + c1
      rank 2  [c0 c1 c2]        to 0: c0, to 1: c1      a2 + b2 + c2

- On CUDA they are the backend's own.

`group=None` stands for one process: nothing is sent, the result is the input. Functions return a `Work` when `async_op`, else
None. Collectives on one group must be started in the same order on all of its ranks.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None

_HALF = (torch.float16, torch.bfloat16)
_BLOCK = 1 << 16  # elements summed at a time, so that several operands stay in the cache


class Work(Protocol):
    """A started collective."""

    def wait(self, scale: float | torch.Tensor | None = None) -> None:
        """Return when the result is there. scale: for reductions, multiply the result by it."""

    def arrived(self) -> bool | None:
        """Whether everything is here, without waiting; None where the backend tells that in `wait` alone (gloo's messages)."""


class Staging:
    """Receive buffers, kept for reuse: a fresh large allocation costs as much as the message it receives.

    Owned by whoever starts the collectives; `nbytes` is what it holds.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self.nbytes = 0

    def take(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """An uninitialised 1-D CPU tensor."""
        free = self._free.get((dtype, numel))
        if free:
            return free.pop()
        tensor = torch.empty(numel, dtype=dtype)
        self.nbytes += tensor.nbytes
        return tensor

    def give_back(self, tensor: torch.Tensor) -> None:
        """Make a tensor of `take` available again."""
        self._free.setdefault((tensor.dtype, tensor.numel()), []).append(tensor)


def group_size(group: Group) -> int:
    """Number of ranks; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """This rank's position; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def all_reduce(
    tensor: torch.Tensor,
    group: Group,
    op: str = "sum",
    async_op: bool = False,
    *,
    rank_order: bool = False,
    staging: Staging | None = None,
) -> Work | None:
    """Reduce `tensor` over the group, in place.

    Args:
        tensor: any shape and dtype.
        op: sum, mean, max or min.
        rank_order: a sum or mean adds up in rank order and fp32, bit-equal to `reduce_scatter` of the same tensor (1-D,
            floating). Costs a second phase on more than two ranks.
        staging: where `rank_order` takes its buffers.
    """
    _check_op(op, ("sum", "mean", "max", "min"))
    size = group_size(group)
    if size == 1:
        return _started(_Finished(tensor if op in ("sum", "mean") else None), async_op)
    # Two ranks have one order only; but 16-bit values are to be scaled before they are rounded.
    ordered = rank_order and (size > 2 or tensor.dtype in _HALF) and tensor.device.type == "cpu" and op in ("sum", "mean")
    if ordered:
        return _started(_OrderedAllReduce(tensor, group, _mean_factor(op, size), staging or Staging()), async_op)
    native_mean = op == "mean" and _averages(group)
    sum_or_mean = dist.ReduceOp.AVG if native_mean else dist.ReduceOp.SUM
    reduce_op = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(op, sum_or_mean)
    handle = dist.all_reduce(tensor, op=reduce_op, group=group, async_op=True)
    factor = 1.0 if native_mean else _mean_factor(op, size)
    return _started(_Native(handle, tensor, factor), async_op)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Group,
    op: str = "sum",
    async_op: bool = False,
    *,
    staging: Staging | None = None,
) -> Work | None:
    """Reduce `input` over the group; rank r keeps chunk r of the result in `output`.

    Args:
        output: [n / size], 1-D; may be this rank's own chunk of `input`. The rest of `input` is left as it was.
        input: [n], 1-D, contiguous, n a multiple of the group's size.
        op: sum or mean. 16-bit values are added in fp32 on CPU and rounded once.
        staging: where the CPU exchange takes its buffers.
    """
    _check_op(op, ("sum", "mean"))
    size = group_size(group)
    assert output.numel() * size == input.numel(), (output.shape, input.shape, size)
    if size == 1:
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return _started(_Finished(output), async_op)
    if input.device.type == "cpu":
        chunks = list(input.view(size, -1).unbind(0))
        return _started(_ReduceScatter(output, chunks, group, _mean_factor(op, size), staging or Staging()), async_op)
    native_mean = op == "mean" and _averages(group)
    reduce_op = dist.ReduceOp.AVG if native_mean else dist.ReduceOp.SUM
    handle = dist.reduce_scatter_tensor(output, input, op=reduce_op, group=group, async_op=True)
    return _started(_Native(handle, output, 1.0 if native_mean else _mean_factor(op, size)), async_op)


def all_gather(output: torch.Tensor, input: torch.Tensor, group: Group, async_op: bool = False) -> Work | None:
    """Concatenate every rank's `input` in rank order into `output`.

    Args:
        output: [n], 1-D, contiguous.
        input: [n / size], 1-D; may be this rank's own chunk of `output`.
    """
    size, rank = group_size(group), group_rank(group)
    assert input.numel() * size == output.numel(), (output.shape, input.shape, size)
    own = output.view(size, -1)[rank]
    if size == 1 or output.device.type == "cpu":
        if own.data_ptr() != input.data_ptr():
            own.copy_(input)
        chunks = list(output.view(size, -1).unbind(0))
        return _started(_AllGather(chunks, group) if size > 1 else _Finished(None), async_op)
    handle = dist.all_gather_into_tensor(output, input, group=group, async_op=True)
    return _started(_Native(handle, None, 1.0), async_op)


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
    group: Group,
    async_op: bool = False,
) -> Work | None:
    """Send the p-th part of `input` to each rank p, and receive `output`'s p-th part from it.

    Args:
        output, input: 1-D, contiguous, one dtype; both must live until the work is waited for.
        output_sizes, input_sizes: elements of the parts, one per rank, 0 included; what p sends to q is what q expects of p.
    """
    size, rank = group_size(group), group_rank(group)
    assert len(output_sizes) == len(input_sizes) == size, (output_sizes, input_sizes, size)
    assert output_sizes[rank] == input_sizes[rank], (output_sizes, input_sizes, rank)
    if size > 1 and output.device.type != "cpu":
        handle = dist.all_to_all_single(output, input, list(output_sizes), list(input_sizes), group=group, async_op=True)
        return _started(_Native(handle, None, 1.0), async_op)
    incoming, outgoing = output.split(list(output_sizes)), input.split(list(input_sizes))
    incoming[rank].copy_(outgoing[rank])
    return _started(_AllToAll(incoming, outgoing, group) if size > 1 else _Finished(None), async_op)


def broadcast(tensor: torch.Tensor, group: Group, group_src: int = 0) -> None:
    """Copy `tensor` of the group's rank `group_src` to all ranks, in place."""
    if group_size(group) > 1:
        dist.broadcast(tensor, group=group, group_src=group_src)


def gather_to(tensor: torch.Tensor, group: Group, group_dst: int = 0) -> list[torch.Tensor] | None:
    """Every rank's `tensor` (equal shapes), in rank order, on the group's rank `group_dst`; None on the others."""
    size, rank = group_size(group), group_rank(group)
    if size == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(size)] if rank == group_dst else None
    dist.gather(tensor, parts, group=group, group_dst=group_dst)
    return parts


def scatter_from(parts: Sequence[torch.Tensor] | None, output: torch.Tensor, group: Group, group_src: int = 0) -> None:
    """Inverse of `gather_to`: `output` of rank r becomes `parts[r]`, which only the group's rank `group_src` gives."""
    if group_size(group) == 1:
        assert parts is not None
        output.copy_(parts[0])
        return
    dist.scatter(output, list(parts) if parts is not None else None, group=group, group_src=group_src)


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Every rank's `value` (picklable, small), in rank order, on every rank."""
    values: list[Any] = [value] * group_size(group)
    if group_size(group) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


class WorkList:
    """Several started collectives as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = tuple(works)

    def wait(self, scale: float | torch.Tensor | None = None) -> None:
        """Wait for all, in order."""
        for work in self.works:
            work.wait(scale)

    def arrived(self) -> bool | None:
        """None as soon as one of them can't tell."""
        states = [work.arrived() for work in self.works]
        return None if None in states else all(states)


class _Finished:
    """Nothing had to be sent."""

    def __init__(self, result: torch.Tensor | None) -> None:
        self.result = result

    def wait(self, scale: float | torch.Tensor | None = None) -> None:
        if self.result is not None and scale is not None:
            self.result.mul_(scale)

    def arrived(self) -> bool | None:
        return True


class _Native:
    """The backend's own collective; `factor` completes a mean that the backend can't form."""

    def __init__(self, handle: Any, result: torch.Tensor | None, factor: float) -> None:
        self.handle, self.result, self.factor = handle, result, factor

    def wait(self, scale: float | torch.Tensor | None = None) -> None:
        self.handle.wait()
        factor = self.factor if scale is None else scale * self.factor
        if self.result is not None and not (isinstance(factor, float) and factor == 1.0):
            self.result.mul_(factor)

    def arrived(self) -> bool | None:
        return self.handle.is_completed()


class _ReduceScatter:
    """Exchange of chunks, then the sum in rank order; `chunks[rank]` of the own input goes to nobody."""

    def __init__(self, output: torch.Tensor, chunks: list[torch.Tensor], group: Group, factor: float, staging: Staging) -> None:
        rank = group_rank(group)
        self.output, self.factor, self.staging = output, factor, staging
        self.parts = list(chunks)
        self.received = []
        for peer in range(len(chunks)):
            if peer != rank:
                self.parts[peer] = staging.take(output.dtype, output.numel())
                self.received.append(self.parts[peer])
        self.handles = _exchange(chunks, self.parts, group)

    def wait(self, scale: float | torch.Tensor | None = None) -> None:
        for handle in self.handles:
            handle.wait()
        factor = self.factor if scale is None else float(scale) * self.factor
        _sum_in_order(self.output, self.parts, factor)
        for tensor in self.received:
            self.staging.give_back(tensor)

    def arrived(self) -> bool | None:
        return None


class _AllGather:
    """Every rank sends its chunk to each peer, straight into place."""

    def __init__(self, chunks: list[torch.Tensor], group: Group) -> None:
        self.handles = _exchange([chunks[group_rank(group)]] * len(chunks), chunks, group)

    def wait(self, scale: float | torch.Tensor | None = None) -> None:
        assert scale is None
        for handle in self.handles:
            handle.wait()

    def arrived(self) -> bool | None:
        return None


class _AllToAll:
    """Messages of any length to and from each peer."""

    def __init__(self, incoming: Sequence[torch.Tensor], outgoing: Sequence[torch.Tensor], group: Group) -> None:
        self.outgoing = outgoing  # must live until they are sent
        self.handles = _exchange(outgoing, incoming, group)

    def wait(self, scale: float | torch.Tensor | None = None) -> None:
        assert scale is None
        for handle in self.handles:
            handle.wait()

    def arrived(self) -> bool | None:
        return None


class _OrderedAllReduce:
    """Reduce-scatter, and in `wait` the all-gather of its result."""

    def __init__(self, tensor: torch.Tensor, group: Group, factor: float, staging: Staging) -> None:
        self.group = group
        self.chunks = list(torch.tensor_split(tensor, group_size(group)))
        self.reduction = _ReduceScatter(self.chunks[group_rank(group)], self.chunks, group, factor, staging)

    def wait(self, scale: float | torch.Tensor | None = None) -> None:
        self.reduction.wait(scale)
        _AllGather(self.chunks, self.group).wait()

    def arrived(self) -> bool | None:
        return None


def _exchange(outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], group: Group) -> list[Any]:
    """Start sending `outgoing[p]` to and receiving `incoming[p]` from each peer p; empty messages are left out."""
    rank, size = group_rank(group), group_size(group)
    handles: list[Any] = []
    for distance in range(1, size):  # every rank begins with another peer
        peer = (rank - distance) % size
        if incoming[peer].numel():
            handles.append(dist.irecv(incoming[peer], group=group, group_src=peer))
    for distance in range(1, size):
        peer = (rank + distance) % size
        if outgoing[peer].numel():
            handles.append(dist.isend(outgoing[peer], group=group, group_dst=peer))
    return handles


def _sum_in_order(output: torch.Tensor, parts: Sequence[torch.Tensor], factor: float) -> None:
    """output = factor * (((parts[0] + parts[1]) + parts[2]) + ...), added in fp32 for 16-bit types.

    output: may be one of `parts`. The other parts are scratch memory afterwards.
    """
    if output.dtype in _HALF:
        _sum_16_bit(output, parts, factor)
        return
    scratch = parts[0] if parts[0].data_ptr() != output.data_ptr() else parts[1]
    whole = factor == 1.0 and len(parts) == 2  # one pass, nothing to keep in the cache
    block = output.numel() if whole else _BLOCK
    for start in range(0, output.numel(), max(1, block)):
        part = slice(start, start + block)
        first, second, *rest = [tensor[part] for tensor in parts]
        target = scratch[part] if rest else output[part]
        torch.add(first, second, out=target)
        for index, tensor in enumerate(rest):
            last = index == len(rest) - 1
            torch.add(target, tensor, out=output[part] if last else target)
        if factor != 1.0:
            output[part].mul_(factor)


def _sum_16_bit(output: torch.Tensor, parts: Sequence[torch.Tensor], factor: float) -> None:
    total, term = torch.empty(_BLOCK), torch.empty(_BLOCK)
    for start in range(0, output.numel(), _BLOCK):
        part = slice(start, min(start + _BLOCK, output.numel()))
        length = part.stop - part.start
        total[:length].copy_(parts[0][part])
        for tensor in parts[1:]:
            total[:length].add_(term[:length].copy_(tensor[part]))
        if factor != 1.0:
            total[:length].mul_(factor)
        output[part].copy_(total[:length])


def _mean_factor(op: str, size: int) -> float:
    return 1.0 / size if op == "mean" else 1.0


def _averages(group: Group) -> bool:
    return dist.get_backend(group) == "nccl"


def _started(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None


def _check_op(op: str, known: tuple[str, ...]) -> None:
    assert op in known, f"op={op!r} must be one of {', '.join(known)}"


