"""megatron-core's DistributedDataParallel and DistributedOptimizer as an engine, all overlap on.

The package knows CUDA only. On CPU, streams and events are stood in for by ones that do nothing (collectives of gloo run in
threads of their own and are waited for through their handles), `device="cuda"` means the CPU, and a tensor's type is called what
the package expects.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from engines import Clock, NoSyncEngine, Setup


class NoStream:
    """Stands in for a CUDA stream and for an event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def nothing(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to order."""

    wait_stream = wait_event = synchronize = record = wait = nothing

    def record_event(self, *args: Any) -> "NoStream":
        """An event."""
        return self


def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`make` with device="cuda" read as the CPU."""

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def stand_in_for_cuda() -> None:
    """Let the package run without CUDA."""
    type_of = torch.Tensor.type

    def cuda_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = type_of(tensor, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name

    stream = NoStream()
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = NoStream
    cuda.stream = lambda *args: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *args: stream
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = cuda.empty_cache = lambda *args: None
    torch.Tensor.type = cuda_type  # type: ignore[assignment, method-assign]
    for name in ("tensor", "zeros", "empty", "ones"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


class MegatronCore(NoSyncEngine):
    """The package's classes around the plain model."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        stand_in_for_cuda()
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        parallel_state.initialize_model_parallel()
        self._finalize = finalize_model_grads
        bf16 = setup.dtype == "bf16"
        module = self.plain.bfloat16() if bf16 else self.plain
        job = setup.job
        model_config = TransformerConfig(
            num_layers=job.layers, hidden_size=job.hidden, num_attention_heads=job.heads, bf16=bf16
        )
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=bf16,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
            bucket_size=setup.bucket_size,
        )
        self.model = DistributedDataParallel(model_config, ddp_config, module)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-4,
                weight_decay=0.1,
                adam_beta1=0.9,
                adam_beta2=0.95,
                bf16=bf16,
                params_dtype=torch.bfloat16 if bf16 else torch.float32,
                clip_grad=setup.clip,
                use_distributed_optimizer=True,
                overlap_param_gather=True,
            ),
            [self.model],
        )

    def begin(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def reduce(self) -> None:
        self.model.finish_grad_sync()

    def update(self, clock: Clock) -> None:
        self.optimizer.step()
        clock("optimizer")

    def finish(self) -> None:
        for group in self.model.bucket_groups:
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
        dist.barrier()

    def state(self) -> Iterator[torch.Tensor]:
        for buffer in self.model.buffers:
            yield buffer.param_data
            yield buffer.grad_data
        for param in self.model.parameters():
            yield param.detach()
        for optimizer in self.optimizer.chained_optimizers:
            for values in optimizer.optimizer.state.values():
                yield from (value for value in values.values() if isinstance(value, torch.Tensor) and value.dim() > 0)
            for group in optimizer.optimizer.param_groups:
                yield from group["params"]
