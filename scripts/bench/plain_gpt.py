"""The benchmarks' yardstick: the same GPT in plain torch, as one writes it by hand. Imports torch only.

    python scripts/bench/plain_gpt.py        # one training step of reference job R; `bench_start.py` times it

Job R: Llama-like decoder, RMSNorm, RoPE, SwiGLU, no bias, untied, hidden 512, 8 layers, 8 heads, ffn 1408, vocabulary 8192, seq 256
(34.1 M parameters). A GPT-2-like job has LayerNorm, learned positions, GELU, biases and a tied head instead.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F


@dataclasses.dataclass(frozen=True)
class Job:
    """Sizes and kind of a model; the defaults are reference job R. gpt2: GPT-2's kind of layers instead of Llama's."""

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    ffn: int = 1408
    vocab: int = 8192
    sequence: int = 256
    gpt2: bool = False

    @property
    def gated(self) -> bool:
        """SwiGLU."""
        return not self.gpt2


TINY = Job(hidden=32, layers=2, heads=4, ffn=64, vocab=128, sequence=16)  # to try a benchmark script


def norm(job: Job) -> torch.nn.Module:
    """The job's kind of norm."""
    return torch.nn.LayerNorm(job.hidden) if job.gpt2 else torch.nn.RMSNorm(job.hidden, eps=1e-5)


class PlainLayer(torch.nn.Module):
    """A decoder layer; hidden states [b, s, h]."""

    def __init__(self, job: Job, manual_attention: bool) -> None:
        super().__init__()
        self.job, self.manual_attention = job, manual_attention
        self.norm1 = norm(job)
        self.qkv = torch.nn.Linear(job.hidden, 3 * job.hidden, bias=job.gpt2)
        self.proj = torch.nn.Linear(job.hidden, job.hidden, bias=job.gpt2)
        self.norm2 = norm(job)
        self.fc1 = torch.nn.Linear(job.hidden, (2 if job.gated else 1) * job.ffn, bias=job.gpt2)
        self.fc2 = torch.nn.Linear(job.ffn, job.hidden, bias=job.gpt2)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, hidden_keys: torch.Tensor) -> torch.Tensor:
        """x: [b, s, h]; cos, sin: [s, d / 2]; hidden_keys: boolean [s, s]."""
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.job.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        if not self.job.gpt2:
            q, k = rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
        if self.manual_attention:
            scores = (q @ k.transpose(-1, -2) * q.size(-1) ** -0.5).masked_fill(hidden_keys, float("-inf"))
            out = torch.softmax(scores.float(), dim=-1).to(v.dtype) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(out.transpose(1, 2).reshape(b, s, h))
        inner = self.fc1(self.norm2(x))
        if self.job.gpt2:
            return x + self.fc2(F.gelu(inner, approximate="tanh"))
        gate, up = inner.chunk(2, dim=-1)
        return x + self.fc2(F.silu(gate) * up)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on [b, n, s, d] in x's dtype."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


class PlainGPT(torch.nn.Module):
    """The model."""

    def __init__(self, job: Job, manual_attention: bool = False) -> None:
        super().__init__()
        self.job = job
        self.embedding = torch.nn.Embedding(job.vocab, job.hidden)
        self.positions = torch.nn.Embedding(job.sequence, job.hidden) if job.gpt2 else None
        self.layers = torch.nn.ModuleList(PlainLayer(job, manual_attention) for _ in range(job.layers))
        self.norm = norm(job)
        self.head = torch.nn.Linear(job.hidden, job.vocab, bias=False)
        if job.gpt2:
            self.head.weight = self.embedding.weight
        d = job.hidden // job.heads
        angles = torch.arange(job.sequence)[:, None] * 10000.0 ** -(torch.arange(0, d, 2) / d)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("hidden_keys", torch.ones(job.sequence, job.sequence, dtype=torch.bool).triu(1))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """tokens, labels: [b, s] -> mean loss."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x, self.cos, self.sin, self.hidden_keys)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


# The product's logical name of each part of the plain model.
_TOP = {
    "embedding": "embedding.word_embeddings",
    "positions": "embedding.position_embeddings",
    "norm": "decoder.final_layernorm",
    "head": "output_layer",
}
_PARTS = {
    "norm1": "input_layernorm",
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "norm2": "pre_mlp_layernorm",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}


def load_weights(plain: PlainGPT, source: Mapping[str, torch.Tensor]) -> None:
    """Give the plain model weights that carry the product's logical names (rows of padding are dropped)."""
    job = plain.job
    with torch.no_grad():
        for name, param in plain.named_parameters():
            *path, kind = name.split(".")
            module = _TOP[path[0]] if len(path) == 1 else f"decoder.layers.{path[1]}.{_PARTS[path[2]]}"
            value = source[f"{module}.{kind}"][: len(param)]
            if "qkv" in path:  # rows grouped by head: q, k, v of head 0, of head 1 ... -> all q, all k, all v
                value = value.view(job.heads, 3, job.hidden // job.heads, -1).transpose(0, 1).reshape(value.shape)
            param.copy_(value)


ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


def adamw(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """torch's fused AdamW with the jobs' settings, as all engines of torch and DeepSpeed get it."""
    return torch.optim.AdamW(params, **ADAMW)


def first_step(argv: Sequence[str]) -> None:
    """Build the model, train one step on random tokens, say so."""
    parser = argparse.ArgumentParser(description="One training step in plain torch.", allow_abbrev=False)
    for name in ("layers", "hidden", "heads", "ffn", "vocab", "sequence"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Job, name))
    parser.add_argument("--micro-batch-size", type=int, default=1)
    options = vars(parser.parse_args(argv))
    batch = options.pop("micro_batch_size")
    job = Job(**options)
    torch.manual_seed(1)
    model = PlainGPT(job)
    optimizer = adamw(model.parameters())
    tokens = torch.randint(job.vocab, (batch, job.sequence + 1))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"iteration 1 | loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    first_step(sys.argv[1:])
