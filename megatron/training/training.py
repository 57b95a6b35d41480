"""Facade: Megatron's `pretrain`, over Trainer. A user's model provider and forward step are adapted here and nowhere else."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron.core.enums import ModelType
from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import global_vars
from megatron.training.arguments import Arguments
from megatron.training.callbacks import Callback
from megatron.training.config import parse_command_line
from megatron.training.config.run_config import RunConfig
from megatron.training.gpt_builder import build_gpt_model
from megatron.training.initialize import create_groups, initialize_distributed, read_launch_environment, shut_down
from megatron.training.train_state import TrainState
from megatron.training.trainer import LossFunction, Trainer

ModelProvider = Callable[..., torch.nn.Module]
ForwardStep = Callable[[Iterator[dict[str, torch.Tensor]], torch.nn.Module], tuple[torch.Tensor, Callable[..., Any]]]


def pretrain(
    model_provider: ModelProvider | None = None,
    model_type: ModelType = ModelType.encoder_or_decoder,
    forward_step_func: ForwardStep | None = None,
    *,
    argv: Sequence[str] | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainState:
    """Train as the command line says, with the caller's model or forward step where given; returns the last state.

    Args:
        model_provider: `model_provider(pre_process=True, post_process=True)` returns the module; default: the configured GPT.
        forward_step_func: `forward_step(data_iterator, model)` returns (output, loss_func), and `loss_func(output)` returns
            (sum of losses, number of tokens, anything), so that all tokens of the global batch weigh the same.
        argv: command line without the program's name; default: this process's.

    `get_args`, `get_timers` and `get_tokenizer` work inside the callables. Raises the errors of `Trainer`.
    """
    config = parse_command_line(sys.argv[1:] if argv is None else argv).resolved.config
    launch = read_launch_environment(os.environ)
    device = initialize_distributed(config.launch, launch)
    groups = create_groups(config.parallel, config.ddp, launch.world_size, config.launch)
    global_vars.set_global_variables(Arguments(config))
    trainer = Trainer(
        config,
        device=device,
        groups=groups,
        callbacks=callbacks,
        model_builder=build_gpt_model if model_provider is None else _builder(model_provider),
        loss_function=None if forward_step_func is None else _loss_function(forward_step_func),
        on_tokenizer=global_vars.set_tokenizer,
    )
    try:
        return trainer.fit()
    finally:
        global_vars.unset_global_variables()
        if sys.exc_info()[0] is None:
            del trainer, groups
            shut_down()


def _builder(provider: ModelProvider) -> ModelProvider:
    def build(
        config: RunConfig, *, vocab_size: int, device: torch.device, pg_collection: ProcessGroupCollection | None
    ) -> torch.nn.Module:
        return provider(pre_process=True, post_process=True).to(device)

    return build


def _loss_function(forward_step: ForwardStep) -> LossFunction:
    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        output, loss_func = forward_step(iter([batch]), model)
        answer = loss_func(output)
        if not isinstance(answer, tuple) or len(answer) < 3:
            raise ConfigError(
                "forward_step_func: its loss function must return (sum of losses, number of tokens, metrics); "
                "a mean per microbatch would weigh tokens unequally"
            )
        return answer[0], torch.as_tensor(answer[1])

    return loss
