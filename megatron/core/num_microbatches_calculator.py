"""How many samples and microbatches a step has, as a function of the samples consumed so far (batch-size ramp-up included).

    ramp-up 2 -> 8 by 2 over 12 samples: a larger batch every 12/3 = 4 samples
    consumed      0   2   4   8  14  22 ...
    global batch  2   2   4   6   8   8 ...

`NumMicroBatches` is pure. The functions below it are Megatron's names over one installed instance.
"""

from collections.abc import Iterator, Sequence

from megatron.core.errors import ConfigError


class NumMicroBatches:
    """The batch-size plan of a run.

    Args:
        global_batch_size: samples per step over all ranks, at the end of the ramp.
        micro_batch_size: samples per rank per forward.
        data_parallel_size: ranks that read different samples.
        rampup: (start, increment, samples): begin with `start` samples per step and add `increment` at equal distances over
            the first `samples` samples; None = no ramp.

    Raises ConfigError where a batch of the plan is not a multiple of micro_batch_size x data_parallel_size, or where the
    ramp does not go from start to the global batch size in whole increments.
    """

    def __init__(
        self, global_batch_size: int, micro_batch_size: int, data_parallel_size: int, rampup: Sequence[int] | None = None
    ) -> None:
        self.final_global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.data_parallel_size = data_parallel_size
        self.rampup = _checked_rampup(rampup, global_batch_size)
        self._check_divisible()

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples of the step that starts after `consumed_samples` samples."""
        if self.rampup is None:
            return self.final_global_batch_size
        start, increment, samples = self.rampup
        if consumed_samples >= samples:
            return self.final_global_batch_size
        increments = (self.final_global_batch_size - start) // increment
        return start + increment * (consumed_samples * increments // samples)

    def num_microbatches(self, consumed_samples: int) -> int:
        """Forward-backward passes per rank of that step."""
        return self.global_batch_size(consumed_samples) // (self.micro_batch_size * self.data_parallel_size)

    def batch_sizes(self) -> Iterator[int]:
        """Global batch size of step 0, 1, 2, ... without end."""
        consumed = 0
        while True:
            size = self.global_batch_size(consumed)
            yield size
            consumed += size

    def samples_after(self, iterations: int) -> int:
        """Samples consumed by the first `iterations` steps."""
        consumed = step = 0
        while step < iterations and self.rampup is not None and consumed < self.rampup[2]:
            consumed += self.global_batch_size(consumed)
            step += 1
        return consumed + (iterations - step) * self.final_global_batch_size

    def iterations_for(self, samples: int) -> int:
        """Whole steps that `samples` samples suffice for."""
        consumed = step = 0
        while self.rampup is not None and consumed < self.rampup[2]:
            size = self.global_batch_size(consumed)
            if consumed + size > samples:
                return step
            consumed += size
            step += 1
        return step + (samples - consumed) // self.final_global_batch_size

    def all_num_microbatches(self) -> list[int]:
        """Every number of microbatches that a step of the run can have, ascending."""
        return [size // (self.micro_batch_size * self.data_parallel_size) for size in self._sizes()]

    def _sizes(self) -> list[int]:
        sizes = {self.final_global_batch_size}
        if self.rampup is not None:
            sizes |= set(range(self.rampup[0], self.final_global_batch_size, self.rampup[1]))
        return sorted(sizes)

    def _check_divisible(self) -> None:
        unit = self.micro_batch_size * self.data_parallel_size
        for size in self._sizes():
            if size < unit or size % unit:
                where = "global_batch_size" if size == self.final_global_batch_size else "rampup_batch_size: a step of"
                raise ConfigError(
                    f"{where}={size} is not a multiple of micro_batch_size={self.micro_batch_size} x data-parallel "
                    f"size={self.data_parallel_size} (= {unit}); use for example {max(1, size // unit) * unit}"
                )


def _checked_rampup(rampup: Sequence[int] | None, global_batch_size: int) -> tuple[int, int, int] | None:
    if rampup is None:
        return None
    if len(rampup) != 3:
        raise ConfigError(f"rampup_batch_size needs 3 numbers (START INCREMENT SAMPLES), got {len(rampup)}: {list(rampup)}")
    start, increment, samples = (int(value) for value in rampup)
    if start < 1 or increment < 1 or samples < 0:
        raise ConfigError(f"rampup_batch_size={list(rampup)}: START and INCREMENT must be at least 1 and SAMPLES at least 0")
    if start > global_batch_size or (global_batch_size - start) % increment:
        raise ConfigError(
            f"rampup_batch_size: START={start} does not reach global_batch_size={global_batch_size} in steps of "
            f"INCREMENT={increment}"
        )
    return (start, increment, samples)


# Megatron's functions over one installed plan.

_plan: NumMicroBatches | None = None
_consumed_samples = 0


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> None:
    """Install the plan that the functions below read. `rank` is accepted for Megatron's call form; every rank is alike."""
    if _plan is not None:
        raise ConfigError(
            "the microbatch calculator is already initialized; call destroy_num_microbatches_calculator() or "
            "reconfigure_num_microbatches_calculator(...)"
        )
    reconfigure_num_microbatches_calculator(rank, rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size)


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> None:
    """Replace the installed plan; counting starts again at 0 consumed samples."""
    global _plan, _consumed_samples
    _plan = NumMicroBatches(global_batch_size, micro_batch_size, data_parallel_size, rampup_batch_size)
    _consumed_samples = 0


def destroy_num_microbatches_calculator() -> None:
    """Forget the installed plan."""
    global _plan, _consumed_samples
    _plan, _consumed_samples = None, 0


unset_num_microbatches_calculator = destroy_num_microbatches_calculator


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Tell the installed plan how many samples have been consumed. Sizes are always consistent (checked when built)."""
    global _consumed_samples
    _installed()
    _consumed_samples = consumed_samples


def get_num_microbatches() -> int:
    """Microbatches per rank of the current step."""
    return _installed().num_microbatches(_consumed_samples)


def get_current_global_batch_size() -> int:
    """Samples of the current step over all ranks."""
    return _installed().global_batch_size(_consumed_samples)


def get_micro_batch_size() -> int:
    """Samples per rank per forward."""
    return _installed().micro_batch_size


def _installed() -> NumMicroBatches:
    if _plan is None:
        raise ConfigError("the microbatch calculator is not initialized; call init_num_microbatches_calculator(...) first")
    return _plan
