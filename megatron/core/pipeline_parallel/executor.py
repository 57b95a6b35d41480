"""PipelineExecutor: runs a rank's actions of a PipelinePlan. It knows neither model nor loss; every schedule is run by this code.

    F   take the hidden states (received, or from this rank's own other chunk), run the chunk, pass them on
    B   take the gradient of what F gave, run backward, pass the gradient of F's input on
    W   form the weights' gradients that B left

Receives are posted one action ahead, so a message travels while the action before it computes.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.pipeline_parallel.p2p_communication import PipelineCommunicator
from megatron.core.pipeline_parallel.schedule_plan import Action, Kind, PipelinePlan, needs
from megatron.core.tensor_parallel.deferred_grads import DeferredGrads

# (chunk, microbatch, hidden states or None for the first part) -> hidden states; of the last part, the scalar to differentiate
ForwardFunction = Callable[[int, int, torch.Tensor | None], torch.Tensor]


@dataclasses.dataclass
class _Held:
    """What F leaves for B. output: the edge of the graph alone, so that the tensor itself is free once it was sent; None where
    nothing is trained."""

    hidden: torch.Tensor | None
    output: Any


@dataclasses.dataclass
class PipelineExecutor:
    """Forward and backward of all microbatches of one step, on one rank.

    plan: of all ranks. rank: this stage. communicator: to the other stages; None with one stage.
    chunks: this rank's model chunks; their gradient reductions start with the last microbatch's last gradient.
    forward: computes a chunk, under `torch.no_grad` where the plan has forwards only.
    message_shape: shape of the hidden states of a microbatch. dtype, device: of messages.
    timed: context manager around the computation of an action of this kind.
    """

    plan: PipelinePlan
    rank: int
    communicator: PipelineCommunicator | None
    chunks: Sequence[DistributedDataParallel]
    forward: ForwardFunction
    message_shape: Callable[[int], tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    timed: Callable[[Kind], contextlib.AbstractContextManager[None]] = lambda kind: contextlib.nullcontext()

    def __post_init__(self) -> None:
        self.actions = self.plan.actions[self.rank]
        self.trains = any(action.kind is Kind.B for action in self.actions)
        self.held: dict[tuple[int, int], _Held] = {}
        self.deferred: dict[tuple[int, int], DeferredGrads] = {}
        self.local: dict[tuple[Kind, int, int], torch.Tensor] = {}  # passed on inside this rank: (kind, part, microbatch)
        self.posted: dict[Action, tuple[torch.Tensor, Any]] = {}

    def run(self) -> None:
        """Run this rank's actions."""
        for index, action in enumerate(self.actions):
            self._post(action)
            if index + 1 < len(self.actions):
                self._post(self.actions[index + 1])
            with self._grad_sync_of(action):
                if action.kind is Kind.F:
                    self._run_forward(action)
                elif action.kind is Kind.B:
                    self._run_backward(action)
                else:
                    with self.timed(action.kind):
                        self.deferred.pop((action.chunk, action.microbatch)).run()
        if self.communicator is not None:
            self.communicator.finish_sends()
        assert not self.held and not self.local and not self.posted and not self.deferred

    def _run_forward(self, action: Action) -> None:
        hidden = self._incoming(action)
        if hidden is not None and self.trains:
            hidden.requires_grad_()
        with self.timed(action.kind):
            output = self.forward(action.chunk, action.microbatch, hidden)
        if self._part(action) < self.plan.parts - 1:
            self._pass_on(output, action)
        if self.trains:
            edge = torch.autograd.graph.get_gradient_edge(output) if output.requires_grad else None
            self.held[action.chunk, action.microbatch] = _Held(hidden, edge)

    def _run_backward(self, action: Action) -> None:
        held = self.held.pop((action.chunk, action.microbatch))
        grad = self._incoming(action)
        recording: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.plan.split_backward:
            deferred = self.deferred[action.chunk, action.microbatch] = DeferredGrads()
            recording = deferred.recording()
        if held.output is not None:
            with self.timed(action.kind), recording:
                torch.autograd.backward(held.output, grad)
        if held.hidden is not None:
            assert held.hidden.grad is not None
            self._pass_on(held.hidden.grad, action)

    # Messages

    def _incoming(self, action: Action) -> torch.Tensor | None:
        """Hidden states for F, or gradient of the output for B; None where the part begins or ends the model."""
        need = self._need(action)
        if need is None:
            return None
        if need in self.local:
            return self.local.pop(need)
        buffer, handle = self.posted.pop(action)
        handle.wait()
        return buffer

    def _post(self, action: Action) -> None:
        """Start receiving what an action takes from another rank."""
        need = self._need(action)
        if need is None or action in self.posted:
            return
        source = self.plan.place(need[1])[0]
        if source != self.rank:
            assert self.communicator is not None
            buffer = torch.empty(self.message_shape(action.microbatch), dtype=self.dtype, device=self.device)
            self.posted[action] = (buffer, self.communicator.receive(buffer, source, action.kind))

    def _pass_on(self, tensor: torch.Tensor, action: Action) -> None:
        part = self._part(action)
        target = self.plan.place(part + 1 if action.kind is Kind.F else part - 1)[0]
        if target == self.rank:
            self.local[action.kind, part, action.microbatch] = tensor.detach()
        else:
            assert self.communicator is not None
            self.communicator.send(tensor, target, action.kind)

    def _need(self, action: Action) -> tuple[Kind, int, int] | None:
        """(kind, part, microbatch) whose message the action takes; None for what it has itself."""
        need = needs(self.plan, self.rank, action)
        own = action.kind is Kind.W or need is None or (action.kind is Kind.B and need[0] is Kind.F)
        return None if own else need

    def _part(self, action: Action) -> int:
        return self.plan.part_of(self.rank, action.chunk)

    # Gradient buffers

    def _grad_sync_of(self, action: Action) -> contextlib.AbstractContextManager[None]:
        """A chunk's reductions may start with its last microbatch's gradients only."""
        last = action.microbatch == self.plan.microbatches - 1
        return contextlib.nullcontext() if last or action.kind is Kind.F else self.chunks[action.chunk].no_sync()
