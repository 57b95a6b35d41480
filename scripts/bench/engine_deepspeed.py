"""DeepSpeed ZeRO-1 and ZeRO-2 as an engine: its own loop calls, torch's fused AdamW inside, buckets of the product's size."""

import os
from collections.abc import Iterator

import torch
from engines import Clock, Engine, Setup, tensors_in
from plain_gpt import adamw


class DeepSpeed(Engine):
    """`deepspeed.initialize` with overlap_comm."""

    def __init__(self, setup: Setup, stage: int) -> None:
        super().__init__(setup)
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("LOCAL_SIZE", os.environ["WORLD_SIZE"])
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        config = {
            "train_batch_size": setup.global_batch,
            "train_micro_batch_size_per_gpu": setup.micro_batch,
            "gradient_clipping": setup.clip,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                "overlap_comm": True,
                "reduce_bucket_size": setup.bucket_size,
                "allgather_bucket_size": setup.bucket_size,
            },
            "steps_per_print": 10**9,
            "bf16": {"enabled": setup.dtype == "bf16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        }
        module = self.plain.bfloat16() if setup.dtype == "bf16" else self.plain  # buffers too, which the package leaves alone
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=adamw(module.parameters()), config=config
        )

    def loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        value = self.engine(tokens, labels)
        assert isinstance(value, torch.Tensor)
        return value

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)  # divides by the number of microbatches itself
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def update(self, clock: Clock) -> None:
        self.engine.step()
        clock("optimizer")

    def state(self) -> Iterator[torch.Tensor]:
        for param in self.engine.module.parameters():
            yield param.detach()
            if param.grad is not None:
                yield param.grad
        yield from tensors_in(self.optimizer.optimizer.state)
        for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_groups_gradients_flat"):
            yield from getattr(self.optimizer, name, ())  # bf16 with fp32 sums has an optimizer of its own in stage 1
        for grads in getattr(self.optimizer, "averaged_gradients", {}).values():
            yield from (grad for grad in grads or () if grad is not None)
