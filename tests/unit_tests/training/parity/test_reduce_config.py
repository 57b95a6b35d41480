"""Pairs of configurations become pairs of small runs that are legal in both layouts and keep what the layouts are made of."""

import dataclasses

import pytest

from megatron.core.errors import ConfigError
from megatron.training.config import RunConfig, check_run_config, load_run_config
from megatron.training.parity.reduce_config import comparable, least_ranks
from tests.harness.t0 import REPOSITORY

NAMES = sorted(path.stem for path in (REPOSITORY / "configs").glob("*.yaml") if path.stem not in ("quickstart", "gpt2_data"))


def load(name: str, *changes: str) -> RunConfig:
    """A configuration of the project."""
    words = [word for change in changes for word in ("--set", change)]
    return load_run_config(["--config", str(REPOSITORY / "configs" / f"{name}.yaml"), *words], {}).config


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_against_one_process(name: str) -> None:
    config = load(name)
    single = dataclasses.replace(config, parallel=type(config.parallel)(bf16=config.parallel.bf16))
    a, b = comparable(single, config)
    assert a.ranks == 1 and b.ranks == least_ranks(config)
    for run in (a, b):
        for precision in ("fp32", "fp64", "bf16"):
            assert check_run_config(run.in_precision(precision), run.ranks) == []
    assert a.config.model == b.config.model
    assert a.config.data == b.config.data and a.config.training.global_batch_size == b.config.training.global_batch_size
    model, own = b.config.model, config.model
    assert model.hidden_size <= 64 * max(1, config.parallel.tensor_model_parallel_size)
    assert (model.num_kv_heads > 1) == (own.num_kv_heads > 1)
    assert (model.num_attention_heads > model.num_kv_heads) == (own.num_attention_heads > own.num_kv_heads)
    for field in ("normalization", "activation_func", "add_bias_linear", "position_embedding_type", "recompute_granularity"):
        assert getattr(model, field) == getattr(own, field), field
    assert b.config.parallel == dataclasses.replace(config.parallel, bf16=False, fp16=False)


def test_full_size_keeps_the_model() -> None:
    config = load("debug_cpu", "model.hidden_dropout=0.1")
    _, b = comparable(config, config, full_size=True)
    assert b.config.model == dataclasses.replace(config.model, hidden_dropout=0.0)
    assert b.config.data.seq_length == config.data.seq_length


def test_given_ranks_are_data_parallel() -> None:
    config = load("debug_cpu")
    a, b = comparable(config, config, ranks=(1, 4), steps=3)
    assert b.ranks == 4 and b.config.training.train_iters == 3
    assert a.config.training.global_batch_size % (4 * b.config.training.micro_batch_size) == 0


def test_what_cannot_be_is_refused_with_the_rule() -> None:
    config = load("tp2_sp")
    with pytest.raises(ConfigError, match="3 ranks cannot be divided by tensor_model_parallel_size=2"):
        comparable(config, config, ranks=(None, 3))
