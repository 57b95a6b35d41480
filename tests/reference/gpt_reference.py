"""An independent GPT in plain torch, written for reading: loops over rows, heads and queries, any float dtype.

It shares no code with the product but the configuration and the names of parameters. Everything is computed in the dtype of
`params` (float64 in tests), with textbook formulas, one token at a time where that is clearest.
"""

import math
from collections.abc import Callable, Mapping

import torch

from megatron.core.transformer.transformer_config import TransformerConfig

Params = Mapping[str, torch.Tensor]
Recorder = Callable[[str, torch.Tensor, list[list[int]]], None]  # (prefix of the layer, logits [t, E], experts of each token)


def reference_logits(
    params: Params,
    config: TransformerConfig,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits [b, s, rows of the output matrix] for input_ids [b, s], one row of the batch after the other, without dropout."""
    rows = []
    for row in range(input_ids.size(0)):
        length = input_ids.size(1)
        positions = list(range(length)) if position_ids is None else position_ids[row].tolist()
        documents = [0] * length if document_ids is None else document_ids[row].tolist()
        rows.append(_row_logits(params, config, input_ids[row].tolist(), positions, documents))
    return torch.stack(rows)


def reference_loss(
    params: Params,
    config: TransformerConfig,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    *,
    vocab_size: int,
) -> torch.Tensor:
    """Loss of each token, [b, s], over the first `vocab_size` logits."""
    logits = reference_logits(params, config, input_ids, position_ids, document_ids)[..., :vocab_size]
    return -torch.log(torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)).gather(-1, labels[..., None])[..., 0]


def _row_logits(
    params: Params, config: TransformerConfig, tokens: list[int], positions: list[int], documents: list[int]
) -> torch.Tensor:
    words = params["embedding.word_embeddings.weight"]
    hidden = torch.stack([words[token] for token in tokens])
    if config.position_embedding_type == "learned_absolute":
        table = params["embedding.position_embeddings.weight"]
        hidden = hidden + torch.stack([table[position] for position in positions])
    for layer in range(config.num_layers):
        prefix = f"decoder.layers.{layer}."
        normed = _norm(params, config, prefix + "input_layernorm", hidden)
        hidden = hidden + _attention(params, config, prefix + "self_attention.", normed, positions, documents)
        normed = _norm(params, config, prefix + "pre_mlp_layernorm", hidden)
        branch = moe_output if config.is_moe_layer(layer) else _mlp
        hidden = hidden + branch(params, config, prefix + "mlp.", normed)
    hidden = _norm(params, config, "decoder.final_layernorm", hidden)
    head = params["output_layer.weight"] if config.untie_embeddings_and_output_weights else words
    return hidden @ head.T


def _norm(params: Params, config: TransformerConfig, name: str, x: torch.Tensor) -> torch.Tensor:
    if config.normalization == "RMSNorm":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_epsilon) * params[name + ".weight"]
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + config.norm_epsilon) * params[name + ".weight"] + params[name + ".bias"]


def _linear(params: Params, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ params[name + ".weight"].T
    return y + params[name + ".bias"] if name + ".bias" in params else y


def _attention(
    params: Params, config: TransformerConfig, prefix: str, x: torch.Tensor, positions: list[int], documents: list[int]
) -> torch.Tensor:
    mixed = _linear(params, prefix + "linear_qkv", x)
    d, groups = config.head_dim, config.num_kv_heads
    per_group = config.num_attention_heads // groups
    outputs = []
    for group in range(groups):
        block = mixed[:, group * (per_group + 2) * d : (group + 1) * (per_group + 2) * d]
        key = block[:, per_group * d : (per_group + 1) * d]
        value = block[:, (per_group + 1) * d :]
        if config.qk_layernorm:
            key = _norm(params, config, prefix + "k_layernorm", key)
        key = _rotated(config, key, positions)
        for head in range(per_group):
            query = block[:, head * d : (head + 1) * d]
            if config.qk_layernorm:
                query = _norm(params, config, prefix + "q_layernorm", query)
            outputs.append(_head(config, _rotated(config, query, positions), key, value, documents))
    return _linear(params, prefix + "linear_proj", torch.cat(outputs, dim=-1))


def _head(
    config: TransformerConfig, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: list[int]
) -> torch.Tensor:
    rows = []
    for i in range(query.size(0)):
        reach = config.window_size or query.size(0)
        seen = [j for j in range(max(0, i - reach + 1), i + 1) if documents[j] == documents[i]]
        weights = torch.exp(torch.stack([query[i] @ key[j] for j in seen]) / math.sqrt(config.head_dim))
        weights = weights / weights.sum()
        rows.append(sum(w * value[j] for w, j in zip(weights, seen, strict=True)))
    return torch.stack(rows)  # type: ignore[arg-type]


def _rotated(config: TransformerConfig, x: torch.Tensor, positions: list[int]) -> torch.Tensor:
    if config.position_embedding_type != "rope":
        return x
    return torch.stack([_rotated_vector(config, x[i], position) for i, position in enumerate(positions)])


def _rotated_vector(config: TransformerConfig, vector: torch.Tensor, position: int) -> torch.Tensor:
    rotary = round(config.head_dim * config.rotary_percent)
    out = [vector[i] for i in range(config.head_dim)]
    for pair in range(rotary // 2):
        angle = position * _frequency(config, pair, rotary)
        a, b = (2 * pair, 2 * pair + 1) if config.rotary_interleaved else (pair, pair + rotary // 2)
        cos, sin = math.cos(angle) * _amplitude(config), math.sin(angle) * _amplitude(config)
        out[a], out[b] = vector[a] * cos - vector[b] * sin, vector[b] * cos + vector[a] * sin
    return torch.stack(out)


def _frequency(config: TransformerConfig, pair: int, rotary: int) -> float:
    """Radians per token of a pair."""
    plain = config.rotary_base ** (-2.0 * pair / rotary)
    stretched = plain / config.rope_scaling_factor
    context = config.rope_original_max_position_embeddings
    if config.rope_scaling_type == "linear":
        return stretched
    if config.rope_scaling_type == "llama3":
        wavelength = 2 * math.pi / plain
        low, high = config.rope_llama3_low_freq_factor, config.rope_llama3_high_freq_factor
        if wavelength < context / high:
            return plain
        if wavelength > context / low:
            return stretched
        smooth = (context / wavelength - low) / (high - low)
        return (1 - smooth) * stretched + smooth * plain
    if config.rope_scaling_type == "yarn":

        def pair_that_turns(rotations: float) -> float:
            return rotary * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(config.rotary_base))

        first = max(math.floor(pair_that_turns(config.rope_yarn_beta_fast)), 0)
        last = min(math.ceil(pair_that_turns(config.rope_yarn_beta_slow)), rotary - 1)
        ramp = min(max((pair - first) / (last - first or 0.001), 0.0), 1.0)
        return plain * (1 - ramp) + stretched * ramp
    return plain


def _amplitude(config: TransformerConfig) -> float:
    if config.rope_scaling_type != "yarn":
        return 1.0
    return config.rope_yarn_attention_factor or 0.1 * math.log(config.rope_scaling_factor) + 1.0


def _mlp(params: Params, config: TransformerConfig, prefix: str, x: torch.Tensor) -> torch.Tensor:
    wide = _linear(params, prefix + "linear_fc1", x)
    if config.activation_func in ("swiglu", "geglu"):
        gate, up = wide[:, : wide.size(1) // 2], wide[:, wide.size(1) // 2 :]
        active = _activate("silu" if config.activation_func == "swiglu" else "gelu", gate) * up
    else:
        active = _activate(config.activation_func, wide)
    return _linear(params, prefix + "linear_fc2", active)


def _activate(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if name == "gelu_tanh":
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "silu":
        return x / (1 + torch.exp(-x))
    positive = torch.where(x > 0, x, torch.zeros_like(x))
    return positive if name == "relu" else positive * positive


def moe_output(
    params: Params, config: TransformerConfig, prefix: str, x: torch.Tensor, record: Recorder | None = None
) -> torch.Tensor:
    """A layer with experts, one token and one expert after the other. x: [t, h] -> [t, h]. No capacity, choice by tokens."""
    logits = x @ params[prefix + "router.weight"].T
    outputs, experts = [], []
    for token in range(x.size(0)):
        weights = _expert_weights(params, config, prefix, logits[token])
        experts.append(list(weights))
        output = sum(w * _mlp(params, config, f"{prefix}experts.{e}.", x[token : token + 1])[0] for e, w in weights.items())
        if config.moe_shared_expert_intermediate_size is not None:
            output = output + _mlp(params, config, prefix + "shared_experts.", x[token : token + 1])[0]
        outputs.append(output)
    if record is not None:
        record(prefix, logits, experts)
    return torch.stack(outputs)  # type: ignore[arg-type]


def _expert_weights(params: Params, config: TransformerConfig, prefix: str, logits: torch.Tensor) -> dict[int, torch.Tensor]:
    """Expert -> weight of one token. logits: [E]."""
    sigmoid = config.moe_router_score_function == "sigmoid"
    scores = 1 / (1 + torch.exp(-logits)) if sigmoid else torch.exp(logits) / torch.exp(logits).sum()
    bias = params.get(prefix + "router.expert_bias")
    by = scores if sigmoid or config.moe_router_pre_softmax else logits  # what the choice goes by
    wanted = [value + (0.0 if bias is None else float(bias[e])) for e, value in enumerate(by.tolist())]
    allowed = list(range(len(wanted)))
    if config.moe_router_num_groups is not None and config.moe_router_group_topk is not None:
        size = len(wanted) // config.moe_router_num_groups
        groups = [allowed[i : i + size] for i in range(0, len(wanted), size)]
        best = config.moe_router_topk // config.moe_router_group_topk
        groups.sort(key=lambda group: -sum(sorted((wanted[e] for e in group), reverse=True)[:best]))
        allowed = [e for group in groups[: config.moe_router_group_topk] for e in group]
    chosen = sorted(allowed, key=lambda e: -wanted[e])[: config.moe_router_topk]
    total = sum(scores[e] for e in chosen)
    renormalised = (sigmoid and config.moe_router_topk > 1) or (not sigmoid and not config.moe_router_pre_softmax)
    factor = config.moe_router_topk_scaling_factor or 1.0
    return {e: factor * (scores[e] / total if renormalised else scores[e]) for e in chosen}


def balancing_loss_reference(config: TransformerConfig, logits: torch.Tensor, experts: list[list[int]]) -> torch.Tensor:
    """Switch Transformer's loss over these tokens. logits: [t, E]."""
    number, tokens = logits.size(1), logits.size(0)
    if config.moe_router_score_function == "sigmoid":
        scores = 1 / (1 + torch.exp(-logits))
        scores = scores / scores.sum(-1, keepdim=True)
    else:
        scores = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    loss = logits.new_zeros(())
    for expert in range(number):
        share = sum(expert in chosen for chosen in experts) / (tokens * config.moe_router_topk)
        loss = loss + number * share * scores[:, expert].mean()
    return loss


def z_loss_reference(logits: torch.Tensor) -> torch.Tensor:
    """Mean of the squared log-sum-exp. logits: [t, E]."""
    return torch.log(torch.exp(logits).sum(-1)).square().mean()
