"""Collectives over a process group: the same numbers on every backend, in every run.

- `mean` is a true mean everywhere (gloo has none of its own: the sum is divided here).
- On CPU reduce-scatter, all-gather and all-to-all are exchanges of point-to-point messages, which move fewer bytes than gloo's
  own. A reduction's chunks are added up **in rank order and in fp32**, so that a result depends neither on timing nor on
  whether it came from a reduce-scatter or an all-reduce:

      rank 0  [a0 a1 a2]        to 1: a1, to 2: a2      a0 + b0 + c0
      rank 1  [b0 b1 b2]        to 0: b0, to 2: b2      a1 + b1 + c1
      rank 2  [c0 c1 c2]        to 0: c0, to 1: c1      a2 + b2 + c2

  A chunk travels in pieces; the sum of one piece is formed while the next ones arrive. Small tensors are exchanged by gloo's
  all-to-all and all-gather, which move the same bits: the sums are the same whichever way they came.
- On CUDA they are the backend's own. `by_all_to_all=True` has 16-bit values summed in fp32 there too.

`group=None` stands for one process: nothing is sent, the result is the input. Functions return a `Work` when `async_op`, else
None; `start_*` take several tensors and return a `Work` for each. Collectives on one group must be started in the same order on
all of its ranks. Works may be waited for in any order, but those of `all_reduce(rank_order=True)` in the same one on all ranks.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None

_HALF = (torch.float16, torch.bfloat16)
_BLOCK = 1 << 16  # elements summed at a time, so that several operands stay in the cache
_PIECE = 4 << 20  # bytes per message: while the next one arrives this one is summed
_SMALL = 2 << 20  # bytes of a whole tensor from which messages beat gloo's own exchange, and two phases of an all-reduce one

# torch 2.13 renamed these two.
_native_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
_native_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


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
        self._free: dict[tuple[torch.device, torch.dtype, int], list[torch.Tensor]] = {}
        self.nbytes = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised 1-D tensor with the size, dtype and device of `like`."""
        free = self._free.get((like.device, like.dtype, like.numel()))
        if free:
            return free.pop()
        tensor = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        self.nbytes += tensor.nbytes
        return tensor

    def give_back(self, tensor: torch.Tensor) -> None:
        """Make a tensor of `take` available again."""
        self._free.setdefault((tensor.device, tensor.dtype, tensor.numel()), []).append(tensor)


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
            floating). Has a second phase for large tensors.
        staging: where `rank_order` takes its buffers.
    """
    return _waited(start_all_reduce([tensor], group, op, rank_order=rank_order, staging=staging)[0], async_op)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Group,
    op: str = "sum",
    async_op: bool = False,
    *,
    by_all_to_all: bool = False,
    staging: Staging | None = None,
) -> Work | None:
    """Reduce `input` over the group; rank r keeps chunk r of the result in `output`.

    Args:
        output: [n / size], 1-D; may be this rank's own chunk of `input`. The rest of `input` is left as it was.
        input: [n], 1-D, contiguous, n a multiple of the group's size.
        op: sum or mean. 16-bit values are added in fp32 on CPU and rounded once.
        by_all_to_all: exchange the chunks by the backend's all-to-all and sum them here, in fp32 and in rank order, also on CUDA.
        staging: where the chunks of other ranks are received.
    """
    works = start_reduce_scatter([output], [input], group, op, by_all_to_all=by_all_to_all, staging=staging)
    return _waited(works[0], async_op)


def all_gather(output: torch.Tensor, input: torch.Tensor, group: Group, async_op: bool = False) -> Work | None:
    """Concatenate every rank's `input` in rank order into `output`.

    Args:
        output: [n], 1-D, contiguous.
        input: [n / size], 1-D; may be this rank's own chunk of `output`.
    """
    return _waited(start_all_gather([output], [input], group)[0], async_op)


def start_all_reduce(
    tensors: Sequence[torch.Tensor],
    group: Group,
    op: str = "sum",
    *,
    rank_order: bool = False,
    staging: Staging | None = None,
) -> list[Work]:
    """`all_reduce` of each tensor; those of one dtype on CUDA as one launch."""
    _check_op(op, ("sum", "mean", "max", "min"))
    size, sums = group_size(group), op in ("sum", "mean")
    if size == 1:
        return [_Finished(tensor if sums else None) for tensor in tensors]
    assert group is not None
    if rank_order and sums and _on_cpu(tensors):
        return [_ordered_all_reduce(tensor, group, _mean_factor(op, size), staging or Staging()) for tensor in tensors]
    reduce_op = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(op) or _native_sum(op, group)
    factor = 1.0 if reduce_op == dist.ReduceOp.AVG else _mean_factor(op, size)

    def start(index: int, async_op: bool) -> Any:
        return dist.all_reduce(tensors[index], op=reduce_op, group=group, async_op=async_op)

    return _native(start, tensors, group, factor)


def start_reduce_scatter(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: Group,
    op: str = "sum",
    *,
    by_all_to_all: bool = False,
    staging: Staging | None = None,
) -> list[Work]:
    """`reduce_scatter` of each input; those of one dtype on CUDA as one launch."""
    _check_op(op, ("sum", "mean"))
    size, pairs = group_size(group), list(zip(outputs, inputs, strict=True))
    for output, input in pairs:
        assert output.numel() * size == input.numel(), (output.shape, input.shape, size)
    if size == 1:
        return [_Finished(_copied(output, input)) for output, input in pairs]
    assert group is not None
    if by_all_to_all or _on_cpu(inputs):
        factor, staging = _mean_factor(op, size), staging or Staging()
        return [
            _AllToAllReduceScatter(output, input, group, factor, staging)
            if by_all_to_all or input.nbytes < _SMALL
            else _ReduceScatter(output, list(input.view(size, -1).unbind(0)), group, factor, staging)
            for output, input in pairs
        ]
    reduce_op = _native_sum(op, group)

    def start(index: int, async_op: bool) -> Any:
        return _native_reduce_scatter(outputs[index], inputs[index], op=reduce_op, group=group, async_op=async_op)

    return _native(start, outputs, group, 1.0 if reduce_op == dist.ReduceOp.AVG else _mean_factor(op, size))


def start_all_gather(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: Group) -> list[Work]:
    """`all_gather` of each input; those of one dtype on CUDA as one launch."""
    size, rank = group_size(group), group_rank(group)
    for output, input in zip(outputs, inputs, strict=True):
        assert input.numel() * size == output.numel(), (output.shape, input.shape, size)
    if size == 1 or _on_cpu(outputs):
        for output, input in zip(outputs, inputs, strict=True):
            _copied(output.view(size, -1)[rank], input)
    if size == 1:
        return [_Finished(None) for _ in outputs]
    assert group is not None

    def start(index: int, async_op: bool) -> Any:
        own = outputs[index].view(size, -1)[rank] if _on_cpu(outputs) else inputs[index]
        return _native_all_gather(outputs[index], own, group=group, async_op=async_op)

    if _on_cpu(outputs):
        return [
            _Native(start(index, True), output, None)
            if output.nbytes < _SMALL
            else _AllGather(list(output.view(size, -1).unbind(0)), group)
            for index, output in enumerate(outputs)
        ]
    return _native(start, outputs, group, None)


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
    if group is not None and size > 1 and not _on_cpu([output]):
        handle = dist.all_to_all_single(output, input, list(output_sizes), list(input_sizes), group=group, async_op=True)
        return _waited(_Native(handle, output, None), async_op)
    incoming, outgoing = output.split(list(output_sizes)), input.split(list(input_sizes))
    incoming[rank].copy_(outgoing[rank])
    if group is None or size == 1:
        return _waited(_Finished(None), async_op)
    return _waited(_AllToAll(incoming, outgoing, group), async_op)


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
    """The backend's own collective; `factor` completes a mean that the backend can't form, None = not a sum."""

    def __init__(self, handle: Any, result: torch.Tensor, factor: float | None) -> None:
        self.handle, self.result, self.factor = handle, result, factor

    def wait(self, scale: float | torch.Tensor | None = None) -> None:
        self.handle.wait()
        if self.factor is None:
            assert scale is None
            return
        factor = self.factor if scale is None else scale * self.factor
        if not (isinstance(factor, float) and factor == 1.0):
            self.result.mul_(factor)

    def arrived(self) -> bool | None:
        return self.handle.is_completed()


def _native(
    start: Callable[[int, bool], Any], results: Sequence[torch.Tensor], group: dist.ProcessGroup, factor: float | None
) -> list[Work]:
    """Works of `start(index, async_op)` for each result; those of one dtype are launched together."""
    works: list[Work] = []
    for _, run in itertools.groupby(range(len(results)), key=lambda index: results[index].dtype):
        indices = list(run)
        if len(indices) == 1:
            handle = start(indices[0], True)
        else:
            with dist._coalescing_manager(group, async_ops=True) as handle:
                for index in indices:
                    start(index, False)
            handle = _WaitsOnce(handle)
        works += [_Native(handle, results[index], factor) for index in indices]
    return works


class _WaitsOnce:
    """The handle that several works share: on gloo a second wait would bring back what has been scaled since."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()
        self.handle = None

    def is_completed(self) -> bool:
        return self.handle is None or all(work.is_completed() for work in self.handle.works)


class _Messages:
    """Point-to-point messages: gloo tells of their arrival in `wait` alone."""

    def arrived(self) -> bool | None:
        return None


class _ReduceScatter(_Messages):
    """Exchange of chunks, then the sum in rank order; `chunks[rank]` of the own input goes to nobody."""

    def __init__(
        self, output: torch.Tensor, chunks: list[torch.Tensor], group: dist.ProcessGroup, factor: float, staging: Staging
    ) -> None:
        rank = group_rank(group)
        self.output, self.factor, self.staging = output, factor, staging
        self.parts = [chunk if peer == rank else staging.take(output) for peer, chunk in enumerate(chunks)]
        self.received = [part for peer, part in enumerate(self.parts) if peer != rank]
        self.sends, self.arrivals = _exchange(chunks, self.parts, group)

    def sums(self, scale: float | torch.Tensor | None) -> Iterator[torch.Tensor]:
        """Wait for piece after piece; yields each piece of the result when it is there. To be read to the end."""
        factor = _scaled(self.factor, scale)
        arrivals = zip(*self.arrivals, strict=True)
        for output, arrived, *parts in zip(_pieces(self.output), arrivals, *map(_pieces, self.parts), strict=True):
            _wait_for(arrived)
            _sum_in_order(output, parts, factor)
            yield output
        _wait_for(self.sends)
        for tensor in self.received:
            self.staging.give_back(tensor)

    def wait(self, scale: float | torch.Tensor | None = None) -> None:
        for _ in self.sums(scale):
            pass


class _AllToAllReduceScatter:
    """The same sums from the backend's own all-to-all."""

    def __init__(
        self, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, factor: float, staging: Staging
    ) -> None:
        self.output, self.factor, self.staging = output, factor, staging
        self.received, self.size = staging.take(input), group_size(group)
        self.handle = dist.all_to_all_single(self.received, input, group=group, async_op=True)

    def wait(self, scale: float | torch.Tensor | None = None) -> None:
        self.handle.wait()
        parts = self.received.view(self.size, -1).unbind(0)
        if self.output.device.type == "cpu":
            _sum_in_order(self.output, parts, _scaled(self.factor, scale))
        else:
            _sum_on_device(self.output, parts, self.factor if scale is None else scale * self.factor)
        self.staging.give_back(self.received)

    def arrived(self) -> bool | None:
        return self.handle.is_completed()


class _AllGather(_Messages):
    """Every rank sends its chunk to each peer, straight into place."""

    def __init__(self, chunks: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        sends, arrivals = _exchange([chunks[group_rank(group)]] * len(chunks), chunks, group)
        self.handles = [*itertools.chain(*arrivals), *sends]

    def wait(self, scale: float | torch.Tensor | None = None) -> None:
        assert scale is None
        _wait_for(self.handles)


class _AllToAll(_Messages):
    """Messages of any length to and from each peer."""

    def __init__(self, incoming: Sequence[torch.Tensor], outgoing: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self.outgoing = outgoing  # must live until they are sent
        sends, arrivals = _exchange(outgoing, incoming, group)
        self.handles = [*itertools.chain(*arrivals), *sends]

    def wait(self, scale: float | torch.Tensor | None = None) -> None:
        assert scale is None
        _wait_for(self.handles)


def _ordered_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, factor: float, staging: Staging) -> Work:
    size = group_size(group)
    if tensor.nbytes * (size - 1) <= _SMALL:
        return _ExchangedAllReduce(tensor, group, factor, staging)
    if size == 2 and tensor.dtype not in _HALF:  # one order only, and nothing to be scaled before it is rounded
        return _Native(dist.all_reduce(tensor, group=group, async_op=True), tensor, factor)
    return _TwoPhaseAllReduce(tensor, group, factor, staging)


class _ExchangedAllReduce(_Messages):
    """Every rank sends all it has to each peer, and forms the whole sum."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup, factor: float, staging: Staging) -> None:
        rank, size = group_rank(group), group_size(group)
        self.tensor, self.factor, self.staging = tensor, factor, staging
        self.parts = [tensor if peer == rank else staging.take(tensor) for peer in range(size)]
        self.received = [part for peer, part in enumerate(self.parts) if peer != rank]
        sends, arrivals = _exchange([tensor] * size, self.parts, group)
        self.handles = [*itertools.chain(*arrivals), *sends]

    def wait(self, scale: float | torch.Tensor | None = None) -> None:
        _wait_for(self.handles)  # the sends too: the sum overwrites what they read
        _sum_in_order(self.tensor, self.parts, _scaled(self.factor, scale))
        for tensor in self.received:
            self.staging.give_back(tensor)


class _TwoPhaseAllReduce(_Messages):
    """A reduce-scatter in place, and in `wait` a gather: each piece of the result is sent to all peers when its sum is there.

    The peers' results are received over chunks that may still be on their way: a peer sends a piece of its result only when it
    has had our part of that piece. The second phase has a tag of its own, since it starts after whatever was started meanwhile.
    """

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup, factor: float, staging: Staging) -> None:
        self.group, self.chunks = group, list(torch.tensor_split(tensor, group_size(group)))
        self.reduction = _ReduceScatter(self.chunks[group_rank(group)], self.chunks, group, factor, staging)

    def wait(self, scale: float | torch.Tensor | None = None) -> None:
        arrivals = _receive_from_all(self.chunks, self.group, tag=1)
        sends = []
        for piece in self.reduction.sums(scale):
            sends += _send_to_all([piece] * len(self.chunks), self.group, tag=1)
        _wait_for([*itertools.chain(*arrivals), *sends])


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Views that make up a 1-D tensor, a message each."""
    return tensor.split(_PIECE // tensor.itemsize) if tensor.numel() else ()


def _exchange(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> tuple[list[Any], list[list[Any]]]:
    """Start both; (handles of `_send_to_all`, of `_receive_from_all`).

    Sends come first: gloo then moves the data in its own thread when the receive is announced. The other way round this thread
    does it, and holds meanwhile a lock for which gloo's thread spins.
    """
    return _send_to_all(outgoing, group), _receive_from_all(incoming, group)


def _receive_from_all(parts: Sequence[torch.Tensor], group: dist.ProcessGroup, tag: int = 0) -> list[list[Any]]:
    """Start receiving `parts[p]` from each peer p; a list of handles per peer, one per piece."""
    rank, size = group_rank(group), group_size(group)
    peers = [(rank - distance) % size for distance in range(1, size)]
    return [[dist.irecv(piece, group=group, group_src=peer, tag=tag) for piece in _pieces(parts[peer])] for peer in peers]


def _send_to_all(parts: Sequence[torch.Tensor], group: dist.ProcessGroup, tag: int = 0) -> list[Any]:
    """Start sending `parts[p]` to each peer p; every rank begins with another peer."""
    rank, size = group_rank(group), group_size(group)
    peers = [(rank + distance) % size for distance in range(1, size)]
    return [dist.isend(piece, group=group, group_dst=peer, tag=tag) for peer in peers for piece in _pieces(parts[peer])]


def _wait_for(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.wait()


def _scaled(factor: float, scale: float | torch.Tensor | None) -> float:
    return factor if scale is None else float(scale) * factor


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
    if len(parts) == 2 and factor == 1.0:
        torch.add(*parts, out=output)  # torch adds two 16-bit values in fp32 too, and rounds once
        return
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


def _sum_on_device(output: torch.Tensor, parts: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """`_sum_in_order` in whole passes, without a look at the values. No part may overlap `output`."""
    total = parts[0].float() if output.dtype in _HALF else parts[0]
    for part in parts[1:]:
        total += part
    output.copy_(total.mul_(factor))


def _mean_factor(op: str, size: int) -> float:
    return 1.0 / size if op == "mean" else 1.0


def _native_sum(op: str, group: dist.ProcessGroup) -> Any:
    """The backend's reduction for sum or mean; gloo's average is a sum, so it is not asked for one."""
    return dist.ReduceOp.AVG if op == "mean" and dist.get_backend(group) == "nccl" else dist.ReduceOp.SUM


def _on_cpu(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _copied(output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return output if output.data_ptr() == input.data_ptr() else output.copy_(input)


def _waited(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None


def _check_op(op: str, known: tuple[str, ...]) -> None:
    assert op in known, f"op={op!r} must be one of {', '.join(known)}"
