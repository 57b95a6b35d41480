"""The exceptions users see, one class per kind of trouble, each with the exit code it leads to.

`assert` is for the project's own invariants; everything a user can cause is one of these, with a text that says what was
expected, what was got and what to change.
"""


class MegatronError(Exception):
    """Base of all errors meant for users.

    exit_code: what a command returns when one of these ends it. reported: whether this process prints it (False on the
    ranks that only hear of another rank's trouble, so that each failure is printed once).
    """

    exit_code = 1
    reported = True


class ConfigError(MegatronError, ValueError):
    """A wrong or contradictory option. Nothing has been written. Exit code 2."""

    exit_code = 2


class DataError(MegatronError, ValueError):
    """Damaged, missing or mismatched data files. Exit code 2."""

    exit_code = 2


class ParallelStateError(MegatronError, RuntimeError):
    """A process group or rank was asked for before it exists, or the launcher's variables disagree."""


class CheckpointError(MegatronError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged or does not fit what is to be loaded."""


class NonFiniteError(MegatronError, RuntimeError):
    """A loss or gradient is NaN or infinite; the text names rank, step and parameter."""


class CommunicationStateError(MegatronError, RuntimeError):
    """An asynchronous collective was started twice, or waited for without a start; the text names the bucket."""
