"""What a prompt becomes does not depend on its batch, the cache, or how other rows end; counts are exact."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.inference.engine import (
    CachedDecoder,
    Generation,
    PlainDecoder,
    generate,
    generate_stream,
)
from megatron.core.inference.sampling import Sampling
from megatron.core.models.gpt.gpt_model import GPTModel
from tests.harness.t0 import EOD, TRUE_VOCAB_SIZE, t0_transformer_config

PROMPTS = [[7], [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2]]
MODELS: dict[str, dict[str, Any]] = {
    "rope": {},
    "learned": {"position_embedding_type": "learned_absolute"},
    "no positions, biases, qk-norm": {"position_embedding_type": "none", "add_bias_linear": True, "qk_layernorm": True},
    "window": {"window_size": 3},
    "unfused": {"attention_backend": "unfused"},
    "dropout": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
}


def model(**changes: Any) -> GPTModel:
    """T0's model with weights large enough for clear preferences."""
    config = t0_transformer_config(init_method_std=0.3, max_position_embeddings=20, **changes)
    return GPTModel(config, vocab_size=TRUE_VOCAB_SIZE, max_sequence_length=20, seed=5)


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def gpt(request: pytest.FixtureRequest) -> GPTModel:
    return model(**request.param)


def force_eod(row: int, after: int) -> Any:
    """A logit bias that makes one row end after so many tokens, and forbids EOD everywhere else."""

    def bias(index: int, tokens: Sequence[int]) -> Mapping[int, float]:
        return {EOD: 1e4 if index == row and len(tokens) == after else -1e4}

    return bias


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(greedy=True), Sampling(seed=3), Sampling(top_k=5, top_p=0.9, temperature=0.7)])
def test_batch_rows_equal_single_runs(gpt: GPTModel, sampling: Sampling, use_cache: bool) -> None:
    batch = generate(gpt, PROMPTS, 6, sampling=sampling, eod=EOD, use_cache=use_cache)
    for index, prompt in enumerate(PROMPTS):
        (single,) = generate(gpt, [prompt], 6, sampling=sampling, eod=EOD, use_cache=use_cache, sample_ids=[index])
        assert batch[index] == single


@pytest.mark.parametrize("sampling", [Sampling(greedy=True), Sampling(seed=3)])
def test_cache_changes_no_token(gpt: GPTModel, sampling: Sampling) -> None:
    assert generate(gpt, PROMPTS, 6, sampling=sampling) == generate(gpt, PROMPTS, 6, sampling=sampling, use_cache=False)


def test_cached_logits_equal_uncached(gpt: GPTModel) -> None:
    device = torch.device("cpu")
    cached, plain = CachedDecoder(gpt, PROMPTS, 6, device), PlainDecoder(gpt, PROMPTS, device)
    for step in range(6):
        expected = plain.logits()
        assert expected.shape == (len(PROMPTS), TRUE_VOCAB_SIZE)
        torch.testing.assert_close(cached.logits(), expected, rtol=1e-5, atol=1e-5)
        for row in range(len(PROMPTS)):
            cached.append(row, (7 * step + row) % TRUE_VOCAB_SIZE)
            plain.append(row, (7 * step + row) % TRUE_VOCAB_SIZE)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_row_that_ends_leaves_the_others_alone(use_cache: bool) -> None:
    gpt = model()
    ended = generate(gpt, PROMPTS, 6, eod=EOD, use_cache=use_cache, logit_bias=force_eod(1, 2))
    free = generate(gpt, PROMPTS, 6, eod=EOD, use_cache=use_cache, logit_bias=force_eod(-1, 0))
    assert [len(g.new_tokens) for g in ended] == [6, 3, 6]
    assert ended[1].new_tokens == [*free[1].new_tokens[:2], EOD]
    assert [g.finish_reason for g in ended] == ["length", "eod", "length"]
    assert (ended[0], ended[2]) == (free[0], free[2])
    assert all(g.tokens == prompt + g.new_tokens for g, prompt in zip(ended, PROMPTS, strict=True))


def test_eod_on_the_last_token_counts_as_eod() -> None:
    (row,) = generate(model(), [[1]], 3, eod=EOD, logit_bias=force_eod(0, 2))
    assert (len(row.new_tokens), row.finish_reason) == (3, "eod")


def test_no_new_tokens_give_the_prompt_back_and_one_gives_one() -> None:
    gpt = model()
    assert generate(gpt, PROMPTS, 0) == [Generation(prompt, [], "length") for prompt in PROMPTS]
    assert [len(g.new_tokens) for g in generate(gpt, PROMPTS, 1)] == [1, 1, 1]
    assert generate(gpt, [], 5) == []


def test_greedy_is_the_argmax_of_the_models_logits() -> None:
    gpt = model().eval()
    (row,) = generate(gpt, [PROMPTS[1]], 4)
    with torch.no_grad():
        logits = gpt(torch.tensor([row.tokens[:-1]]))
    assert logits[0, len(PROMPTS[1]) - 1 :].argmax(-1).tolist() == row.new_tokens


def test_no_sampled_id_is_outside_of_the_true_vocabulary() -> None:
    gpt = model()
    with torch.no_grad():
        for name, weight in gpt.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                weight[TRUE_VOCAB_SIZE:] = 50.0  # poisoned padding rows
    rows = generate(gpt, PROMPTS * 4, 8, sampling=Sampling(temperature=5.0))
    assert max(token for row in rows for token in row.new_tokens) < TRUE_VOCAB_SIZE


def test_empty_prompt_starts_from_the_start_token() -> None:
    gpt = model()
    (empty,) = generate(gpt, [[]], 4, start_token=EOD)
    (given,) = generate(gpt, [[EOD]], 4)
    assert empty.tokens == empty.new_tokens == given.new_tokens


@pytest.mark.parametrize("kind", ["rope", "learned", "no positions, biases, qk-norm"])
def test_rows_longer_than_the_models_positions_are_refused_with_numbers(kind: str) -> None:
    gpt = model(**MODELS[kind])
    with pytest.raises(ConfigError, match="prompt 2 has 9 tokens; with max_new_tokens=12 that is 21, more than the model's 20 positions"):
        generate(gpt, PROMPTS, 12)
    assert [len(g.new_tokens) for g in generate(gpt, PROMPTS, 11)] == [11, 11, 11]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1], []]}, "prompt 1 is empty and there is no BOS or EOD"),
        ({"max_new_tokens": -1}, "max_new_tokens must be 0 or more, got -1"),
        ({"sample_ids": [1, 2]}, "sample_ids must be one per prompt: 2 for 1 prompts"),
        ({"prompts": [[1, 101]]}, "prompt 0 holds token 101, outside of the vocabulary of 101 tokens"),
        ({"prompts": [[-1]]}, "prompt 0 holds token -1"),
    ],
)
def test_wrong_requests_are_refused_at_the_call(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate_stream(model(), **({"prompts": [[1]], "max_new_tokens": 2} | arguments))


def test_bias_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="logit bias for token 101"):
        generate(model(), [[1]], 1, logit_bias=lambda row, tokens: {101: 1.0})


def test_stream_yields_the_tokens_of_the_batch_in_order_of_time() -> None:
    gpt = model()
    made = list(generate_stream(gpt, PROMPTS, 4, eod=EOD, logit_bias=force_eod(1, 1)))
    assert [(m.index, m.row) for m in made] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 2), (3, 0), (3, 2)]
    assert [m.finish_reason for m in made if m.finish_reason] == ["eod", "length", "length"]
    batch = generate(gpt, PROMPTS, 4, eod=EOD, logit_bias=force_eod(1, 1))
    assert [[m.token for m in made if m.row == row] for row in range(3)] == [g.new_tokens for g in batch]


def test_model_mode_and_gradients_are_left_as_they_were() -> None:
    gpt = model().train()
    stream = generate_stream(gpt, PROMPTS, 4)
    next(stream)
    assert gpt.training
    assert torch.is_grad_enabled()
    stream.close()
