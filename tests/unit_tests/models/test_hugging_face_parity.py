"""Logits equal those of Hugging Face's Llama and GPT-2 built with the same random weights, at every position, in fp32."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH, LAYERS, HIDDEN, HEADS = 101, 16, 2, 32, 4
Weights = Mapping[str, torch.Tensor]


def grouped_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_heads: int, head_dim: int) -> torch.Tensor:
    """[q; k; v] by kind -> the product's rows, grouped by key/value head. Each input: [heads x head_dim, ...]."""
    rest = q.shape[1:]
    parts = (part.reshape(kv_heads, -1, head_dim, *rest) for part in (q, k, v))
    return torch.cat(tuple(parts), dim=1).reshape(-1, *rest)


def from_llama(source: Weights, kv_heads: int, tied: bool) -> dict[str, torch.Tensor]:
    """The product's parameters from LlamaForCausalLM's."""
    target = {
        "embedding.word_embeddings.weight": source["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": source["model.norm.weight"],
    }
    for i in range(LAYERS):
        theirs, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        q, k, v = (source[f"{theirs}self_attn.{kind}_proj.weight"] for kind in "qkv")
        gate, up = (source[f"{theirs}mlp.{kind}_proj.weight"] for kind in ("gate", "up"))
        target |= {
            ours + "input_layernorm.weight": source[theirs + "input_layernorm.weight"],
            ours + "pre_mlp_layernorm.weight": source[theirs + "post_attention_layernorm.weight"],
            ours + "self_attention.linear_qkv.weight": grouped_qkv(q, k, v, kv_heads, HIDDEN // HEADS),
            ours + "self_attention.linear_proj.weight": source[theirs + "self_attn.o_proj.weight"],
            ours + "mlp.linear_fc1.weight": torch.cat((gate, up)),
            ours + "mlp.linear_fc2.weight": source[theirs + "mlp.down_proj.weight"],
        }
    return target if tied else target | {"output_layer.weight": source["lm_head.weight"]}


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    """A transposed matrix, or the vector itself."""
    return tensor.T if tensor.dim() == 2 else tensor


def from_gpt2(source: Weights) -> dict[str, torch.Tensor]:
    """The product's parameters from GPT2LMHeadModel's (its Conv1D weights are transposed)."""
    target = {
        "embedding.word_embeddings.weight": source["transformer.wte.weight"],
        "embedding.position_embeddings.weight": source["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": source["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": source["transformer.ln_f.bias"],
    }
    names = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2", "self_attention.linear_proj": "attn.c_proj"}
    names |= {"mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"}
    for i in range(LAYERS):
        theirs, ours = f"transformer.h.{i}.", f"decoder.layers.{i}."
        for kind in ("weight", "bias"):
            for ours_part, theirs_part in names.items():
                target[f"{ours}{ours_part}.{kind}"] = swapped(source[f"{theirs}{theirs_part}.{kind}"])
            q, k, v = swapped(source[f"{theirs}attn.c_attn.{kind}"]).chunk(3)
            target[f"{ours}self_attention.linear_qkv.{kind}"] = grouped_qkv(q, k, v, HEADS, HIDDEN // HEADS)
    return target


def assert_same_logits(config: TransformerConfig, theirs: Any, params: Weights) -> None:
    """Equal to 1e-5 of the largest logit at every position."""
    groups = ProcessGroupCollection.single_process()
    model = GPTModel(config, vocab_size=VOCAB, max_sequence_length=LENGTH, pg_collection=groups)
    ours = dict(model.named_parameters())
    assert ours.keys() == params.keys()
    with torch.no_grad():
        for name, param in ours.items():
            param[: params[name].size(0)].copy_(params[name])
        tokens = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(5))
        expected, got = theirs(tokens).logits, model.eval()(tokens)
    per_position = (got - expected).abs().amax(dim=(0, 2)) / expected.abs().max()
    assert expected.std() > 0.1, "weights too small to show differences"
    assert float(per_position.max()) < 1e-5, f"error by position: {per_position.tolist()}"


def spread_out(model: torch.nn.Module) -> torch.nn.Module:
    """Move every weight, so that norms and biases are not their trivial values."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator), alpha=0.15)
    return model.eval()


ROPE = {
    "plain": ({"rope_type": "default", "rope_theta": 10000.0}, {}),
    "linear": ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, {"rope_scaling_factor": 4.0}),
    "llama3": (
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rotary_base": 500000.0, "rope_scaling_factor": 8.0, "rope_original_max_position_embeddings": 64},
    ),
    "yarn": (
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_scaling_factor": 4.0, "rope_original_max_position_embeddings": 64},
    ),
}


@pytest.mark.parametrize(
    ("kv_heads", "tied", "rope"),
    [(2, False, "plain"), (1, False, "plain"), (4, True, "plain"), (2, True, "llama3"), (2, False, "linear"), (2, False, "yarn")],
)
def test_llama_logits_equal_hugging_face(kv_heads: int, tied: bool, rope: str) -> None:
    rope_parameters, changes = ROPE[rope]
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=kv_heads,
            max_position_embeddings=256,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
            rope_parameters=rope_parameters,
        )
    )
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=kv_heads,
        ffn_hidden_size=64,
        position_embedding_type="rope",
        rope_scaling_type="none" if rope == "plain" else rope,
        normalization="RMSNorm",
        activation_func="swiglu",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=not tied,
        make_vocab_size_divisible_by=8,
        **changes,
    )
    weights = spread_out(theirs).state_dict()
    assert_same_logits(config, theirs, from_llama(weights, kv_heads, tied))


def test_gpt2_logits_equal_hugging_face() -> None:
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS)
    )
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        activation_func="gelu_tanh",
        make_vocab_size_divisible_by=8,
    )
    assert_same_logits(config, theirs, from_gpt2(spread_out(theirs).state_dict()))


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_rope_frequencies_equal_hugging_face_at_production_sizes(rope: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from megatron.core.transformer.rope import inverse_frequencies

    parameters = {"rope_type": rope, "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 8192}
    parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope == "llama3" else {}
    theirs = transformers.LlamaConfig(hidden_size=1024, num_attention_heads=8, rope_parameters=parameters)
    theirs.max_position_embeddings = 65536
    expected, factor = ROPE_INIT_FUNCTIONS[rope](theirs, torch.device("cpu"))
    config = TransformerConfig(
        num_layers=1,
        hidden_size=1024,
        num_attention_heads=8,
        position_embedding_type="rope",
        rotary_base=500000.0,
        rope_scaling_type=rope,
        rope_scaling_factor=8.0,
        rope_original_max_position_embeddings=8192,
    )
    got, got_factor = inverse_frequencies(config)
    torch.testing.assert_close(got.float(), expected, rtol=1e-5, atol=0.0)
    assert got_factor == pytest.approx(factor)
