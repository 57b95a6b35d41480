"""Data-parallel engines under one interface, all on the plain model of `plain_gpt.py`: what `engine_worker.py` runs on each rank.

An engine takes microbatches and says where its time went:

    forward | backward | reduce | optimizer | gather      `clock(phase)` closes a phase
                                                          `clock.move(...)` gives waiting time to the phase it belongs to

Imports torch only; the product's, DeepSpeed's and megatron-core's engines import their package when they are built. Peers run in
an environment of their own (`peer_environment.py`), which has no product.
"""

import contextlib
import dataclasses
import pathlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from plain_gpt import ADAMW, Job, PlainGPT, adamw

PHASES = ("forward", "backward", "reduce", "optimizer", "gather")
CYCLE = 4  # different global batches
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all engines of a run share.

    dtype: fp32 or bf16 (16-bit arithmetic, fp32 main params and sums where the engine has them). bucket_size: elements.
    """

    job: Job
    dtype: str
    global_batch: int
    micro_batch: int
    bucket_size: int
    clip: float = 1.0
    nan_check: bool = True

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Setup":
        """Inverse of `dataclasses.asdict`."""
        return Setup(**{**values, "job": Job(**values["job"])})

    def batches(self, rank: int, size: int) -> list[list[Batch]]:
        """This rank's microbatches of each global batch of the cycle: (tokens, labels) [b, s]."""
        generator = torch.Generator().manual_seed(2)
        own = self.global_batch // size
        cycle = []
        for _ in range(CYCLE):
            samples = torch.randint(self.job.vocab, (self.global_batch, self.job.sequence + 1), generator=generator)
            parts = samples[rank * own : (rank + 1) * own].split(self.micro_batch)
            cycle.append([(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts])
        return cycle


class Clock:
    """Seconds per phase of a step."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._since = time.perf_counter()

    def __call__(self, phase: str) -> None:
        """What ran since the last call was `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._since
        self._since = now

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count part of one phase as another."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds


class Engine(ABC):
    """A model in training on this rank."""

    micro_batches = 1

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        torch.manual_seed(1)
        self.plain = PlainGPT(setup.job)

    def step(self, batches: Sequence[Batch], clock: Clock) -> float:
        """One training step; the mean loss of this rank's microbatches."""
        loss = self.gradients(batches, clock)
        self.update(clock)
        return loss

    def gradients(self, batches: Sequence[Batch], clock: Clock) -> float:
        """The step up to the optimizer."""
        self.micro_batches = len(batches)
        total = 0.0
        self.begin()
        for index, (tokens, labels) in enumerate(batches):
            with self.accumulation(last=index == len(batches) - 1):
                loss = self.loss(tokens, labels)
                self.after_forward(clock)
                self.backward(loss)
                clock("backward")
            total += float(loss.detach()) / len(batches)
        self.reduce()
        clock("reduce")
        return total

    def begin(self) -> None:
        """Before the first microbatch."""
        return

    def accumulation(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around each microbatch."""
        return contextlib.nullcontext()

    @abstractmethod
    def loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Forward."""

    def after_forward(self, clock: Clock) -> None:
        """Close the phase."""
        clock("forward")

    def backward(self, loss: torch.Tensor) -> None:
        """Of the mean over the microbatches."""
        (loss / self.micro_batches).backward()

    def reduce(self) -> None:
        """Wait for the gradients, where that is a call of its own."""
        return

    @abstractmethod
    def update(self, clock: Clock) -> None:
        """Norm, clip, optimizer; closes its phases."""

    def finish(self) -> None:
        """Wait for what would hide under the next step."""
        return

    @abstractmethod
    def state(self) -> Iterable[torch.Tensor]:
        """Tensors of the model state that this rank keeps: params, grads, main params, moments."""

    def state_bytes(self) -> dict[str, int]:
        """Bytes of `state`, each piece of memory once; of them padding, where it is known."""
        storages = {}
        for tensor in self.state():
            local = getattr(tensor, "_local_tensor", tensor)
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return {"total": sum(storages.values())}


class TorchEngine(Engine):
    """What the engines of torch have in common: a wrapped module, an optimizer of torch's."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    autocast = False

    def loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            value = self.model(tokens, labels)
        assert isinstance(value, torch.Tensor)
        return value

    def clip(self) -> None:
        """By the global norm."""
        if self.setup.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.setup.clip)

    def update(self, clock: Clock) -> None:
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        clock("optimizer")

    def state(self) -> Iterator[torch.Tensor]:
        for param in self.model.parameters():
            yield param.detach()
            if param.grad is not None:
                yield param.grad
        yield from tensors_in(self.optimizer.state)


def tensors_in(states: dict[Any, Any]) -> Iterator[torch.Tensor]:
    """The moments in a torch optimizer's state (steps and other scalars are left out)."""
    for values in states.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor) and value.dim() > 0)


class Local(TorchEngine):
    """The compute alone: forward, backward, norm, clip, fused Adam on 1/d of the elements. Sends nothing; its ranks drift apart."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.model = self.plain.bfloat16() if setup.dtype == "bf16" else self.plain
        numel = sum(param.numel() for param in self.model.parameters())
        shard = torch.nn.Parameter(torch.zeros(-(-numel // dist.get_world_size())))
        shard.grad = torch.zeros_like(shard)
        self.optimizer = adamw([shard])

    def update(self, clock: Clock) -> None:
        self.clip()
        self.optimizer.step()
        for param in self.model.parameters():
            param.grad = None
        clock("optimizer")


class DDP(TorchEngine):
    """DistributedDataParallel with fused AdamW: the optimizer's state whole on every rank."""

    def __init__(self, setup: Setup, weights: str = "fp32") -> None:
        super().__init__(setup)
        self.autocast = setup.dtype == "bf16" and weights == "fp32"
        module = self.plain.bfloat16() if weights == "bf16" else self.plain
        width = 2 if weights == "bf16" else 4
        self.model = torch.nn.parallel.DistributedDataParallel(
            module, bucket_cap_mb=setup.bucket_size * width / 2**20, gradient_as_bucket_view=True
        )
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Over all parameters."""
        return adamw(self.model.parameters())

    def accumulation(self, last: bool) -> contextlib.AbstractContextManager[None]:
        assert isinstance(self.model, torch.nn.parallel.DistributedDataParallel)
        return contextlib.nullcontext() if last else self.model.no_sync()


class ZeroRedundancy(DDP):
    """DDP with ZeroRedundancyOptimizer: moments sharded by whole parameters, updated ones broadcast."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=False, **ADAMW)

    def state(self) -> Iterator[torch.Tensor]:
        for param in self.model.parameters():
            yield param.detach()
            if param.grad is not None:
                yield param.grad
        yield from tensors_in(self.optimizer.optim.state)  # type: ignore[attr-defined]


class FSDP2(TorchEngine):
    """fully_shard of each layer and of the model."""

    def __init__(self, setup: Setup, reshard: bool) -> None:
        super().__init__(setup)
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        half = torch.bfloat16 if setup.dtype == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.plain.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        self.model = fully_shard(self.plain, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        self.optimizer = adamw(self.model.parameters())

    def accumulation(self, last: bool) -> contextlib.AbstractContextManager[None]:
        self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return contextlib.nullcontext()


class NoSyncEngine(Engine):
    """`self.model` computes the loss and has Megatron's `no_sync` for all microbatches but the last."""

    model: Any

    def accumulation(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self.model.no_sync()

    def loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        value = self.model(tokens, labels)
        assert isinstance(value, torch.Tensor)
        return value


class Product(NoSyncEngine):
    """This project's DistributedDataParallel and DistributedOptimizer (or, `sharded` off, its plain one)."""

    def __init__(
        self,
        setup: Setup,
        sharded: bool = True,
        grad_reduce: bool = False,
        param_gather: bool = False,
        gather_with_step: bool = False,
    ) -> None:
        super().__init__(setup)
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, memory_report
        from megatron.core.process_groups_config import create_process_groups
        from megatron.core.rank_grid import RankGrid

        bf16 = setup.dtype == "bf16"
        self._finalize, self._memory_report = finalize_model_grads, memory_report
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=bf16,
            overlap_grad_reduce=grad_reduce,
            overlap_param_gather=param_gather,
            use_distributed_optimizer=sharded,
            bucket_size=setup.bucket_size,
            check_for_nan_in_grad=setup.nan_check,
        )
        module = self.plain.bfloat16() if bf16 else self.plain
        groups = create_process_groups(RankGrid(dp=dist.get_world_size()))
        self.model = DistributedDataParallel(None, ddp_config, module, pg_collection=groups)
        config = OptimizerConfig(
            lr=1e-4,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            bf16=bf16,
            clip_grad=setup.clip,
            use_distributed_optimizer=sharded,
            overlap_param_gather_with_optimizer_step=gather_with_step,
        )
        self.optimizer = get_megatron_optimizer(config, [self.model], no_weight_decay_cond=lambda name, param: False)

    def begin(self) -> None:
        self.model.zero_grad_buffer(overwrite=True)

    def after_forward(self, clock: Clock) -> None:
        clock("forward")
        clock.move(self.model.take_exposed_comm_time(), "forward", "gather")

    def reduce(self) -> None:
        self._finalize([self.model])
        self.model.take_exposed_comm_time()  # all of it is in the phase that closes now

    def update(self, clock: Clock) -> None:
        success, _, _ = self.optimizer.step()
        assert success, "the gradients are not finite"
        clock("optimizer")
        clock.move(self.model.take_exposed_comm_time(), "optimizer", "gather")

    def finish(self) -> None:
        self.optimizer.finish_param_sync()
        self.model.take_exposed_comm_time()

    def state(self) -> Iterable[torch.Tensor]:
        return ()

    def state_bytes(self) -> dict[str, int]:
        """As `memory_report` counts them, and what staging buffers hold."""
        return {**dataclasses.asdict(self.report), "total": self.report.total, "staging": self.model.staging.nbytes}

    @property
    def report(self) -> Any:
        """The product's own count."""
        return self._memory_report([self.model], self.optimizer)


def deepspeed(setup: Setup, stage: int) -> Engine:
    """DeepSpeed ZeRO."""
    from engine_deepspeed import DeepSpeed

    return DeepSpeed(setup, stage)


def megatron_core(setup: Setup) -> Engine:
    """megatron-core's DistributedOptimizer."""
    from engine_megatron_core import MegatronCore

    return MegatronCore(setup)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A contestant.

    title: in tables. package: what it needs beside torch. only_dtype: runs in no other. sharded: moments are spread over ranks.
    updates: engines of one kind of update reach the same weights in bf16 (fp32 weights, or bf16 ones rounded from fp32 main params).
    """

    title: str
    build: Callable[[Setup], Engine]
    package: str | None = None
    only_dtype: str | None = None
    sharded: bool = True
    updates: str = "main params"


def product(**flags: bool) -> Callable[[Setup], Engine]:
    """A builder."""
    return lambda setup: Product(setup, **flags)


REDUCE = {"grad_reduce": True}
GATHER = {**REDUCE, "param_gather": True}
OVERLAP = {**GATHER, "gather_with_step": True}
KINDS = {
    "local": Kind("compute alone", Local, updates="none"),
    "product": Kind("product, no overlap", product()),
    "product-reduce": Kind("product, overlap_grad_reduce", product(**REDUCE)),
    "product-gather": Kind("product, + overlap_param_gather", product(**GATHER)),
    "product-overlap": Kind("product, + overlap with optimizer step", product(**OVERLAP)),
    "product-ddp": Kind("product, plain optimizer, overlap", product(sharded=False, **REDUCE), sharded=False),
    "ddp": Kind("DDP + fused AdamW", DDP, sharded=False, updates="fp32 weights"),
    "ddp-bf16": Kind(
        "DDP + fused AdamW, bf16 weights", lambda setup: DDP(setup, "bf16"), None, "bf16", sharded=False, updates="bf16 weights"
    ),
    "zero-redundancy": Kind("DDP + ZeroRedundancyOptimizer", ZeroRedundancy, updates="fp32 weights"),
    "fsdp2": Kind("FSDP2, reshard after forward", lambda setup: FSDP2(setup, True), updates="fp32 weights"),
    "fsdp2-no-reshard": Kind("FSDP2, no reshard", lambda setup: FSDP2(setup, False), updates="fp32 weights"),
    "deepspeed-1": Kind("DeepSpeed ZeRO-1", lambda setup: deepspeed(setup, 1), "deepspeed"),
    "deepspeed-2": Kind("DeepSpeed ZeRO-2", lambda setup: deepspeed(setup, 2), "deepspeed"),
    "megatron-core": Kind("megatron-core DistributedOptimizer", megatron_core, "megatron-core"),
}
