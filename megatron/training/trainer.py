"""Trainer: the one training loop. It owns model, optimizer, data, checkpoints and logs of a run, and walks the steps.

One step (docs/architecture.md draws it):

    microbatches -> forward, backward (grad reduce starts under the last backward) -> finalize_model_grads -> optimizer.step
    -> scheduler -> next TrainState -> agreement on stopping -> log, evaluate, save
"""

import contextlib
import dataclasses
import gc
import math
import pathlib
import re
import resource
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron.core import collectives
from megatron.core.dist_checkpointing import durable
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.errors import ConfigError, NonFiniteError
from megatron.core.models.gpt.gpt_model import padded_vocab_size
from megatron.core.optimizer import MegatronOptimizer, describe_param_groups, get_megatron_optimizer, memory_report
from megatron.core.optimizer.offload import offload_problem
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.param_meta import param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_seed
from megatron.core.timers import Timers
from megatron.core.tokenizers import Tokenizer
from megatron.core.transformer.activation_offload import activation_offload_problem
from megatron.core.transformer.moe.balance import balance_metrics, reset_balance, update_expert_bias
from megatron.training.agreement import fail_together, gather_texts, known_to_all, on_all_ranks, own_rank, print_rank_0
from megatron.training.callbacks import Callback
from megatron.training.checkpointing import (
    copy_tokenizer_files,
    load_training_checkpoint,
    open_store,
    save_training_checkpoint,
)
from megatron.training.config import check_run_config, dump_yaml
from megatron.training.config.run_config import RunConfig
from megatron.training.data import TrainingData, build_data
from megatron.training.flops import flops_per_token, peak_tflops
from megatron.training.forward_backward import ForwardBackward, LossFunction
from megatron.training.gpt_builder import build_gpt_model, build_model_chunks
from megatron.training.loggers import RunLogger, build_loggers
from megatron.training.metrics import EvalMetrics, MetricsAccumulator, StepResult
from megatron.training.objectives import OBJECTIVES, Objective
from megatron.training.plan import TrainingPlan
from megatron.training.run_tokenizer import build_run_tokenizer, true_vocab_size
from megatron.training.signals import StopSignals
from megatron.training.step_trace import StepTrace
from megatron.training.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class StopRequest:
    """Why a run ends before its last step."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What all ranks know alike after a step's forward and backward: global loss sum and tokens, a non-finite loss, a stop."""

    loss_sum: float
    tokens: int
    bad_loss: bool
    stop: StopRequest | None


class Trainer:
    """Builds everything a run needs from its configuration and trains it.

    Args:
        config: the run's configuration, already typed and checked field by field.
        device, groups: where this rank computes and with whom it communicates (`megatron.training.initialize`).
        callbacks: observers; see `megatron.training.callbacks`.
        model_builder, objective: replace the GPT model or the objective named in the configuration.
        loss_function: replaces the objective's way from microbatch to loss.
        on_tokenizer: told of the tokenizer before the model is built.

    Raises ConfigError or DataError (on every rank alike) when the configuration cannot be run.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        device: torch.device,
        groups: ProcessGroupCollection,
        callbacks: Sequence[Callback] = (),
        model_builder: Callable[..., torch.nn.Module] = build_gpt_model,
        objective: Objective | None = None,
        loss_function: LossFunction | None = None,
        on_tokenizer: Callable[[Tokenizer], None] | None = None,
    ) -> None:
        self.config, self.device, self.groups = config, device, groups
        self.callbacks = list(callbacks)
        self.objective = objective or OBJECTIVES[config.objective.objective]()
        self.timers = Timers(config.logging.timing_log_level)
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        problems = check_run_config(config, world)
        if config.optimizer.optimizer_cpu_offload:
            problems += [problem] if (problem := offload_problem(device)) else []
        if config.model.cpu_offloading:
            problems += [problem] if (problem := activation_offload_problem(device)) else []
        if problems:
            raise known_to_all(ConfigError("\n".join(problems)))
        self.rank, self.world_size = own_rank(), world
        self._step_trace = self._build_step_trace()
        self.plan = TrainingPlan.of(config, groups.size("dp"))
        model_parallel_seed(config.training.seed, groups)
        if config.training.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        self.tokenizer: Tokenizer = on_all_ranks(lambda: build_run_tokenizer(config))
        if on_tokenizer is not None:
            on_tokenizer(self.tokenizer)
        self._vocab_size = true_vocab_size(config, self.tokenizer)
        self.data: TrainingData = build_data(
            config,
            self.tokenizer,
            dp_rank=groups.rank("dp"),
            dp_size=groups.size("dp"),
            train_samples=self.plan.train_samples,
            calculator=self.plan.calculator,
        )
        self.model_chunks = self._build_model(model_builder)
        self.forward_backward = ForwardBackward(
            config, groups, device, self.model_chunks, self.objective, loss_function, self._timed
        )
        self.optimizer = self._build_optimizer()
        self.scheduler = self._build_scheduler()
        self.store = on_all_ranks(lambda: open_store(config.checkpoint)) if config.checkpoint.save else None
        self.state = load_training_checkpoint(
            config=config,
            model_chunks=self.model_chunks,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            groups=groups,
        )
        self.state = self._with_planned_samples(self.state)
        model = config.transformer_config()
        padded = padded_vocab_size(self._vocab_size, model)
        self._flops_per_token = flops_per_token(model, config.data.seq_length, padded)
        for chunk in self.model_chunks:
            chunk.take_exposed_comm_time()  # waits of loading belong to no step
        self._accumulator = self._new_accumulator()
        self.loggers: RunLogger = self._open_logs()
        self._saved_iteration = self.state.iteration if self.state.iteration else None
        self._timed_steps = 0
        self._signals: StopSignals | None = None
        self._started = time.monotonic()

    # ------------------------------------------------------------------------------------------------ construction

    def _build_model(self, model_builder: Callable[..., torch.nn.Module]) -> list[DistributedDataParallel]:
        chunks = build_model_chunks(
            self.config, model_builder, pg_collection=self.groups, vocab_size=self._vocab_size, device=self.device
        )
        ddp_config = self.config.ddp_config(self.groups.size("dp_cp"))
        return [
            DistributedDataParallel(
                self.config.transformer_config(), ddp_config, chunk, pg_collection=self.groups, reduce_op="sum"
            )
            for chunk in chunks
        ]

    @property
    def model(self) -> DistributedDataParallel:
        """This rank's first model chunk: all of the model where there is no pipeline."""
        return self.model_chunks[0]

    def _build_optimizer(self) -> MegatronOptimizer:
        return get_megatron_optimizer(self.config.optimizer_config(), self.model_chunks, pg_collection=self.groups)

    def _build_scheduler(self) -> OptimizerParamScheduler:
        optimizer, scheduler, plan = self.config.optimizer, self.config.scheduler, self.plan
        decay = optimizer.weight_decay
        return OptimizerParamScheduler(
            self.optimizer,
            init_lr=scheduler.lr_warmup_init,
            max_lr=optimizer.lr or 0.0,
            min_lr=optimizer.min_lr,
            lr_warmup_steps=plan.lr_warmup_samples,
            lr_decay_steps=plan.lr_decay_samples,
            lr_decay_style=scheduler.lr_decay_style,
            start_wd=decay if scheduler.start_weight_decay is None else scheduler.start_weight_decay,
            end_wd=decay if scheduler.end_weight_decay is None else scheduler.end_weight_decay,
            wd_incr_steps=plan.train_samples,
            wd_incr_style=scheduler.weight_decay_incr_style,
            override_opt_param_scheduler=scheduler.override_opt_param_scheduler,
            wsd_decay_steps=plan.wsd_decay_samples,
            lr_wsd_decay_style=scheduler.lr_wsd_decay_style,
        )

    def _with_planned_samples(self, state: TrainState) -> TrainState:
        """The state with this run's length; says so where a prolonged run draws another order of samples."""
        before, now = state.planned_samples, self.plan.train_samples
        if before and before != now and self.config.data.data_shuffle == "megatron" and not self.config.data.mock_data:
            print_rank_0(
                f"warning: the run was planned for {before} samples and is now for {now}; Megatron's sample order depends on that "
                "number, so samples may repeat or be left out. data_shuffle=epoch has an order that does not"
            )
        return dataclasses.replace(state, planned_samples=now)

    def _new_accumulator(self) -> MetricsAccumulator:
        dtype = self.config.parallel.params_dtype
        return MetricsAccumulator(
            train_iters=self.plan.train_iters,
            world_size=self.world_size,
            flops_per_token=self._flops_per_token,
            peak_tflops=peak_tflops(self.device, dtype, self.config.logging.peak_tflops) if self.rank == 0 else None,
            loss_sum=self.state.logged_loss_sum,
            tokens=self.state.logged_loss_tokens,
            skipped=self.state.logged_skipped,
            nan=self.state.logged_nan,
        )

    def _build_step_trace(self) -> StepTrace | None:
        logging = self.config.logging
        if logging.trace_overlap is None:
            return None
        file, step = logging.trace_overlap, logging.trace_overlap_step
        trace = on_all_ranks(lambda: StepTrace(file, step))
        self.callbacks.insert(0, trace)
        return trace

    def _open_logs(self) -> RunLogger:
        """Logs of rank 0, the resolved configuration and the tokenizer beside the checkpoints."""

        def open_() -> RunLogger:
            save = self.config.checkpoint.save
            if save is not None and self.rank == 0:
                durable.replace_file(pathlib.Path(save) / "config.yaml", dump_yaml(self.config).encode(), uuid.uuid4().hex)
                copy_tokenizer_files(self.tokenizer, save)
            return build_loggers(self.config, self.rank, self.plan.train_iters, self.state.iteration, self.world_size)

        return on_all_ranks(open_)

    # -------------------------------------------------------------------------------------------------------- loop

    def fit(self) -> TrainState:
        """Train to the end of the plan, or to a stop request, and return the last state. With `save`, a checkpoint is always left."""
        self._announce()
        self._notify("on_train_start")
        with StopSignals(self.config.training.exit_signal_handler) as signals, _garbage_collection(self.config):
            self._signals = signals
            try:
                stop = self._run()
            finally:
                self.data.close()
                self.loggers.close()
                if self.store is not None:
                    self.store.release()
        self._notify("on_train_end")
        print_rank_0(f"stopped at iteration {self.state.iteration}: {stop.reason}" if stop else "training is done")
        return self.state

    def _run(self) -> StopRequest | None:
        training = self.config.training
        stop: StopRequest | None = None
        if training.skip_train:
            self._evaluate("validation")
            return None
        self._set_training(True)
        if self._evaluation_due():  # a run that was stopped at an evaluation step makes up for it
            stop = self._evaluate("validation")
        while stop is None and self.state.iteration < self.plan.train_iters:
            stop = self._iteration()
        self._save()
        if stop is None and training.eval_iters and self.data.has("test"):
            self._evaluate("test")
        return stop

    def _iteration(self) -> StopRequest | None:
        """One step with everything that follows it."""
        begun = time.perf_counter()
        with self._timed("batch-generator"):
            batches = self.data.train_step(self.state.consumed_samples)
        data_time = time.perf_counter() - begun
        result, stop = self.train_step(batches)
        self._account(result, time.perf_counter() - begun, data_time)
        self._notify("on_step_end", result)
        self._log_if_due()
        interval = self.config.training.exit_interval
        if stop is None and interval and self.state.iteration % interval == 0:
            stop = StopRequest(f"exit_interval={interval}")
        if stop is None and self._evaluation_due():
            with self._phase("evaluation"):
                stop = self._evaluate("validation")
        every = self.config.checkpoint.save_interval
        if every and self.state.iteration % every == 0:
            with self._phase("save-checkpoint"):
                self._save()
        self._collect_garbage()
        return stop

    def train_step(self, batches: list[dict[str, torch.Tensor]]) -> tuple[StepResult, StopRequest | None]:
        """One optimizer step over this rank's microbatches; all ranks call it together.

        Returns the step's global result and, when any rank was asked to stop, the reason all ranks agreed on.
        """
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer(overwrite=True)
        self.optimizer.zero_grad()
        reset_balance(self.model_chunks)
        with self._timed("forward-backward"):
            loss_sum, tokens = self.forward_backward.train(batches, self.optimizer.scale_loss)
        with self._timed("all-grads-sync"):
            finalize_model_grads(self.model_chunks, tokens)
        with self._phase("agreement"):
            agreed = self._agree(loss_sum, tokens)
        with self._timed("optimizer"):
            success, grad_norm, num_zeros = (False, None, None) if agreed.bad_loss else self.optimizer.step()
        nan = agreed.bad_loss or (not success and (not self.config.parallel.fp16 or self.optimizer.grad_scaler.spent is not None))
        if nan:
            self._non_finite(loss_sum, grad_norm)
        if success:
            update_expert_bias(self.model_chunks, self.groups)
            self.scheduler.step(increment=self.plan.global_batch_size(self.state.consumed_samples))
        return StepResult(
            loss_sum=agreed.loss_sum if success else 0.0,
            tokens=agreed.tokens if success else 0,
            grad_norm=grad_norm,
            skipped=not success,
            nan=nan,
            num_zeros=num_zeros,
            params_norm=self._params_norm(),
            group_norms={} if agreed.bad_loss else self._group_norms(),
        ), agreed.stop

    def _agree(self, loss_sum: torch.Tensor, tokens: torch.Tensor) -> "Agreement":
        """One reduction for what all ranks must know alike: loss, tokens, whether the loss is finite, wishes to stop."""
        finite = torch.isfinite(loss_sum)
        # the other tensor-parallel ranks have the same losses, and the other stages none
        counts = float(self.groups.rank("tp") == 0 and self.forward_backward.has_loss)
        values = torch.stack(
            [
                torch.where(finite, loss_sum, torch.zeros_like(loss_sum)) * counts,
                tokens.double() * counts,
                (~finite).double(),
                loss_sum.new_tensor(float(self._signal_received() is not None)),
                loss_sum.new_tensor(float(self._out_of_time())),
            ]
        )
        collectives.all_reduce(values, self.groups.world)  # sum over all ranks, fp64
        total, count, bad, signalled, late = values.tolist()
        stop = None
        if signalled:
            stop = StopRequest(f"signal {self._signal_received() or 'received by another rank'}")
        elif late:
            stop = StopRequest(f"exit_duration_in_mins={self.config.training.exit_duration_in_mins:g}")
        return Agreement(total, int(count), bool(bad), stop)

    def _signal_received(self) -> str | None:
        return None if self._signals is None else self._signals.received

    def _out_of_time(self) -> bool:
        limit = self.config.training.exit_duration_in_mins
        return limit is not None and (time.monotonic() - self._started) / 60.0 >= limit

    def _non_finite(self, loss_sum: torch.Tensor, grad_norm: float | None) -> None:
        """Name the culprits on every rank; stop all ranks, or let the step be skipped, as `nan_policy` says."""
        step = self.state.iteration + 1
        own = []
        if not bool(torch.isfinite(loss_sum)):
            own.append(f"loss is {float(loss_sum)}")
        fp16 = self.config.parallel.fp16
        names = [name for chunk in self.model_chunks for name in (_reduced_nonfinite(chunk) if fp16 else chunk.nonfinite_grads())]
        if names:
            reduced = "reduced " if fp16 else ""
            own.append(f"{reduced}gradient of {', '.join(names[:4])}{' and others' if len(names) > 4 else ''} is not finite")
        reports = gather_texts("; ".join(own) or None)
        summary = f"non-finite loss or gradient at step {step} (gradient norm {grad_norm})"
        if fp16 and grad_norm is not None:
            summary += f", and {self.optimizer.grad_scaler.spent}"
        skips = self.state.consecutive_skips + 1
        if self.config.training.nan_policy == "stop":
            fail_together(NonFiniteError, reports, f"{summary}; no weight was changed, nothing was saved")
        if skips >= self.config.training.max_consecutive_skips:
            fail_together(NonFiniteError, reports, f"{summary}; {skips} steps in a row were skipped")
        culprits = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(reports) if text)
        print_rank_0(f"{summary}; step skipped on all ranks. {culprits}")

    def _account(self, result: StepResult, step_time: float, data_time: float) -> None:
        """The next TrainState, and the interval's sums."""
        state = self.state
        batch = self.plan.global_batch_size(state.consumed_samples)
        tokens = batch * self.config.data.seq_length
        self.state = dataclasses.replace(
            state,
            iteration=state.iteration + 1,
            consumed_samples=state.consumed_samples + batch,
            consumed_tokens=state.consumed_tokens + tokens,
            skipped_iterations=state.skipped_iterations + result.skipped,
            nan_iterations=state.nan_iterations + result.nan,
            consecutive_skips=state.consecutive_skips + 1 if result.skipped else 0,
            floating_point_operations=state.floating_point_operations + tokens * self._flops_per_token,
            logged_loss_sum=state.logged_loss_sum + result.loss_sum,
            logged_loss_tokens=state.logged_loss_tokens + result.tokens,
            logged_skipped=state.logged_skipped + result.skipped,
            logged_nan=state.logged_nan + result.nan,
        )
        self._accumulator.add(
            result,
            step_time_s=step_time,
            data_time_s=data_time,
            exposed_comm_time_s=sum(chunk.take_exposed_comm_time() for chunk in self.model_chunks),
            global_batch_size=batch,
            tokens=tokens,
        )

    def _log_if_due(self) -> None:
        self.loggers.advance(self.state.iteration)
        self._timed_steps += 1
        if self.state.iteration % self.config.logging.log_interval and self.state.iteration != self.plan.train_iters:
            return
        metrics = self._accumulator.flush(
            self.state,
            learning_rate=self._learning_rate(),
            loss_scale=float(self.optimizer.get_loss_scale()),
            peak_memory_bytes=_peak_memory(self.device),
            expert_balance=balance_metrics(self.config.model, self.model_chunks, self.groups, self.device),
        )
        self.loggers.log_step(metrics)
        if self.rank == 0:
            self.timers.log(normalizer=self._timed_steps)
        self._timed_steps = 0
        self.state = dataclasses.replace(self.state, logged_loss_sum=0.0, logged_loss_tokens=0, logged_skipped=0, logged_nan=0)

    def _learning_rate(self) -> float:
        """Of the parameters without a rate of their own."""
        groups = self.optimizer.param_groups
        return next((group["lr"] for group in groups if not group["is_decoupled_lr"]), groups[0]["lr"] if groups else 0.0)

    # -------------------------------------------------------------------------------------------------- evaluation

    def _evaluation_due(self) -> bool:
        training, iteration = self.config.training, self.state.iteration
        if not training.eval_iters or not training.eval_interval or not self.data.has("valid") or not iteration:
            return False
        return iteration % training.eval_interval == 0 and self.state.evaluated_iteration != iteration

    def _evaluate(self, split: str) -> StopRequest | None:
        """Loss over all unmasked tokens of the split's first `eval_iters` global batches; ends early on a signal."""
        name = "valid" if split == "validation" else split
        if not self.data.has(name) or not self.config.training.eval_iters:
            return None
        self.optimizer.finish_param_sync()
        self._set_training(False)
        loss_sum, tokens, finite = 0.0, 0, True
        try:
            for step_loss, step_tokens in self._evaluation_steps(name):
                agreed = self._agree(step_loss, step_tokens)
                if agreed.stop:
                    return agreed.stop
                loss_sum, tokens, finite = loss_sum + agreed.loss_sum, tokens + agreed.tokens, finite and not agreed.bad_loss
        finally:
            self._set_training(True)
        loss = loss_sum / max(tokens, 1) if finite else math.nan
        metrics = EvalMetrics(self.state.iteration, split, loss, math.exp(min(loss, 700.0)), tokens, self.state.consumed_samples)
        if split == "validation":
            self.state = dataclasses.replace(self.state, evaluated_iteration=self.state.iteration)
        self.loggers.log_eval(metrics)
        self._notify("on_eval_end", metrics)
        return None

    def _evaluation_steps(self, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(loss sum float64, tokens int64) of this rank for each global batch of the split."""
        for microbatches in self.data.evaluation(name, self.config.training.eval_iters):
            yield self.forward_backward.evaluate(list(microbatches))

    def _set_training(self, mode: bool) -> None:
        for chunk in self.model_chunks:
            chunk.train(mode)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def _save(self) -> None:
        if self.store is None or self._saved_iteration == self.state.iteration:
            return
        begun = time.perf_counter()
        save_training_checkpoint(
            self.store,
            config=self.config,
            model_chunks=self.model_chunks,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            train_state=self.state,
            groups=self.groups,
        )
        self._saved_iteration = self.state.iteration
        print_rank_0(f"saved checkpoint of iteration {self.state.iteration} in {time.perf_counter() - begun:.2f} s")
        self._notify("on_save", self.state.iteration)

    # ------------------------------------------------------------------------------------------------------ little

    def _params_norm(self) -> float | None:
        """L2 norm of all logical parameters, in fp32; None unless it is to be logged."""
        if not self.config.logging.log_params_norm:
            return None
        self.optimizer.finish_param_sync()
        squares = torch.zeros(2, dtype=torch.float64, device=self.device)
        for p in self._parameters_counted_here():
            squares[int(param_meta(p).is_expert)] += torch.linalg.vector_norm(p.detach().float()).double().square()
        return math.sqrt(self._over_a_copy(squares).item())

    def _group_norms(self) -> dict[str, dict[str, float]]:
        """L2 norms by parameter group: of the step's gradients before clipping, of the parameters; empty unless they are to be logged."""
        grads = self.optimizer.group_grad_norms
        if not grads:
            return {}
        self.optimizer.finish_param_sync()
        labels = list(grads)
        squares = torch.zeros((2, len(labels)), dtype=torch.float64, device=self.device)
        for param in self._parameters_counted_here():
            label = self.optimizer.label_of(param)
            if label is not None:
                square = torch.linalg.vector_norm(param.detach().float()).double().square()
                squares[int(param_meta(param).is_expert), labels.index(label)] += square
        params = dict(zip(labels, self._over_a_copy(squares).sqrt().tolist(), strict=True))
        return {label: {"grad": norm, "param": params[label]} for label, norm in grads.items()}

    def _over_a_copy(self, sums: torch.Tensor) -> torch.Tensor:
        """[2, ...], of dense parameters and of experts, both of this rank -> [...] of a whole copy of the model."""
        dense, experts = sums.unbind(0)
        dense, experts = dense.contiguous(), experts.contiguous()
        collectives.all_reduce(dense, self.groups.mp)  # sum over tp and pp
        collectives.all_reduce(experts, self.groups.tp_ep_pp)  # sum over expert tp, ep and pp
        return dense + experts

    def _parameters_counted_here(self) -> list[torch.nn.Parameter]:
        """Each parameter, or part of one, is counted by one rank of a copy of the model."""
        return [p for chunk in self.model_chunks for p in chunk.parameters() if self.optimizer.counts(p)]

    def _collect_garbage(self) -> None:
        training = self.config.training
        if training.manual_gc and training.manual_gc_interval and self.state.iteration % training.manual_gc_interval == 0:
            gc.collect()

    def _announce(self) -> None:
        """What runs, printed once by rank 0."""
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        for param in self._parameters_counted_here():
            counts[int(param_meta(param).is_expert)] += param.numel()
        experts = self._over_a_copy(torch.stack([torch.zeros_like(counts[1]), counts[1]])).item()
        parameters = self._over_a_copy(counts)
        model = self.config.model
        idle = 0.0 if model.num_experts is None else experts * (1 - model.moe_router_topk / model.num_experts)
        active = f" ({(parameters.item() - idle) / 1e6:.2f} M active per token)" if idle else ""
        sizes = {
            "tensor": self.groups.size("tp"), "pipeline": self.groups.size("pp"), "expert": self.groups.size("ep"),
        }  # fmt: skip
        cut = "".join(f"{name} parallel {size}, " for name, size in sizes.items() if size > 1)
        print_rank_0(
            f"{self.world_size} rank(s) on {self.device.type}, {cut}data parallel {self.groups.size('dp')}; "
            f"{parameters.item() / 1e6:.2f} M parameters{active} in {self.config.parallel.params_dtype}"
        )
        print_rank_0(str(memory_report(self.model_chunks, self.optimizer)))
        for treatment, names in describe_param_groups(self.optimizer.param_groups).items():
            if names:
                print_rank_0(f"{treatment}: {', '.join(_without_layer_numbers(names))}")
        first = self.plan.global_batch_size(self.state.consumed_samples)
        print_rank_0(
            f"iterations {self.state.iteration} to {self.plan.train_iters}, global batch size {first}, "
            f"sequence length {self.config.data.seq_length}"
        )

    @contextlib.contextmanager
    def _timed(self, name: str, log_level: int = 1) -> Iterator[None]:
        """Time a phase under Megatron's name, if `timing_log_level` reaches its level; mark it in the trace of the step."""
        timer = self.timers(name, log_level)
        timer.start()
        with self._phase(name):
            yield
        timer.stop()

    def _phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._step_trace is None else self._step_trace.phase(name)

    def _notify(self, event: str, *values: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *values)


def _reduced_nonfinite(chunk: DistributedDataParallel) -> list[str]:
    """Parameters whose gradient is not finite after the reduction, in this rank's part. (An fp16 overflow is not looked for before.)"""
    return [part.name for part in chunk.valid_grads() if not bool(part.grad.isfinite().all())]


def _without_layer_numbers(names: Sequence[str]) -> list[str]:
    """Each kind of parameter once: `decoder.layers.*.mlp.linear_fc1.weight`."""
    return sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})


def _peak_memory(device: torch.device) -> int:
    """Bytes: CUDA allocator's peak, or the process's peak resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextlib.contextmanager
def _garbage_collection(config: RunConfig) -> Iterator[None]:
    """With `manual_gc`, no automatic collection inside the loop (ranks would pause at different times)."""
    if not config.training.manual_gc:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
