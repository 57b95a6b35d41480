"""GPTModel: invisible vocabulary padding, layout-independent initial weights, packed documents, recomputation, dropout, cache."""

import math
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.inference.kv_cache import KVCache
from megatron.core.models.gpt import GPTModel
from megatron.core.param_meta import param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.t0 import PADDED_VOCAB_SIZE, SEQ_LENGTH, TRUE_VOCAB_SIZE, t0_transformer_config


def build(config: TransformerConfig | None = None, **arguments: Any) -> GPTModel:
    """T0's model in one process."""
    defaults = {"vocab_size": TRUE_VOCAB_SIZE, "max_sequence_length": SEQ_LENGTH}
    groups = ProcessGroupCollection.single_process()
    return GPTModel(config or t0_transformer_config(), pg_collection=groups, **(defaults | arguments))


def tokens(rows: int = 2, length: int = SEQ_LENGTH, seed: int = 0) -> torch.Tensor:
    """Random ids below the end-of-document id."""
    return torch.randint(TRUE_VOCAB_SIZE - 1, (rows, length), generator=torch.Generator().manual_seed(seed))


def step(model: GPTModel, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and gradients of their mean."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(99)
    losses = model(tokens(seed=seed), labels=tokens(seed=seed + 1))
    losses.mean().backward()
    return losses.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# ------------------------------------------------------------------------------------------------------------- names, shapes


def test_parameters_have_the_names_and_shapes_of_megatron_in_execution_order() -> None:
    model = build(t0_transformer_config(num_layers=1, add_bias_linear=True, qk_layernorm=True))
    layer = "decoder.layers.0."
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        "embedding.word_embeddings.weight": (104, 32),
        layer + "input_layernorm.weight": (32,),
        layer + "self_attention.linear_qkv.weight": (64, 32),
        layer + "self_attention.linear_qkv.bias": (64,),
        layer + "self_attention.q_layernorm.weight": (8,),
        layer + "self_attention.k_layernorm.weight": (8,),
        layer + "self_attention.linear_proj.weight": (32, 32),
        layer + "self_attention.linear_proj.bias": (32,),
        layer + "pre_mlp_layernorm.weight": (32,),
        layer + "mlp.linear_fc1.weight": (128, 32),
        layer + "mlp.linear_fc1.bias": (128,),
        layer + "mlp.linear_fc2.weight": (32, 64),
        layer + "mlp.linear_fc2.bias": (32,),
        "decoder.final_layernorm.weight": (32,),
        "output_layer.weight": (104, 32),
    }


def test_modules_with_parameters_are_registered_in_the_order_in_which_they_run() -> None:
    model = build(t0_transformer_config(position_embedding_type="learned_absolute", qk_layernorm=True))
    ran: list[str] = []
    registered = [name for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    for name in registered:
        model.get_submodule(name).register_forward_pre_hook(lambda module, args, name=name: ran.append(name))
    model(tokens())
    assert ran == registered


def test_every_matrix_says_how_it_is_cut_and_vocabulary_tables_their_true_shape() -> None:
    for name, param in build().named_parameters():
        meta = param_meta(param)
        expected = {"linear_qkv": 0, "linear_fc1": 0, "linear_proj": 1, "linear_fc2": 1, "word_embeddings": 0, "output_layer": 0}
        assert meta.tp_dim == next((dim for part, dim in expected.items() if part in name), None), name
        vocabulary = "word_embeddings" in name or "output_layer" in name
        assert meta.is_embedding_or_output == vocabulary
        assert meta.logical_shape == ((TRUE_VOCAB_SIZE, 32) if vocabulary else None)


# ------------------------------------------------------------------------------------------------------- vocabulary padding


def test_padding_is_invisible_even_when_poisoned() -> None:
    clean, poisoned = build(), build()
    assert poisoned.padded_vocab_size == PADDED_VOCAB_SIZE
    with torch.no_grad():
        for weight in (poisoned.embedding.word_embeddings.weight, poisoned.output_layer.weight):
            assert not weight[TRUE_VOCAB_SIZE:].any()
            weight[TRUE_VOCAB_SIZE:] = 50.0
    assert torch.equal(clean(tokens()), poisoned(tokens()))
    assert clean(tokens()).shape == (2, SEQ_LENGTH, TRUE_VOCAB_SIZE)
    (losses, gradients), (expected, expected_gradients) = step(poisoned), step(clean)
    assert torch.equal(losses, expected)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected_gradients[name]), name


@pytest.mark.parametrize("divisor", [1, 8, 64, 128])
def test_loss_does_not_depend_on_the_amount_of_padding(divisor: int) -> None:
    reference, _ = step(build())
    losses, _ = step(build(t0_transformer_config(make_vocab_size_divisible_by=divisor)))
    torch.testing.assert_close(losses, reference, rtol=1e-6, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------- initial weights


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    reference = dict(build().named_parameters())
    torch.manual_seed(4)  # the global generator plays no part
    for other in (build(t0_transformer_config(make_vocab_size_divisible_by=128)), build(t0_transformer_config(num_layers=6))):
        for name, param in other.named_parameters():
            if name in reference and not name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                rows = min(param.size(0), TRUE_VOCAB_SIZE)
                assert torch.equal(param[:rows], reference[name][:rows]), name
    changed = dict(build(seed=1235).named_parameters())
    for name, param in reference.items():
        assert torch.equal(param, changed[name]) == ("layernorm" in name), name


def test_bf16_weights_are_the_rounded_fp32_weights() -> None:
    narrow = dict(build(t0_transformer_config(bf16=True)).named_parameters())
    for name, param in build().named_parameters():
        assert torch.equal(narrow[name], param.bfloat16()), name


def test_layers_and_matrices_start_different_from_each_other() -> None:
    matrices = [p.detach().flatten()[:200] for p in build().parameters() if p.dim() == 2]
    for i, first in enumerate(matrices):
        for second in matrices[i + 1 :]:
            # the correlation of 200 independent pairs has deviation 1 / sqrt(200) = 0.07: five of them
            assert abs(float(torch.corrcoef(torch.stack((first, second)))[0, 1])) < 0.35


def test_deviations_follow_the_configuration() -> None:
    config = t0_transformer_config(hidden_size=128, ffn_hidden_size=256, init_method_std=0.05, add_bias_linear=True)
    for name, param in build(config).named_parameters():
        scaled = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        if param.dim() == 2:
            values = param.detach()[:TRUE_VOCAB_SIZE] if param_meta(param).logical_shape else param.detach()
            expected = 0.05 / math.sqrt(2 * 4) if scaled else 0.05
            # relative standard error sqrt(1 / 2n) is 0.006 for the smallest matrix (101 x 128): eight of them
            assert float(values.std()) == pytest.approx(expected, rel=0.05), name
        else:
            assert torch.equal(param, torch.full_like(param, 1.0 if "layernorm" in name else 0.0)), name
    unscaled = dict(build(t0_transformer_config(use_scaled_init_method=False)).named_parameters())
    assert float(unscaled["decoder.layers.0.mlp.linear_fc2.weight"].std()) == pytest.approx(0.02, rel=0.05)


# ----------------------------------------------------------------------------------------------------------- packed documents


@pytest.mark.parametrize("backend", ["torch", "unfused"])
@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_packed_documents_have_the_losses_of_each_alone(backend: str, positions: str) -> None:
    model = build(t0_transformer_config(attention_backend=backend, position_embedding_type=positions))
    lengths = [[3, 4, 1], [5, 3]]  # R15's row [5,6,E,7,8,9,E,4], and a second row with its ends elsewhere
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    assert position_ids[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    ids, labels = tokens(2, 8), tokens(2, 8, seed=1)
    ids[0] = torch.tensor([5, 6, 100, 7, 8, 9, 100, 4])
    packed = model(ids, position_ids, labels=labels, document_ids=documents)
    assert packed.isfinite().all()
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            span = slice(start, start + length)
            alone = model(ids[row : row + 1, span], labels=labels[row : row + 1, span])
            torch.testing.assert_close(packed[row, span], alone[0], rtol=0.0, atol=1e-6)
            start += length


def test_first_token_of_a_document_attends_to_itself_alone() -> None:
    model = build(t0_transformer_config(position_embedding_type="none")).eval()
    ids, documents = tokens(1, 8), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])
    logits = model(ids, document_ids=documents)
    torch.testing.assert_close(logits[0, 3], model(ids[:, 3:4])[0, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits[0, 7], model(ids[:, 7:8])[0, 0], rtol=1e-5, atol=1e-6)


def test_window_bounds_what_a_token_can_see() -> None:
    model = build(t0_transformer_config(num_layers=1, window_size=3)).eval()
    ids = tokens(1)
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 100
    moved = (model(ids) - model(changed)).abs().amax(-1)[0] > 1e-6
    assert moved.nonzero().flatten().tolist() == [5, 6, 7]


# ----------------------------------------------------------------------------------------------------- recomputation, dropout

RECOMPUTE: dict[str, dict[str, Any]] = {
    "core_attn": dict(recompute_granularity="selective"),
    "mlp": dict(recompute_granularity="selective", recompute_modules=("mlp",)),
    "layernorm": dict(recompute_granularity="selective", recompute_modules=("layernorm",)),
    "all selective": dict(recompute_granularity="selective", recompute_modules=("core_attn", "mlp", "layernorm")),
    "uniform 1": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "uniform 3": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3),
    "block 2": dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=2),
    "block 9": dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=9),
}


def kept_bytes(model: GPTModel) -> int:
    """Bytes that the backward keeps alive besides the parameters."""
    storages: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(tokens(), labels=tokens(seed=1)).sum()
    assert loss.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("case", RECOMPUTE)
def test_recomputation_keeps_less_and_changes_no_bit_with_dropout_on(case: str) -> None:
    dropout = {"hidden_dropout": 0.3, "attention_dropout": 0.2}
    plain = build(t0_transformer_config(**dropout))
    saving = build(t0_transformer_config(**dropout, **RECOMPUTE[case]))
    (losses, gradients), (expected, expected_gradients) = step(saving), step(plain)
    assert torch.equal(losses, expected)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected_gradients[name]), name
    assert kept_bytes(saving) < kept_bytes(plain)


@pytest.mark.parametrize("changes", [{"hidden_dropout": 0.5}, {"attention_dropout": 0.5}])
def test_dropout_acts_in_training_and_only_there(changes: dict[str, float]) -> None:
    model, plain = build(t0_transformer_config(**changes)), build()
    assert not torch.equal(model(tokens()), model(tokens()))
    assert torch.equal(model.eval()(tokens()), plain.eval()(tokens()))


def test_attention_dropout_draws_from_the_seeded_stream() -> None:
    model = build(t0_transformer_config(hidden_dropout=0.2, attention_dropout=0.2))
    first, _ = step(model)
    again, _ = step(model)
    assert torch.equal(first, again)


# ------------------------------------------------------------------------------------------------------- generation, precision


@pytest.mark.parametrize(
    "changes", [{}, {"window_size": 3}, {"position_embedding_type": "learned_absolute", "qk_layernorm": True}, {"num_query_groups": 1}]
)
def test_cached_logits_equal_uncached_ones(changes: dict[str, Any]) -> None:
    model = build(t0_transformer_config(**changes)).eval()
    ids = tokens(2, 9)
    with torch.no_grad():
        expected = model(ids)
        cache, got = KVCache(9), []
        for start, end in ((0, 5), (5, 6), (6, 9)):
            positions = torch.arange(start, end).expand(2, -1)
            cache.begin(positions)
            got.append(model(ids[:, start:end], positions, inference_context=cache))
    torch.testing.assert_close(torch.cat(got, dim=1), expected, rtol=1e-5, atol=1e-5)


def test_bf16_model_is_close_to_fp32_and_its_losses_are_fp32() -> None:
    narrow, wide = build(t0_transformer_config(bf16=True)), build()
    losses, gradients = step(narrow)
    expected, _ = step(wide)
    assert losses.dtype == torch.float32
    assert all(g.dtype == torch.bfloat16 for g in gradients.values())
    # logits of about 0.1 and smaller, each off by a few 2^-9 of itself
    torch.testing.assert_close(losses, expected, rtol=0.0, atol=2e-2)


# -------------------------------------------------------------------------------------------------------------------- errors


def test_parallel_sizes_that_do_not_exist_yet_are_refused() -> None:
    with pytest.raises(ConfigError, match="context_parallel_size=2 is not supported in this version"):
        build(t0_transformer_config(context_parallel_size=2))


def test_parts_compute_what_the_whole_model_does() -> None:
    """Three parts, one of them without layers, tied: the same losses and gradients, bit for bit."""
    tied = {"untie_embeddings_and_output_weights": False}
    whole = build(t0_transformer_config(**tied))
    parts = [
        build(t0_transformer_config(**tied), pre_process=pre, post_process=post, layers=layers)
        for pre, post, layers in ((True, False, range(3)), (False, False, range(3, 3)), (False, True, range(3, 4)))
    ]
    hidden, ids = None, tokens(2, 16)
    for part in parts:
        hidden = part(ids, labels=ids, **({} if hidden is None else {"hidden": hidden}))
    assert hidden is not None
    losses = whole(ids, labels=ids)
    assert torch.equal(hidden, losses)
    hidden.sum().backward()
    losses.sum().backward()
    own = {name: param for part in reversed(parts) for name, param in part.named_parameters()}
    for name, param in whole.named_parameters():
        assert torch.equal(own[name], param), name
        if "word_embeddings" not in name:
            assert own[name].grad is not None and torch.equal(own[name].grad, param.grad), name


def test_groups_of_another_size_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pipeline_model_parallel_size=2, but the pp group has 1 rank\(s\)"):
        build(t0_transformer_config(pipeline_model_parallel_size=2))


def test_too_long_a_sequence_is_an_error() -> None:
    with pytest.raises(ValueError, match="sequence of 17 tokens, the model has max_position_embeddings=16"):
        build()(tokens(1, 17))
