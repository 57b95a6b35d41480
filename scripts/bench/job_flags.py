"""The benchmark jobs as flags of `pretrain_gpt.py`, and a Trainer of the product built from them."""

from collections.abc import Sequence

import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.callbacks import Callback
from megatron.training.config import load_run_config
from megatron.training.metrics import StepResult
from megatron.training.trainer import Trainer
from scripts.bench.plain_gpt import Job


def model_flags(job: Job) -> list[str]:
    """The model of a job. NullTokenizer adds one id (EOD) to its vocabulary."""
    flags = ["--num-layers", job.layers, "--hidden-size", job.hidden, "--num-attention-heads", job.heads]
    flags += ["--ffn-hidden-size", job.ffn, "--vocab-size", job.vocab - 1, "--seq-length", job.sequence]
    flags += ["--hidden-dropout", 0, "--attention-dropout", 0]
    if job.gpt2:
        flags += ["--position-embedding-type", "learned_absolute", "--normalization", "LayerNorm"]
        flags += ["--activation-func", "gelu_tanh"]
    else:
        flags += ["--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"]
        flags += ["--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    return [str(flag) for flag in flags]


def run_flags(
    job: Job, *, micro_batch: int, global_batch: int, iterations: int, clip_grad: float = 1.0, num_workers: int = 0
) -> list[str]:
    """Model, batches, optimizer and synthetic data of a run that logs nothing on the way and saves nothing."""
    flags = ["--micro-batch-size", micro_batch, "--global-batch-size", global_batch, "--train-iters", iterations]
    flags += ["--eval-iters", 0, "--log-interval", iterations, "--clip-grad", clip_grad]
    flags += ["--lr", 1e-4, "--lr-decay-style", "constant", "--weight-decay", 0.1, "--adam-beta1", 0.9, "--adam-beta2", 0.95]
    flags += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--num-workers", num_workers, "--progress-bar", "off"]
    return [*model_flags(job), *(str(flag) for flag in flags)]


class LastResult(Callback):
    """Keeps the newest step's result."""

    def __init__(self) -> None:
        self.result: StepResult | None = None

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Called by the trainer."""
        self.result = result

    @property
    def loss(self) -> float:
        """Mean loss of the newest step's tokens."""
        assert self.result is not None
        return self.result.loss_sum / self.result.tokens


class ProductRun:
    """A Trainer that a benchmark walks step by step: everything that `fit` does in a step, logging and accounting included."""

    def __init__(self, flags: Sequence[str], device: torch.device, groups: ProcessGroupCollection) -> None:
        self._last = LastResult()
        self.trainer = Trainer(load_run_config(flags).config, device=device, groups=groups, callbacks=[self._last])
        self.trainer.model.train()

    def step(self) -> float:
        """One training step; the global batch's mean loss."""
        self.trainer._iteration()
        return self._last.loss

    def finish(self) -> None:
        """Wait for the gathers that would hide under the next step's forward."""
        self.trainer.optimizer.finish_param_sync()

    def weights(self) -> dict[str, torch.Tensor]:
        """By logical name."""
        return dict(self.trainer.model.module.named_parameters())
