"""tokens/s, MFU and peak memory on one GPU: the product's Trainer against plain torch of the same model, eager and compiled.

bf16: the product keeps fp32 main params, moments and gradients (distributed optimizer on one rank). `torch bf16` keeps everything in
bf16 (8 bytes per parameter instead of 18: less work, less precise), `torch autocast` has fp32 weights. All attend with SDPA, all
clip, all use a fused AdamW; compiled means each layer by itself. Contestants take turns; a model's eager and compiled contestants
share its weights.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.flops import flops_per_token, peak_tflops
from scripts.bench.common import Seconds, interleave, nothing, speed_ratio
from scripts.bench.job_flags import ProductRun, run_flags
from scripts.bench.plain_gpt import TINY, Job, PlainGPT, adamw, load_weights

ITERATIONS = 100_000
GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Size:
    """A job with its micro batch, and how it is measured."""

    name: str
    job: Job
    micro_batch: int
    steps: int = 3

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.micro_batch * self.job.sequence


SIZES = (
    Size("GPT-2 124M, seq 1024", Job(768, 12, 12, 3072, 50304, 1024, gpt2=True), micro_batch=16),
    Size("Llama-like 1.3B, seq 2048", Job(2048, 24, 16, 5632, 32000, 2048), micro_batch=4, steps=2),
)
TINY_SIZES = (
    Size("GPT-2-like tiny", dataclasses.replace(TINY, gpt2=True), micro_batch=2, steps=1),
    Size("Llama-like tiny", TINY, micro_batch=2, steps=1),
)


class TorchRun:
    """A training loop in plain torch on one microbatch."""

    def __init__(self, model: PlainGPT, tokens: torch.Tensor, labels: torch.Tensor, autocast: bool) -> None:
        self.model, self.tokens, self.labels, self.autocast = model, tokens, labels, autocast
        self.layers: Sequence[torch.nn.Module] = list(model.layers)
        self.optimizer = adamw(model.parameters())

    def step(self) -> float:
        """One step; its loss."""
        with torch.autocast(self.tokens.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.model(self.tokens, self.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


@dataclasses.dataclass
class Contestant:
    """A way to run a step. compiled_calls: per layer, what torch.compile made of it; empty = eager. own_bytes: model and states."""

    step: Callable[[], float]
    layers: Sequence[torch.nn.Module]
    compiled_calls: list[Callable[..., object]]
    own_bytes: int
    steps: int
    peak_bytes: int = 0

    def turn(self) -> None:
        """`steps` steps; notes the peak of memory. Layers are compiled during the turn only."""
        on_gpu = torch.cuda.is_available()
        others = torch.cuda.memory_allocated() - self.own_bytes if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for layer, call in zip(self.layers, self.compiled_calls, strict=False):
            layer._compiled_call_impl = call
        for _ in range(self.steps):
            self.step()
        for layer in self.layers:
            layer._compiled_call_impl = None
        if on_gpu:
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated() - others)


def memory_needed(job: Job, micro_batch: int, bytes_per_parameter: int) -> float:
    """Bytes, roughly: states of all contestants, activations of one (about 34 bytes per token, layer and feature), logits twice."""
    parameters = job.layers * (4 * job.hidden**2 + (3 if job.gated else 2) * job.hidden * job.ffn) + 2 * job.vocab * job.hidden
    tokens = micro_batch * job.sequence
    activations = tokens * job.layers * (34 * job.hidden + (8 * job.ffn if job.gated else 0))
    return parameters * bytes_per_parameter + activations + tokens * job.vocab * 12


def kinds_that_fit(size: Size, device: torch.device) -> tuple[tuple[str, ...], str]:
    """(yardsticks, "") that fit into the free memory beside the product, or ((), why none does)."""
    if device.type != "cuda":
        return ("torch bf16", "torch autocast"), ""
    free = torch.cuda.mem_get_info(device)[0] * 0.92
    choices = {("torch bf16", "torch autocast"): 18 + 8 + 16, ("torch bf16",): 18 + 8}
    for kinds, bytes_per_parameter in choices.items():
        if memory_needed(size.job, size.micro_batch, bytes_per_parameter) <= free:
            return kinds, ""
    needed = memory_needed(size.job, size.micro_batch, 18 + 8) / GIB
    return (), f"needs about {needed:.0f} GiB of GPU memory, {free / GIB:.0f} GiB are free"


def allocated(device: torch.device) -> int:
    """Bytes that live on the GPU now; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def build(size: Size, device: torch.device, kinds: Sequence[str], compiled: bool) -> tuple[dict[str, Contestant], ProductRun]:
    """All contestants with the same initial weights and samples."""
    contestants: dict[str, Contestant] = {}

    def add(name: str, step: Callable[[], float], layers: Sequence[torch.nn.Module], own_bytes: int) -> None:
        contestants[name] = Contestant(step, layers, [], own_bytes, size.steps)
        if compiled:
            for layer in layers:
                layer.compile()
            calls = [layer._compiled_call_impl for layer in layers]
            contestants[f"{name}, compiled"] = Contestant(step, layers, calls, own_bytes, size.steps)
        for layer in layers:
            layer._compiled_call_impl = None

    flags = run_flags(
        size.job,
        micro_batch=size.micro_batch,
        global_batch=size.micro_batch,
        iterations=ITERATIONS,
        num_workers=2 if device.type == "cuda" else 0,
    )
    before = allocated(device)
    groups = ProcessGroupCollection.single_process()
    product = ProductRun([*flags, "--bf16", "--use-distributed-optimizer"], device, groups)
    product.step()  # everything that lives between steps is allocated
    add("product", product.step, list(product.trainer.model.module.decoder.layers.values()), allocated(device) - before)
    sample = product.trainer.data.train_step(0)[0]
    for kind in kinds:
        before = allocated(device)
        with device:
            model = PlainGPT(size.job)
        load_weights(model, product.weights())
        model = model.bfloat16() if kind == "torch bf16" else model
        run = TorchRun(model, sample["tokens"].to(device), sample["labels"].to(device), kind == "torch autocast")
        run.step()
        add(kind, run.step, run.layers, allocated(device) - before)
    return contestants, product


def measure(
    size: Size, device: torch.device, *, compiled: bool, pairs: int, seconds_left: Callable[[], float]
) -> tuple[list[list[str]], list[dict[str, object]], str]:
    """(table rows, ratios, why it was left out or ""). Takes fewer than `pairs` turns where time is short."""
    kinds, reason = kinds_that_fit(size, device)
    if reason:
        return [], [], reason
    contestants, product = build(size, device, kinds, compiled)
    try:
        synchronize = torch.cuda.synchronize if device.type == "cuda" else nothing
        turns = {name: contestant.turn for name, contestant in contestants.items()}
        tried = interleave(turns, 1, synchronize=synchronize)  # after a turn that compiles
        fitting = int(0.9 * seconds_left() / sum(times[0] for times in tried.values()))
        if not fitting:
            return [], [], f"a turn takes {sum(times[0] for times in tried.values()):.0f} s, {seconds_left():.0f} s are left"
        seconds = interleave(turns, min(pairs, fitting), warmup=0, synchronize=synchronize)
        config = product.trainer.config.transformer_config()
    finally:
        product.trainer.data.close()
    flops = flops_per_token(config, size.job.sequence, size.job.vocab)
    peak = peak_tflops(device, torch.bfloat16, None)
    rows = [row_of(name, contestants[name], seconds, size, flops, peak) for name in contestants]
    pairs_of = [("product", kind) for kind in kinds]
    pairs_of += [("product, compiled", f"{kind}, compiled") for kind in kinds if compiled]
    return rows, [speed_ratio(seconds, own, theirs) for own, theirs in pairs_of], ""


def row_of(
    name: str, contestant: Contestant, seconds: Seconds, size: Size, flops: int, peak: float | None
) -> list[str]:
    """Contestant, tokens/s, ms per step, MFU, peak memory."""
    step = statistics.median(seconds[name]) / size.steps
    rate = size.tokens / step
    mfu = f"{rate * flops / 1e12 / peak:.1%}" if peak else "peak not known"
    memory = f"{contestant.peak_bytes / GIB:.1f}" if contestant.peak_bytes else "-"
    return [name, f"{rate:.0f}", f"{step * 1e3:.1f}", mfu, memory]
