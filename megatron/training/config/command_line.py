"""The whole command line of a training command: options of the run, and what to do with them."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from megatron.core.errors import ConfigError
from megatron.training.config.flags import parse_flags, ranks_from_text
from megatron.training.config.load import Resolved, resolve
from megatron.training.config.problems import Problems
from megatron.training.config.reference import explain, render_help


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """What to do. help_text: print this and nothing else (`--help`, `--help-config`); then there is no configuration.

    world_size: ranks that `--dry-run` reports on: `--world-size`, else the launcher's WORLD_SIZE, else 1.
    """

    resolution: Resolved | None
    print_config: bool = False
    dry_run: bool = False
    world_size: int = 1
    help_text: str | None = None

    @property
    def resolved(self) -> Resolved:
        """The configuration of the run."""
        assert self.resolution is not None, "a command line that asks for help has no configuration"
        return self.resolution


def parse_command_line(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> CommandLine:
    """Parse a command line without its program name. Raises ConfigError naming every problem of every file and flag."""
    environment = os.environ if environment is None else environment
    problems, notes = Problems(), []  # type: tuple[Problems, list[str]]
    parsed = parse_flags(argv, problems, notes)
    if "--help" in parsed.switches:
        return CommandLine(None, help_text=render_help())
    if parsed.help_config is not None:
        if parsed.configs or parsed.flags.entries or parsed.sets.entries:
            return CommandLine(None, help_text=explain(parsed.help_config, resolve(parsed, environment, problems, notes)))
        problems.raise_if_any()
        return CommandLine(None, help_text=explain(parsed.help_config))
    if parsed.world_size is not None and "--dry-run" not in parsed.switches:
        problems.add("--world-size", "is only used with --dry-run; a run's ranks come from its launcher (torchrun, SLURM)")
    return CommandLine(
        resolve(parsed, environment, problems, notes),
        print_config="--print-config" in parsed.switches,
        dry_run="--dry-run" in parsed.switches,
        world_size=parsed.world_size or _launched_world_size(environment),
    )


def _launched_world_size(environment: Mapping[str, str]) -> int:
    text = environment.get("WORLD_SIZE", "1")
    ranks = ranks_from_text(text)
    if ranks is None:
        raise ConfigError(f"environment variable WORLD_SIZE={text!r} is no number of ranks; launch with torchrun or unset it")
    return ranks
