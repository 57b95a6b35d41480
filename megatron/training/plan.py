"""TrainingPlan: how long the run is, in steps and samples, and the schedules' lengths; pure arithmetic on the configuration."""

import dataclasses

from megatron.core.num_microbatches_calculator import NumMicroBatches
from megatron.training.config.run_config import RunConfig


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """Derived lengths. Everything the schedules need is in samples, so that a batch-size ramp moves nothing.

    calculator: global batch size and number of microbatches as a function of the consumed samples.
    train_iters, train_samples: steps of the run, and samples it reads (whole global batches only).
    """

    calculator: NumMicroBatches
    train_iters: int
    train_samples: int
    lr_decay_samples: int
    lr_warmup_samples: int
    wsd_decay_samples: int | None
    data_parallel_size: int

    @staticmethod
    def of(config: RunConfig, data_parallel_size: int) -> "TrainingPlan":
        """The plan of a configuration for a number of data-parallel ranks."""
        training, scheduler = config.training, config.scheduler
        batch = config.global_batch_size(data_parallel_size)
        calculator = NumMicroBatches(batch, training.micro_batch_size, data_parallel_size, training.rampup_batch_size)
        if training.train_iters is not None:
            iters = training.train_iters
        else:
            iters = calculator.iterations_for(training.train_samples or 0)
        samples = calculator.samples_after(iters)

        def in_samples(given_samples: int | None, given_iters: int | None) -> int | None:
            return given_samples if given_samples is not None else None if given_iters is None else given_iters * batch

        decay = in_samples(scheduler.lr_decay_samples, scheduler.lr_decay_iters)
        decay = samples if decay is None else decay
        if scheduler.lr_warmup_fraction is not None:
            warmup = int(scheduler.lr_warmup_fraction * decay)
        else:
            warmup = scheduler.lr_warmup_samples or scheduler.lr_warmup_iters * batch
        wsd = in_samples(scheduler.lr_wsd_decay_samples, scheduler.lr_wsd_decay_iters)
        return TrainingPlan(calculator, iters, samples, decay, warmup, wsd, data_parallel_size)

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples of the step that starts after `consumed_samples`."""
        return self.calculator.global_batch_size(consumed_samples)

