"""Training throughput of the product's GPT model in one process against plain torch of the same model (target 6, reference job R).

A step is forward, backward and torch's fused AdamW on one microbatch of random tokens; both start from the same weights, and their
losses are compared. This measures the model alone; `bench_training.py` measures the whole trainer.

    python scripts/bench/bench_single_process.py --dtype fp32 bf16 --pairs 10 [--compile] [--threads 2] [--micro-batch-size 4]
"""

import argparse
import os
import pathlib
import statistics
import sys
from collections.abc import Callable

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.gpt_builder import compile_model
from scripts.bench.common import Report, add_common_arguments, interleave, speed_ratio
from scripts.bench.plain_gpt import TINY, Job, PlainGPT, adamw, load_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Step = Callable[[], float]


def product_model(job: Job, dtype: str, compiled: bool) -> GPTModel:
    """The product's model for R."""
    config = TransformerConfig(
        num_layers=job.layers,
        hidden_size=job.hidden,
        num_attention_heads=job.heads,
        ffn_hidden_size=job.ffn,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation_func="swiglu",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_backend="unfused" if compiled else "auto",
        torch_compile=compiled,
        torch_compile_scope="model",
        bf16=dtype == "bf16",
    )
    groups = ProcessGroupCollection.single_process()
    return GPTModel(config, vocab_size=job.vocab, max_sequence_length=job.sequence, pg_collection=groups)


def training_step(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Step:
    """One step; returns its loss."""
    optimizer = adamw(model.parameters())

    def step() -> float:
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(value.detach())

    return step


def contestants(job: Job, dtype: str, micro_batch: int, compiled: bool) -> dict[str, Step]:
    """Steps of the product and of plain torch on the same weights and tokens; compiled ones with unfused (manual) attention."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(job.vocab, (micro_batch, job.sequence), generator=generator) for _ in range(2))
    product = product_model(job, dtype, compiled)
    plain = PlainGPT(job, manual_attention=compiled).to(DTYPES[dtype])
    load_weights(plain, dict(product.named_parameters()))
    plain_forward: Callable[..., torch.Tensor] = plain
    if compiled:
        compile_model(product)
        plain_forward = torch.compile(plain)
    return {
        "product": training_step(product, lambda: product(tokens, labels=labels).mean()),
        "plain torch": training_step(plain, lambda: plain_forward(tokens, labels)),
    }


def measure(job: Job, dtype: str, options: argparse.Namespace, report: Report) -> None:
    """One dtype: prove that both train the same model, then time them."""
    steps = contestants(job, dtype, options.micro_batch_size, options.compile)
    losses = [(steps["product"](), steps["plain torch"]()) for _ in range(2)]
    difference = max(abs(own - theirs) / theirs for own, theirs in losses)
    if difference > (1e-4 if dtype == "fp32" else 2e-2):
        raise SystemExit(f"losses differ by {difference:.1e}: the two models are not the same")
    seconds = interleave(steps, options.pairs)
    tokens = options.micro_batch_size * job.sequence
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    title = f"{dtype}{', compiled' if options.compile else ''}"
    report.ratio(title, speed_ratio(seconds, "product", "plain torch"), ">= 0.98", tokens_per_s=rates)
    report.say("  tokens/s: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add_common_arguments(parser, pairs=8)
    parser.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--layers", type=int, default=Job.layers)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--compile", action="store_true", help="torch.compile on both, both with unfused (manual) attention")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = Report(options.json)
    job = TINY if options.tiny else Job(layers=options.layers)
    report.say(f"{'tiny model' if options.tiny else 'R'} with {job.layers} layers, micro batch {options.micro_batch_size}")
    for dtype in options.dtype:
        measure(job, dtype, options, report)
    report.close()


if __name__ == "__main__":
    main()
