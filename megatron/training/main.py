"""The command line of `pretrain_gpt.py`: parse, then print, check or train; errors become one message and an exit code.

Exit codes: 0 done or stopped on request with a checkpoint; 2 wrong configuration or data; 130 interrupted twice; any other
= failure. A message is printed once, by the rank that knows.
"""

import contextlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron.core.errors import MegatronError
from megatron.training.config import CommandLine, parse_command_line, render_with_origins
from megatron.training.config.run_config import RunConfig
from megatron.training.dry_run import dry_run_report
from megatron.training.initialize import (
    LaunchInfo,
    create_groups,
    initialize_distributed,
    read_launch_environment,
    shut_down,
)
from megatron.training.trainer import Trainer

_PATIENCE_S = 5.0
_LOST_PEER = re.compile(r"closed by peer|reset by peer|connection refused|broken pipe|timed out|timeout", re.IGNORECASE)


def main(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    environment = os.environ if environment is None else environment
    rank = environment.get("RANK") or environment.get("SLURM_PROCID") or "0"
    try:
        with _said_by_first_rank(rank):
            command = parse_command_line(argv)
        if command.help_text is not None:
            return _print(command.help_text)
        if command.print_config:
            return _print(render_with_origins(command.resolved))
        if command.dry_run:
            return _print(dry_run_report(command.resolved.config, command.world_size))
        return _train(command, environment)
    except MegatronError as error:
        if error.reported:
            _complain(rank, str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _complain(rank, "interrupted")
        return 130
    except Exception as error:
        return _unexpected(rank, error)


def _train(command: CommandLine, environment: Mapping[str, str]) -> int:
    config = command.resolved.config
    launch = read_launch_environment(environment)
    if launch.rank == 0:
        for note in command.resolved.notes:
            print(f"note: {note}", flush=True)
    device = initialize_distributed(config.launch, launch)
    try:
        _run(config, device, launch)
    finally:
        if sys.exc_info()[0] is None:
            shut_down()
    return 0


def _run(config: RunConfig, device: torch.device, launch: LaunchInfo) -> None:
    with _said_by_first_rank(str(launch.rank)):
        groups = create_groups(config.parallel, config.ddp, launch.world_size, config.launch)
    Trainer(config, device=device, groups=groups).fit()


@contextlib.contextmanager
def _said_by_first_rank(rank: str) -> Iterator[None]:
    """Around work that fails on all ranks alike: the first one reports it.

    A launcher ends all ranks when one has failed, so the others let rank 0 fail first: they wait for the launcher's SIGTERM. If it
    does not come (rank 0 had no error), they report for themselves.
    """
    try:
        yield
    except MegatronError as error:
        error.reported = rank == "0" or not _told_to_end()
        raise


def _told_to_end() -> bool:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    return signal.sigtimedwait({signal.SIGTERM}, _PATIENCE_S) is not None


def _print(text: str) -> int:
    print(text)
    return 0


def _complain(rank: str, message: str) -> None:
    print(f"error (rank {rank}): {message}", file=sys.stderr, flush=True)


def _unexpected(rank: str, error: BaseException) -> int:
    """A failure nobody foresaw: one line where another rank's end is the cause, the traceback where this rank is."""
    if torch.distributed.is_initialized() and _LOST_PEER.search(str(error)):
        _complain(rank, f"lost contact with another rank ({str(error).splitlines()[0][:160]}); see that rank's message")
    else:
        traceback.print_exc()
        _complain(rank, f"{type(error).__name__}: {error}")
    return 1
