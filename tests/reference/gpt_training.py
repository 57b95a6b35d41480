"""The reference of whole training steps: one process, plain torch, float64, all samples of a batch at once.

The model is written once more with matrices over whole sequences, because `gpt_reference` (which walks token by token, and which it
is compared with) takes minutes for a training step. Loss, norm, clipping and AdamW are textbook formulas.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from megatron.core.transformer.transformer_config import TransformerConfig
from tests.reference.optimizers import adam

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a step needs beside the model."""

    vocab_size: int
    lr: float
    weight_decay: float
    clip_grad: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float


@dataclasses.dataclass(frozen=True)
class ReferenceStep:
    """Mean loss of the step's tokens, norm and gradients before clipping, weights after the update."""

    loss: float
    norm: float
    gradients: Tensors
    weights: Tensors


def train(start: Mapping[str, torch.Tensor], config: TransformerConfig, batches: Sequence[Tensors], recipe: Recipe) -> list[ReferenceStep]:
    """One step per batch. start: whole weights without vocabulary padding. batches: tensors of all samples, [samples, s]."""
    weights = {name: value.double().clone() for name, value in start.items()}
    states: dict[str, dict] = {name: {} for name in weights}
    done = []
    for number, batch in enumerate(batches, start=1):
        params = {name: value.clone().requires_grad_() for name, value in weights.items()}
        mask = batch["loss_mask"].double()
        total = (token_losses(params, config, batch, recipe.vocab_size) * mask).sum() / max(float((mask != 0).sum()), 1.0)
        grads = dict(zip(params, torch.autograd.grad(total, list(params.values())), strict=True))
        norm = math.sqrt(sum(float((grad * grad).sum()) for grad in grads.values()))
        factor = min(1.0, recipe.clip_grad / (norm + 1e-6)) if recipe.clip_grad else 1.0
        for name, grad in grads.items():
            decay = recipe.weight_decay if grad.dim() >= 2 else 0.0
            options = {**dataclasses.asdict(recipe), "weight_decay": decay}
            weights[name] = adam(weights[name], grad * factor, states[name], number, options)
        done.append(ReferenceStep(total.item(), norm, grads, dict(weights)))
    return done


def token_losses(params: Mapping[str, torch.Tensor], config: TransformerConfig, batch: Tensors, vocab_size: int) -> torch.Tensor:
    """-log p of each label, [samples, s]."""
    logits = batched_logits(params, config, batch["tokens"], batch.get("position_ids"), batch.get("document_ids"))[..., :vocab_size]
    chosen = logits.gather(-1, batch["labels"][..., None])[..., 0]
    return torch.logsumexp(logits, -1) - chosen


def batched_logits(
    params: Mapping[str, torch.Tensor],
    config: TransformerConfig,
    tokens: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """[samples, s] ids -> [samples, s, V]."""
    samples, length = tokens.shape
    words = params["embedding.word_embeddings.weight"]
    positions = torch.arange(length).expand(samples, -1) if position_ids is None else position_ids
    x = words[tokens]
    if config.position_embedding_type == "learned_absolute":
        x = x + params["embedding.position_embeddings.weight"][positions]
    hidden = _hidden_keys(length, config.window_size, document_ids)
    for layer in range(config.num_layers):
        own = _Scope(params, f"decoder.layers.{layer}.")
        x = x + _attention(own, config, _norm(own, config, "input_layernorm", x), positions, hidden)
        x = x + _mlp(own, config, _norm(own, config, "pre_mlp_layernorm", x))
    x = _norm(_Scope(params, "decoder."), config, "final_layernorm", x)
    head = params["output_layer.weight"] if config.untie_embeddings_and_output_weights else words
    return x @ head.T


class _Scope:
    """Parameters below a prefix."""

    def __init__(self, params: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.params, self.prefix = params, prefix

    def get(self, name: str) -> torch.Tensor | None:
        return self.params.get(self.prefix + name)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y, bias = x @ self.params[f"{self.prefix}{name}.weight"].T, self.get(f"{name}.bias")
        return y if bias is None else y + bias


def _hidden_keys(length: int, window: int | None, document_ids: torch.Tensor | None) -> torch.Tensor:
    """bool [samples or 1, 1, query, key]: True where the query may not look."""
    ahead = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    hidden = ahead > 0
    if window is not None:
        hidden = hidden | (ahead <= -window)
    hidden = hidden[None, None]
    if document_ids is not None:
        hidden = hidden | (document_ids[:, None, :, None] != document_ids[:, None, None, :])
    return hidden


def _norm(own: _Scope, config: TransformerConfig, name: str, x: torch.Tensor) -> torch.Tensor:
    weight, bias = own.get(f"{name}.weight"), own.get(f"{name}.bias")
    assert weight is not None
    if config.normalization == "RMSNorm":
        return weight * x * (x.square().mean(-1, keepdim=True) + config.norm_epsilon).pow(-0.5)
    assert bias is not None
    x = x - x.mean(-1, keepdim=True)
    return weight * x * (x.square().mean(-1, keepdim=True) + config.norm_epsilon).pow(-0.5) + bias


def _attention(
    own: _Scope, config: TransformerConfig, x: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    samples, length, _ = x.shape
    d, groups = config.head_dim, config.num_kv_heads
    ratio = config.num_attention_heads // groups
    mixed = own.linear("self_attention.linear_qkv", x).view(samples, length, groups, ratio + 2, d)
    query, key, value = mixed[..., :ratio, :], mixed[..., ratio, :], mixed[..., ratio + 1, :]
    if config.qk_layernorm:
        query = _norm(own, config, "self_attention.q_layernorm", query)
        key = _norm(own, config, "self_attention.k_layernorm", key)
    if config.position_embedding_type == "rope":
        query, key = _turned(config, query, positions[:, :, None, None]), _turned(config, key, positions[:, :, None])
    scores = torch.einsum("nqgrd,nkgd->ngrqk", query, key) / math.sqrt(d)
    weights = scores.masked_fill(hidden[:, :, None], float("-inf")).softmax(-1)
    mixed_values = torch.einsum("ngrqk,nkgd->nqgrd", weights, value)
    return own.linear("self_attention.linear_proj", mixed_values.reshape(samples, length, -1))


def _turned(config: TransformerConfig, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + d/2) as complex numbers, turned by position x base^(-2i/d)."""
    half = config.head_dim // 2
    frequency = config.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * positions[..., None] * frequency)
    return torch.cat([turned.real, turned.imag], -1)


def _mlp(own: _Scope, config: TransformerConfig, x: torch.Tensor) -> torch.Tensor:
    wide = own.linear("mlp.linear_fc1", x)
    if config.activation_func == "swiglu":
        gate, up = wide.chunk(2, -1)
        active = gate * torch.sigmoid(gate) * up
    else:
        assert config.activation_func == "gelu", config.activation_func
        active = 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))
    return own.linear("mlp.linear_fc2", active)
