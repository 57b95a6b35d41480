"""Megatron's names over our objects: `pretrain` with a user's model provider and forward step gives the same run."""

import pathlib
from collections.abc import Iterator

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from tests.harness.d0 import write_d0
from tests.harness.jobs import Recorder
from tests.harness.t0 import t0_flags


def model_provider(pre_process: bool = True, post_process: bool = True) -> torch.nn.Module:
    """As in a Megatron user's own pretrain script."""
    args = get_args()
    return GPTModel(
        core_transformer_config_from_args(args), vocab_size=get_tokenizer().vocab_size, max_sequence_length=args.seq_length, seed=args.seed
    )


def forward_step(data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module):  # type: ignore[no-untyped-def]
    """Per-token loss and the function that reduces it."""
    batch = next(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], labels=batch["labels"])
    mask = batch["loss_mask"]
    return losses, lambda output: ((output * mask).sum(), mask.count_nonzero(), {})


def losses(argv: list[str], **kwargs: object) -> list[float]:
    """Loss of each step of a run."""
    recorder = Recorder()
    pretrain(argv=argv, callbacks=[recorder], **kwargs)  # type: ignore[arg-type]
    return [result.loss_sum / result.tokens for result in recorder.results]


def test_pretrain_with_own_model_and_forward_step_equals_the_built_in_one(tmp_path: pathlib.Path) -> None:
    write_d0(str(tmp_path / "d0"))
    flags = t0_flags(data_path=str(tmp_path / "d0"), train_iters=3)
    assert losses(flags) == losses(flags, model_provider=model_provider, forward_step_func=forward_step)


def test_mean_of_a_microbatch_is_refused_as_a_loss(tmp_path: pathlib.Path) -> None:
    write_d0(str(tmp_path / "d0"))

    def mean_step(data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module):  # type: ignore[no-untyped-def]
        output, _ = forward_step(data_iterator, model)
        return output, lambda value: (value.mean(), {})

    with pytest.raises(ConfigError, match="number of tokens"):
        losses(t0_flags(data_path=str(tmp_path / "d0"), train_iters=1), forward_step_func=mean_step)
