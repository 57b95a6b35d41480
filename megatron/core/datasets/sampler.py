"""Which samples a rank reads in a step: pure arithmetic on the number of samples consumed so far.

    samples of the step that starts at `consumed`:  consumed ... consumed + global_batch_size - 1
    microbatch m of rank r:                         consumed + (m * dp_size + r) * micro_batch_size + [0 .. micro_batch_size)

So the samples of a global batch depend on neither the data-parallel size nor the micro batch size, and a run that resumes in
another layout neither skips nor repeats one.
"""

from megatron.core.errors import ConfigError


def microbatch_sample_ids(
    consumed: int, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> list[list[int]]:
    """Sample ids of each microbatch of rank `dp_rank` in the step that starts after `consumed` samples.

    Raises ConfigError if the global batch is not a whole number of micro batches on every rank.
    """
    stride = micro_batch_size * dp_size
    if global_batch_size % stride:
        raise ConfigError(
            f"global_batch_size={global_batch_size} is not a multiple of micro_batch_size={micro_batch_size} x "
            f"data-parallel size {dp_size} = {stride}; change one of them"
        )
    first = consumed + dp_rank * micro_batch_size
    return [list(range(start, start + micro_batch_size)) for start in range(first, first + global_batch_size, stride)]
