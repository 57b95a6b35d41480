"""Proof mode: every read and write of a bucket is checked against versions, and what is in flight against a copy.

    parameters   written --> dispatched --> arrived --> read        version = number of the optimizer's write
    gradients    accumulated --> dispatched --> reduced --> read    version = number of the step

A version may only take the next stage once it has taken the one before. Two checks don't trust the code that is checked:

- **Reads**: while any module runs, a dispatch mode sees the arguments of every tensor operation. An operation on a parameter
  whose newest version hasn't arrived is an error, whichever module it is in and whether or not that module waits for gathers.
- **Writes**: what is being sent is copied at the dispatch and compared when the collective is done.

Costs a Python call per operation and a copy of what is in flight; leaves every number as it is.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.distributed.param_and_grad_buffer import BucketEvent, _ParamAndGradBucketGroup
from megatron.core.errors import CommunicationStateError

_Sent = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass
class _Versions:
    """Of one bucket group. read: version of each parameter that a module last read. sent: (what is in flight, a copy) pairs."""

    written: int = 0
    dispatched: int = 0
    arrived: int = 0
    read: dict[torch.nn.Parameter, int] = dataclasses.field(default_factory=dict)
    step: int = 1  # of the gradients that are being accumulated
    reduce_dispatched: int = 0
    reduced: int = 0
    sent_params: _Sent = ()
    sent_grads: _Sent = ()


class OverlapCheck:
    """Observes the bucket groups of a wrapped module and raises CommunicationStateError at the first act out of order.

    Args:
        module: what is wrapped; reads are looked for while it or one of its sub-modules runs, and in its `state_dict`.
        groups: all bucket groups over its parameters.
        names: of the parameters, for messages.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        groups: Sequence[_ParamAndGradBucketGroup],
        names: Mapping[torch.nn.Parameter, str],
    ) -> None:
        self.names = names
        self._versions = {group: _Versions() for group in groups}
        self._group_of = {id(param): (param, group) for group in groups for param in group.params}
        self._handlers: dict[BucketEvent, Callable[..., None]] = {
            BucketEvent.GRADS_RESET: self._grads_reset,
            BucketEvent.GRAD_COMING: self._grad_coming,
            BucketEvent.REDUCE_STARTING: self._reduce_starting,
            BucketEvent.REDUCE_STARTED: self._reduce_started,
            BucketEvent.REDUCE_WAITING: self._reduce_waiting,
            BucketEvent.REDUCED: self._reduced,
            BucketEvent.GRADS_READING: self._grads_reading,
            BucketEvent.PARAMS_WRITTEN: self._params_written,
            BucketEvent.GATHER_STARTING: self._gather_starting,
            BucketEvent.GATHER_STARTED: self._gather_started,
            BucketEvent.GATHERED: self._gathered,
        }
        for group in groups:
            group.observers += (self._on_event,)
        self._reads = _ReadGuard(self.read)
        for child in module.modules():
            child.register_forward_pre_hook(torch.compiler.disable(self._reads.enter), prepend=True)
            child.register_forward_hook(torch.compiler.disable(self._reads.leave), always_call=True)
            child.register_state_dict_pre_hook(self._state_dict_read)

    def read(self, tensors: Iterable[Any]) -> None:
        """These are about to be read. Those that are no parameters of the module are passed over."""
        for tensor in tensors:
            found = self._group_of.get(id(tensor))
            if found is None:
                continue
            param, group = found
            versions = self._versions[group]
            if versions.arrived != versions.written:
                where = "is in flight" if versions.dispatched == versions.written else "has not been dispatched"
                self._refuse(
                    f"{self._name(param, group)} was read at version {versions.arrived}, but version {versions.written} is written "
                    f"and its gather {where}; call the module that owns the parameter first, or finish_param_sync()"
                )
            versions.read[param] = versions.arrived

    def _on_event(self, event: BucketEvent, group: _ParamAndGradBucketGroup, param: torch.nn.Parameter | None) -> None:
        handler = self._handlers.get(event)
        if handler is not None:
            handler(group, self._versions[group], *(() if param is None else (param,)))

    # Gradients

    def _grads_reset(self, group: _ParamAndGradBucketGroup, versions: _Versions) -> None:
        versions.step += 1

    def _grad_coming(self, group: _ParamAndGradBucketGroup, versions: _Versions, param: torch.nn.Parameter) -> None:
        if versions.reduce_dispatched == versions.step:
            self._refuse(
                f"a gradient of {self._name(param, group)} was added after its reduction had been dispatched; use no_sync() for "
                "all microbatches but the last, and zero_grad_buffer() between steps"
            )
        read = versions.read.get(param, versions.written)
        if read != versions.written:
            self._refuse(
                f"a gradient of {self._name(param, group)} belongs to version {read} of the parameter, but version "
                f"{versions.written} was written since; run the backward before the optimizer's step"
            )

    def _reduce_starting(self, group: _ParamAndGradBucketGroup, versions: _Versions) -> None:
        if versions.reduce_dispatched == versions.step:
            self._refuse(f"the gradient reduction of {group.name} was dispatched twice in one step")
        versions.reduce_dispatched = versions.step

    def _reduce_started(self, group: _ParamAndGradBucketGroup, versions: _Versions) -> None:
        versions.sent_grads = _copied(_sent_grads(group))

    def _reduce_waiting(self, group: _ParamAndGradBucketGroup, versions: _Versions) -> None:
        sent, versions.sent_grads = versions.sent_grads, ()
        if _changed(sent):
            self._refuse(f"gradients in {group.name} were changed while their reduction was in flight")

    def _reduced(self, group: _ParamAndGradBucketGroup, versions: _Versions) -> None:
        versions.reduced = versions.reduce_dispatched

    def _grads_reading(self, group: _ParamAndGradBucketGroup, versions: _Versions) -> None:
        if versions.reduced != versions.step:
            state = "is in flight" if versions.reduce_dispatched == versions.step else "was not dispatched"
            self._refuse(
                f"the optimizer read the gradients of {group.name} before they were reduced: the reduction {state}; call "
                "finalize_model_grads() or finish_grad_sync() before step()"
            )

    # Parameters

    def _params_written(self, group: _ParamAndGradBucketGroup, versions: _Versions) -> None:
        if versions.arrived != versions.dispatched:
            self._refuse(f"version {versions.written + 1} of {group.name} was written while version {versions.written} was in flight")
        versions.written += 1

    def _gather_starting(self, group: _ParamAndGradBucketGroup, versions: _Versions) -> None:
        if versions.arrived != versions.dispatched:
            self._refuse(f"the parameter gather of {group.name} was dispatched twice (version {versions.written} is in flight)")
        if versions.dispatched == versions.written:
            self._refuse(
                f"the parameter gather of {group.name} was dispatched before the optimizer's write: version {versions.written} has "
                "been gathered already; update the shard and call mark_written() first"
            )
        versions.dispatched = versions.written

    def _gather_started(self, group: _ParamAndGradBucketGroup, versions: _Versions) -> None:
        versions.sent_params = _copied(_sent_params(group))

    def _gathered(self, group: _ParamAndGradBucketGroup, versions: _Versions) -> None:
        sent, versions.sent_params = versions.sent_params, ()
        versions.arrived = versions.dispatched
        if _changed(sent):
            self._refuse(
                f"parameters in {group.name} were written while their gather was in flight: version {versions.dispatched} was "
                "dispatched before its write was complete"
            )

    def _state_dict_read(self, module: torch.nn.Module, *unused: Any) -> None:
        self.read(module.parameters(recurse=False))

    def _name(self, param: torch.nn.Parameter, group: _ParamAndGradBucketGroup) -> str:
        return f"{self.names[param]} in {group.name}"

    @staticmethod
    def _refuse(text: str) -> NoReturn:
        raise CommunicationStateError(f"check_overlap: {text}")


class _ReadGuard(TorchDispatchMode):
    """Shows `read` the arguments of every tensor operation between the outermost module's begin and end."""

    def __init__(self, read: Callable[[Iterable[Any]], None]) -> None:
        super().__init__()
        self._read, self._depth = read, 0

    def enter(self, *unused: Any) -> None:
        """A module begins."""
        if self._depth == 0:
            self.__enter__()
        self._depth += 1

    def leave(self, *unused: Any) -> None:
        """A module ends, or failed."""
        self._depth -= 1
        if self._depth == 0:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._read(tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def _sent_params(group: _ParamAndGradBucketGroup) -> list[torch.Tensor]:
    """This rank's shards, which a gather reads."""
    return [group.local_shard(bucket.param_data) for bucket in group.buckets if bucket.param_data is not None]


def _sent_grads(group: _ParamAndGradBucketGroup) -> list[torch.Tensor]:
    """What a reduce-scatter reads and leaves as it is until it is waited for. An all-reduce replaces everything."""
    if not group.ddp_config.use_distributed_optimizer:
        return []
    grads = [bucket.grad_data for bucket in group.buckets]
    if all(data.device.type == "cpu" for data in grads):
        return grads
    parts = [data.view(group.size, -1) for data in grads]  # elsewhere the backend writes this rank's shard meanwhile
    return [part for whole in parts for part in (whole[: group.rank], whole[group.rank + 1 :])]


def _copied(tensors: Iterable[torch.Tensor]) -> _Sent:
    return [(tensor, tensor.clone()) for tensor in tensors]


def _changed(sent: _Sent) -> bool:
    """Whether any bit is another one now (NaN is equal to itself)."""
    return not all(torch.equal(now.view(torch.uint8), before.view(torch.uint8)) for now, before in sent)
