"""Optimizers over whole parameters, and what all optimizers share: main params, norm and clip, loss scale, state.

    UpdateUnit   parameters that are updated together: all of a model, or one bucket's shards (DistributedOptimizer)
      MainParam  one parameter's part in it: main (what is updated), grad, state

A step: copy 16-bit gradients to fp32, sum of squares over all ranks (each logical parameter once), then - only if that is
finite - the update, unit by unit, with loss scale and clip factor applied inside the kernel.
"""

import dataclasses
import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron.core import collectives
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import BucketEvent, _ParamAndGradBucketGroup, _ParamAndGradBuffer
from megatron.core.distributed.param_layout import SHARD_ALIGNMENT, Range
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.optimizer.clip_grads import clip_coefficient, count_zeros, sum_of_squares
from megatron.core.optimizer.distrib_optimizer_state import Replication, logical_tensor
from megatron.core.optimizer.grad_scaler import MegatronGradScaler, build_grad_scaler
from megatron.core.optimizer.matrix_owners import plan_rounds
from megatron.core.optimizer.matrix_round import MatrixRound, SharedMatrix
from megatron.core.optimizer.muon import Muon
from megatron.core.optimizer.offload import OffloadedShard, Transfers, transfers_for
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import (
    Condition,
    build_param_groups,
    group_label,
    group_scalars,
    load_group_scalars,
)
from megatron.core.optimizer.stored_values import BlockwiseParam, Plain, Rounding, Stored, StoredFlats, update_in_blocks
from megatron.core.optimizer.update_rules import Rule, UpdateRule, build_update_rules
from megatron.core.param_meta import ParamMeta, param_meta

STATE_FORMAT = "megadlms optimizer shard 1"
WIDE_DTYPES = (torch.float32, torch.float64)  # parameters of these dtypes are their own main params

StepResult = tuple[bool, float, int | None]


@dataclasses.dataclass(eq=False)
class MainParam:
    """The elements [start, start + len(main)) of a flattened parameter, as the optimizer sees them.

    main: 1-D, fp32 (or the parameter's own memory where it is wide). grad: 1-D, same dtype. state: name -> 1-D, like main.
    blockwise: with use_precision_aware_optimizer, the values as they are stored; `main` is then only as long as they are, `state`
        empty, and `grad` may be 16-bit.
    device_grad: the gradient on the device, where `grad` is a copy on the host that comes with the update.
    """

    name: str
    param: torch.nn.Parameter
    start: int
    main: torch.Tensor
    grad: torch.Tensor
    state: dict[str, torch.Tensor]
    group: dict[str, Any]
    blockwise: BlockwiseParam | None = None
    device_grad: torch.Tensor | None = None

    def stored(self) -> Mapping[str, Stored]:
        """main_param and states by name, in whatever form they are kept."""
        if self.blockwise is not None:
            return self.blockwise.stored
        return {name: Plain(tensor) for name, tensor in ({"main_param": self.main} | self.state).items()}


@dataclasses.dataclass(frozen=True)
class LoadTargets:
    """Where a checkpoint is to be read to.

    tensors: by name, in the dtypes that the checkpoint has. converted: what changes its dtype, by parameter-free name. finish: to be
    called when everything was read, before `reload_after_load`.
    """

    tensors: dict[str, ShardedTensor]
    converted: tuple[str, ...]
    pending: tuple[tuple[Stored, torch.Tensor], ...]

    @torch.no_grad()
    def finish(self) -> None:
        """Take what was read in another dtype."""
        for stored, values in self.pending:
            stored.assign(values)


@dataclasses.dataclass
class UpdateUnit:
    """Main params that are updated together.

    grad_copies, param_copies: (to, from) pairs that carry gradients into fp32 before the norm, and main params into the model
    after the update. dense, expert: flat gradients that this rank adds to the norm; by_group: the same by parameter group. bucket_group: whose gather follows.
    flats: per bucket, name -> this rank's flat memory (main_param and states). matrices: those that Muon updates, held by this
    rank or not; the other main params are updated here. stored: per bucket or parameter, the memory of values in other forms.
    rounding: how they are rounded. offload: per bucket, what is copied to and from the host, where all else of the unit lies then.
    """

    main_params: list[MainParam]
    grad_copies: list[tuple[torch.Tensor, torch.Tensor]]
    param_copies: list[tuple[torch.Tensor, torch.Tensor]]
    dense: list[torch.Tensor]
    expert: list[torch.Tensor]
    by_group: list[tuple[dict[str, Any], torch.Tensor]] = dataclasses.field(default_factory=list)
    bucket_group: _ParamAndGradBucketGroup | None = None
    flats: list[dict[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    matrices: list[SharedMatrix] = dataclasses.field(default_factory=list)
    stored: list[StoredFlats] = dataclasses.field(default_factory=list)
    rounding: Rounding | None = None
    offload: list[OffloadedShard] = dataclasses.field(default_factory=list)

    def copy_grads(self) -> None:
        """16-bit gradients -> fp32."""
        for target, source in self.grad_copies:
            target.copy_(source)

    def start_offload(self) -> None:
        """Start fetching the gradients to the host."""
        for shard in self.offload:
            shard.start_grad()

    def finish_offload(self) -> None:
        """What the device does next sees the new parameters."""
        for shard in self.offload:
            shard.join_param()

    def copy_params(self) -> None:
        """Main params -> model parameters, rounded to their dtype."""
        for target, source in self.param_copies:
            target.copy_(source)
        for blockwise in self._blockwise:
            blockwise.write_model()
        self._send_params()

    def _send_params(self) -> None:
        for shard in self.offload:
            shard.send_param()

    def take_params(self) -> None:
        """Model parameters -> main params."""
        for shard in self.offload:
            shard.fetch_param()
        for target, source in self.param_copies:
            source.copy_(target)
        for blockwise in self._blockwise:
            blockwise.read_model()

    def update(self, rules: Mapping[str, UpdateRule], divisor: float) -> None:
        """One step of its rule on every main param that has one of `rules`, group by group."""
        for shard in self.offload:
            shard.wait_grad()
        if self.offload:
            self.copy_grads()
        for group, params in self._blockwise_by_group:
            update_in_blocks(rules[group["optimizer"]], params, group, divisor, self.rounding)
        for group, mains, grads, states in self._by_group:
            if group["optimizer"] in rules:
                rules[group["optimizer"]].update(mains, grads, states, group, divisor)

    def after_update(self) -> None:
        """Main params -> model parameters, where `update` has not written these itself."""
        if self._blockwise:
            self._send_params()
        else:
            self.copy_params()

    @functools.cached_property
    def _blockwise(self) -> list[BlockwiseParam]:
        return [main.blockwise for main in self.main_params if main.blockwise is not None]

    @functools.cached_property
    def _blockwise_by_group(self) -> list[tuple[dict[str, Any], list[BlockwiseParam]]]:
        groups = {id(main.group): main.group for main in self.main_params}
        members = [(main.group, main.blockwise) for main in self.main_params if main.blockwise is not None]
        by_group = [(group, [param for owner, param in members if owner is group]) for group in groups.values()]
        return [(group, params) for group, params in by_group if params]

    @functools.cached_property
    def _by_group(self) -> list[tuple[dict[str, Any], list[torch.Tensor], list[torch.Tensor], dict[str, list[torch.Tensor]]]]:
        own = [main for main in self.main_params if main.blockwise is None]
        groups = {id(main.group): main.group for main in own}
        lists = []
        for key, group in groups.items():
            members = [main for main in own if id(main.group) == key]
            states = {name: [main.state[name] for main in members] for name in members[0].state}
            lists.append((group, [main.main for main in members], [main.grad for main in members], states))
        return lists


@dataclasses.dataclass(frozen=True)
class GradStats:
    """Over all ranks: squared norm of the unscaled gradients, number of zeros and squares by parameter group where asked for."""

    square: float
    num_zeros: int | None
    group_squares: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def norm(self) -> float:
        """L2 norm."""
        return math.sqrt(self.square) if self.square >= 0 else math.nan


class MegatronOptimizer(ABC):
    """What the training loop uses. Built by `get_megatron_optimizer`.

    Args:
        config: hyperparameters and precision.
        model_chunks: this rank's model, wrapped.
        no_weight_decay_cond, scale_lr_cond, lr_mult: see `build_param_groups`.
        transfers: how values are copied with optimizer_cpu_offload; default: as fits the device.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[DistributedDataParallel],
        *,
        no_weight_decay_cond: Condition | None = None,
        scale_lr_cond: Condition | None = None,
        lr_mult: float = 1.0,
        transfers: Transfers | None = None,
    ) -> None:
        self.config = config
        self.model_chunks = list(model_chunks)
        self.groups = self.model_chunks[0].pg_collection
        self.grad_scaler: MegatronGradScaler = build_grad_scaler(config)
        self.group_grad_norms: dict[str, float] = {}  # of the last step, by `group_label`; with log_param_group_norms
        self._steps = 0  # updates so far, also of a stage without parameters
        named = [(name, param) for chunk in self.model_chunks for param, name in chunk.param_to_name.items()]
        self.device = named[0][1].device if named else torch.device("cpu")
        self.rules: dict[str, Rule] = build_update_rules(config, self.device)
        self.transfers, self._host_rules = transfers, self.rules
        if config.optimizer_cpu_offload:
            self.transfers = transfers or transfers_for(self.device)
            self._host_rules = build_update_rules(config.replace(optimizer_backend="torch"), torch.device("cpu"))
        self._param_groups, self._group_of = build_param_groups(
            config,
            named,
            self.rules,
            no_weight_decay_cond=no_weight_decay_cond,
            scale_lr_cond=scale_lr_cond,
            lr_mult=lr_mult,
        )
        self.units: list[UpdateUnit] = self._build_units()
        self._rounds = self._plan_rounds()
        for main in self.main_params():
            main.group["params"].append(main.main)

    @abstractmethod
    def _build_units(self) -> list[UpdateUnit]:
        """Main params and states of this rank, in the order of the updates."""

    def _plan_rounds(self) -> list[tuple[MatrixRound | None, list[UpdateUnit]]]:
        """Units that are updated together, because their matrices are orthogonalised together; without any, one after the other."""
        muon = self.rules.get("muon")
        rounds: list[tuple[MatrixRound | None, list[UpdateUnit]]] = []
        for group, run in itertools.groupby(self.units, key=lambda unit: None if unit.bucket_group is None else unit.bucket_group.group):
            units = list(run)
            for part in plan_rounds([[matrix.cost for matrix in unit.matrices] for unit in units], collectives.group_size(group)):
                members = units[part.start : part.stop]
                matrices = [matrix for unit in members for matrix in unit.matrices]
                rounds.append((MatrixRound(muon, matrices, group) if isinstance(muon, Muon) and matrices else None, members))
        return rounds

    def _shared_matrix(self, param: torch.nn.Parameter, main: MainParam | None, held: Sequence[Range]) -> SharedMatrix:
        """A matrix for Muon. main: this rank's part. held: each rank's elements."""
        meta = param_meta(param)
        split = meta.tp_dim is not None and self.config.muon_tp_mode == "duplicated"
        tp = (self.groups.expt_tp if meta.is_expert else self.groups.tp) if split else None
        tp = tp if collectives.group_size(tp) > 1 else None
        nothing = param.new_empty(0, dtype=main_dtype(param))
        own = (nothing,) * 3 if main is None else (main.main, main.grad, main.state["momentum_buffer"])
        return SharedMatrix(param, tuple(held), *own, group=self._group_of[param], tp_group=tp)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The live groups: what is written into them counts in the next step."""
        return self._param_groups

    @property
    def state_names(self) -> tuple[str, ...]:
        """main_param and the update rules' states."""
        return ("main_param", *dict.fromkeys(name for rule in self.rules.values() for name in rule.state_names))

    def state_names_of(self, param: torch.nn.Parameter) -> tuple[str, ...]:
        """main_param and the states of the parameter's own rule."""
        return ("main_param", *self.rules[self._group_of[param]["optimizer"]].state_names)

    def main_params(self) -> Iterable[MainParam]:
        """All main params of this rank."""
        return (main for unit in self.units for main in unit.main_params)

    # Step

    @torch.no_grad()
    def step(self) -> StepResult:
        """(success, grad_norm, num_zeros), the same on every rank.

        grad_norm: of the unscaled gradients before clipping, each logical parameter counted once. If it is not finite nothing
        is updated anywhere and success is False. num_zeros: None unless log_num_zeros_in_grad.
        """
        stats = self.grad_stats()
        success = math.isfinite(stats.square)
        scale = self.grad_scaler.value
        self.grad_scaler.update(not success)
        if success:
            self.apply(scale / clip_coefficient(self.config.clip_grad, stats.norm))
        return success, stats.norm, stats.num_zeros

    @torch.no_grad()
    def grad_stats(self) -> GradStats:
        """Norm and zeros of the step's gradients over all ranks; leaves the gradients in fp32 for `apply`."""
        for chunk in self.model_chunks:
            chunk.before_grads_are_read()
        for unit in self.units:
            if not unit.offload:
                unit.copy_grads()
        dense = self._local_totals(expert=False)
        expert = self._local_totals(expert=True)
        if self.groups.size("ep") == 1 and self.groups.size("expt_tp") == self.groups.size("tp"):
            dense, expert = dense + expert, torch.zeros_like(expert)  # both kinds are spread over the same ranks
        else:
            self._sum_over_ranks(expert, expert=True)
        self._sum_over_ranks(dense, expert=False)
        square, num_zeros = (dense + expert).tolist()
        counted = int(num_zeros) if self.config.log_num_zeros_in_grad else None
        by_group = {label: part / self.grad_scaler.value**2 for label, part in self._group_squares().items()}
        self.group_grad_norms = {label: math.sqrt(part) if part >= 0 else math.nan for label, part in by_group.items()}
        return GradStats(square / self.grad_scaler.value**2, counted, by_group)

    def _group_squares(self) -> dict[str, float]:
        """Sum of squares of the gradients over all ranks by `group_label`; empty unless log_param_group_norms."""
        if not self.config.log_param_group_norms:
            return {}
        totals = {expert: torch.zeros(len(self.group_labels), dtype=torch.float64) for expert in (False, True)}
        for index, label in enumerate(self.group_labels):
            for group in self._param_groups:
                if group_label(group) == label:
                    flats = (flat for unit in self.units for owner, flat in unit.by_group if owner is group)
                    totals[group["is_expert_parallel"]][index] = sum_of_squares(flats)
        for expert, part in totals.items():
            totals[expert] = part.to(self.device)
            self._sum_over_ranks(totals[expert], expert)
        return dict(zip(self.group_labels, (totals[False] + totals[True]).tolist(), strict=True))

    @functools.cached_property
    def group_labels(self) -> list[str]:
        """`group_label` of the groups of all ranks, sorted (a collective over all ranks at first)."""
        own = [group_label(group) for group in self._param_groups]
        return sorted({label for labels in collectives.gather_objects(own, self.groups.world) for label in labels})

    def label_of(self, param: torch.nn.Parameter) -> str | None:
        """`group_label` of the parameter's group; None for one that is not trained."""
        return group_label(self._group_of[param]) if param in self._group_of else None

    def _local_totals(self, expert: bool) -> torch.Tensor:
        """fp64 [2]: sum of squares and number of zeros of the gradients that this rank counts."""
        square = sum_of_squares(flat for unit in self.units for flat in (unit.expert if expert else unit.dense))
        zeros = torch.zeros((), dtype=torch.int64)
        if self.config.log_num_zeros_in_grad:
            mains = [main for main in self.main_params() if param_meta(main.param).is_expert == expert]
            grads = (main.grad if main.device_grad is None else main.device_grad for main in mains if self.counts(main.param))
            zeros = count_zeros(grads)
        return torch.stack([square.to(self.device), zeros.to(self.device, torch.float64)])

    def _sum_over_ranks(self, totals: torch.Tensor, expert: bool) -> None:
        for name in self._norm_groups(expert):
            collectives.all_reduce(totals, getattr(self.groups, name))  # sum, fp64

    def get_grad_norm(self) -> float:
        """Norm of the step's gradients over all ranks."""
        return self.grad_stats().norm

    @torch.no_grad()
    def apply(self, divisor: float) -> None:
        """Update with the gradients that `grad_stats` left, divided by `divisor`."""
        self.finish_param_sync()
        self._steps += 1
        for group in self._param_groups:
            group["step"] += 1
        elementwise = {name: rule for name, rule in self.rules.items() if isinstance(rule, UpdateRule)}
        on_host = {name: rule for name, rule in self._host_rules.items() if isinstance(rule, UpdateRule)}
        for unit in self.units:
            unit.start_offload()
        for matrices, units in self._rounds:
            if matrices is not None:
                matrices.start(divisor)
            for unit in units:
                self._before_unit(unit)
                unit.update(on_host if unit.offload else elementwise, divisor)
            if matrices is not None:
                matrices.finish()
            for unit in units:
                unit.after_update()
                unit.finish_offload()
                self._after_unit(unit)
        self._after_update()

    def _before_unit(self, unit: UpdateUnit) -> None:
        """A unit is about to be updated: observers of its buckets are told."""
        every = [group for chunk in self.model_chunks for group in chunk.bucket_groups]
        for group in every if unit.bucket_group is None else [unit.bucket_group]:
            group.tell(BucketEvent.PARAMS_WRITING)

    def _after_unit(self, unit: UpdateUnit) -> None:
        """A unit's main params and model parameters are new."""
        return

    def _after_update(self) -> None:
        """All are."""
        return

    def _norm_groups(self, expert: bool) -> tuple[str, ...]:
        """Groups whose ranks hold different parameters, or parts of them."""
        return ("tp_ep_pp",) if expert else ("mp",)

    def counts(self, param: torch.nn.Parameter) -> bool:
        """Whether this rank is the one that counts the parameter (not a replica of another rank's)."""
        return all(self.groups.rank(name) == 0 for name in param_meta(param).replica_groups)

    # Loss scale, gradients, parameters

    def get_loss_scale(self) -> torch.Tensor:
        """fp32 tensor [1]."""
        return self.grad_scaler.scale.to(self.device)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on."""
        return loss * self.grad_scaler.value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop `param.grad`; the gradient buffers are the model's (`zero_grad_buffer`), as in Megatron."""
        for chunk in self.model_chunks:
            for param in chunk.param_to_name:
                if set_to_none or param.grad is None:
                    param.grad = None
                else:
                    param.grad.zero_()

    def finish_param_sync(self) -> None:
        """Complete pending parameter gathers; call before parameters are read without running the model."""
        for chunk in self.model_chunks:
            chunk.finish_param_sync()

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Model parameters were changed (loaded): take them as main params."""
        self.finish_param_sync()
        for unit in self.units:
            unit.take_params()

    @torch.no_grad()
    def reload_after_load(self) -> None:
        """Main params were loaded: take them as model parameters, on all ranks (a collective)."""
        self._load_back()

    # State of this rank

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: local (never a collective), for torch.save. Loads into the same rank of the same layout."""
        return {
            "format": STATE_FORMAT,
            "layout": self._layout(),
            "common": self.common_state_dict(),
            "state": {
                main.name: {name: stored.values().clone() for name, stored in main.stored().items()}
                for main in self.main_params()
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises CheckpointError for the state of another rank or layout."""
        if state_dict.get("format") != STATE_FORMAT:
            raise CheckpointError(f"not an optimizer state of this version (format {state_dict.get('format')!r}); {_ADVICE}")
        saved, own = state_dict["layout"], self._layout()
        for key in own:
            if saved.get(key) != own[key]:
                difference = f"{_short(saved.get(key))}, here {_short(own[key])}"
                raise CheckpointError(f"the optimizer state was saved with another {key}: {difference}; {_ADVICE}")
        self.finish_param_sync()
        for main in self.main_params():
            for name, stored in main.stored().items():
                stored.assign(state_dict["state"][main.name][name])
        self.load_common_state_dict(state_dict["common"])
        self._load_back()

    def _load_back(self) -> None:
        """After a local load; model parameters of other ranks' shards come with the model's own state."""
        for unit in self.units:
            unit.copy_params()
            unit.finish_offload()

    def common_state_dict(self) -> dict[str, Any]:
        """JSON-able, the same on all ranks of a stage: which optimizer, step, parameter groups' scalars, loss scaler."""
        return {
            "optimizer": self.config.optimizer,
            "states": list(self.state_names),
            "step": self._steps,
            "param_groups": [group_scalars(group) for group in self._param_groups],
            "grad_scaler": self.grad_scaler.state_dict(),
        }

    def load_common_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `common_state_dict`. Groups are matched by what they are, hyperparameters stay this run's.

        Raises CheckpointError for the state of another optimizer.
        """
        self.check_common_state_dict(state)
        load_group_scalars(self._param_groups, state["param_groups"], state["step"])
        self._steps = state["step"]
        self.grad_scaler.load_state_dict(state["grad_scaler"])

    def check_common_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if `state` (of `common_state_dict`) is that of another optimizer."""
        saved, own = (state.get("optimizer"), state.get("states")), (self.config.optimizer, list(self.state_names))
        if saved != own:
            raise CheckpointError(
                f"the optimizer state is that of --optimizer {saved[0]} ({', '.join(saved[1] or ())}), this run has --optimizer "
                f"{own[0]} ({', '.join(own[1])}); give the options of that run, or --no-load-optim to start with fresh state"
            )

    @torch.no_grad()
    def sharded_state_dict(self) -> dict[str, ShardedTensor]:
        """What this rank holds of `optimizer.<main_param, exp_avg, ...>.<parameter>`: live memory, or fp32 copies of values that are
        kept in another form (remainders, fp16 in rows). To load use `load_targets`."""
        tensors = [
            self._sharded(main, name, stored.values()) for main in self.main_params() for name, stored in main.stored().items()
        ]
        return {tensor.name: tensor for tensor in tensors if tensor.pieces}

    @torch.no_grad()
    def load_targets(self, dtypes: Mapping[str, torch.dtype]) -> LoadTargets:
        """Tensors to load this rank's state into: live memory where the checkpoint's dtype is its own.

        dtypes: of the checkpoint's tensors, by name.
        """
        tensors, pending, converted = {}, [], set()
        for main in self.main_params():
            for name, stored in main.stored().items():
                saved = dtypes.get(f"optimizer.{name}.{main.name}")
                data, live = stored.values(), stored.live
                if live is None or saved not in (None, live.dtype):
                    data = data.to(saved or torch.float32, copy=True)
                    pending.append((stored, data))
                    if stored.form != "bf16 parameters and remainders" or data.dtype != torch.float32:
                        converted.add(f"{name} from {str(data.dtype).removeprefix('torch.')} to {stored.form}")
                tensor = self._sharded(main, name, data)
                if tensor.pieces:
                    tensors[tensor.name] = tensor
        return LoadTargets(tensors, tuple(sorted(converted)), tuple(pending))

    def _sharded(self, main: MainParam, name: str, data: torch.Tensor) -> ShardedTensor:
        return self.sharded(f"optimizer.{name}.{main.name}", main.param, main.start, data)

    def sharded(self, name: str, param: torch.nn.Parameter, start: int, data: torch.Tensor) -> ShardedTensor:
        """What belongs to the elements [start, start + len(data)) of a flattened parameter, as part of a logical tensor."""
        return logical_tensor(name, param, start, data, self._replication(param_meta(param)))

    def _replication(self, meta: ParamMeta) -> Replication:
        tp = "expt_tp" if meta.is_expert else "tp"
        copies, index = self.groups.place_among(self._replica_groups(meta))
        return Replication(self.groups.rank(tp), self.groups.size(tp), copies, index)

    def _replica_groups(self, meta: ParamMeta) -> tuple[str, ...]:
        """Groups whose ranks hold the same part of the parameter's state."""
        return ("expt_dp" if meta.is_expert else "dp_cp", *meta.replica_groups)

    def _count(self, unit: UpdateUnit, grads: torch.Tensor, counted: Mapping[torch.nn.Parameter, Range]) -> None:
        """Have this rank add parts of a flat gradient to the norms: of parameters that are all experts' or all dense."""
        expert = any(param_meta(param).is_expert for param in counted)
        (unit.expert if expert else unit.dense).extend(grads[held.slice()] for held in norm_ranges(counted.values()))
        for group in self._param_groups:
            own = [held for param, held in counted.items() if self._group_of[param] is group]
            unit.by_group += [(group, grads[held.slice()]) for held in norm_ranges(own)]

    def _rounding(self) -> Rounding | None:
        return Rounding(self.config.seed) if self.config.stochastic_rounding else None

    def _fp32_grads(self, grads: torch.Tensor, unit: UpdateUnit) -> torch.Tensor:
        """The gradients that the optimizer reads: fp32, or those of the buffer if main_grads_dtype is 16-bit."""
        if grads.dtype in WIDE_DTYPES or self.config.main_grads_dtype != "fp32":
            return grads
        copy = torch.zeros_like(grads, dtype=torch.float32)
        unit.grad_copies.append((copy, grads))
        return copy

    def _blockwise_main(
        self, flats: StoredFlats, part: slice, param: torch.nn.Parameter, name: str, start: int, grad: torch.Tensor
    ) -> MainParam:
        """The parameter whose elements from `start` on lie in `part` of `flats`."""
        meta = param_meta(param)
        rank = self.groups.rank("expt_tp" if meta.is_expert else "tp")
        split = f" on tensor-parallel rank {rank}" if meta.tp_dim is not None else ""
        blockwise = BlockwiseParam(flats.cut(part), flats.model[part], grad, name + split, start)
        return MainParam(name, param, start, flats.model[part], grad, {}, self._group_of[param], blockwise)

    def _layout(self) -> dict[str, Any]:
        """What must agree for a local state to be loaded."""
        return {
            "optimizer": f"{type(self).__name__} ({self.config.optimizer})",
            "states": list(self.state_names),
            "tensor-parallel rank and size": [self.groups.rank("tp"), self.groups.size("tp")],
            "pipeline rank and size": [self.groups.rank("pp"), self.groups.size("pp")],
            "ranges": [[main.name, list(main.param.shape), main.start, main.main.numel()] for main in self.main_params()],
        }


class _WholeParamOptimizer(MegatronOptimizer):
    """Every rank updates all parameters, with the same gradients."""

    def _build_units(self) -> list[UpdateUnit]:
        unit = UpdateUnit([], [], [], [], [], rounding=self._rounding())
        for chunk in self.model_chunks:
            for buffer in chunk.all_buffers():
                self._add_params(unit, buffer, self._fp32_grads(buffer.grad_data, unit))
        return [unit]

    def _add_params(self, unit: UpdateUnit, buffer: _ParamAndGradBuffer, grads: torch.Tensor) -> None:
        counted = {}
        for param, (start, end, _) in buffer.param_index_map.items():
            model, name, grad = param.data.view(-1), buffer.param_to_name[param], grads[start:end]
            if self.counts(param):
                counted[param] = Range(start, end)
            if self.config.use_precision_aware_optimizer:
                flats = StoredFlats(self.config, model, self.state_names_of(param))
                unit.stored.append(flats)
                unit.main_params.append(self._blockwise_main(flats, slice(0, end - start), param, name, 0, grad))
                continue
            main = self._main_of(model)
            if main is not model:
                unit.param_copies.append((model, main))
            state = {name: torch.zeros_like(main) for name in self.state_names_of(param)[1:]}
            unit.main_params.append(MainParam(name, param, 0, main, grad, state, self._group_of[param]))
            if self._group_of[param]["optimizer"] == "muon":
                unit.matrices.append(self._shared_matrix(param, unit.main_params[-1], [Range(0, param.numel())]))
        self._count(unit, grads, counted)

    @abstractmethod
    def _main_of(self, model: torch.Tensor) -> torch.Tensor:
        """The main param of a flattened parameter; the parameter itself where it is wide."""


class FP32Optimizer(_WholeParamOptimizer):
    """For models whose parameters are all fp32 (or fp64): they are their own main params."""

    def _main_of(self, model: torch.Tensor) -> torch.Tensor:
        assert model.dtype in WIDE_DTYPES, model.dtype
        return model


class Float16OptimizerWithFloat16Params(_WholeParamOptimizer):
    """For models with fp16 or bf16 parameters: fp32 main params beside them."""

    def _main_of(self, model: torch.Tensor) -> torch.Tensor:
        return model if model.dtype in WIDE_DTYPES else model.float()


class ChainedOptimizer:
    """Several optimizers over different parameters as one: one norm, one clip factor, one decision to skip.

    Args:
        chained_optimizers: with the same clip_grad and loss scaling.
    """

    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]) -> None:
        if not chained_optimizers:
            raise ConfigError("ChainedOptimizer needs at least one optimizer")
        first = chained_optimizers[0].config
        for optimizer in chained_optimizers[1:]:
            if (optimizer.config.clip_grad, optimizer.config.loss_scale, optimizer.config.fp16) != (
                first.clip_grad,
                first.loss_scale,
                first.fp16,
            ):
                raise ConfigError("chained optimizers must have the same clip_grad, loss_scale and fp16")
        self.chained_optimizers = list(chained_optimizers)
        self.config = first
        self.grad_scaler = self.chained_optimizers[0].grad_scaler
        for optimizer in self.chained_optimizers:
            optimizer.grad_scaler = self.grad_scaler

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The live groups of all."""
        return [group for optimizer in self.chained_optimizers for group in optimizer.param_groups]

    @torch.no_grad()
    def step(self) -> StepResult:
        """As `MegatronOptimizer.step`, with the norm over all parameters."""
        stats = [optimizer.grad_stats() for optimizer in self.chained_optimizers]
        zeros = [part.num_zeros for part in stats]
        total = GradStats(sum(part.square for part in stats), None if None in zeros else sum(filter(None, zeros)))
        success, scale = math.isfinite(total.square), self.grad_scaler.value
        self.grad_scaler.update(not success)
        if success:
            divisor = scale / clip_coefficient(self.config.clip_grad, total.norm)
            for optimizer in self.chained_optimizers:
                optimizer.apply(divisor)
        return success, total.norm, total.num_zeros

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of each."""
        for optimizer in self.chained_optimizers:
            optimizer.zero_grad(set_to_none)

    def get_loss_scale(self) -> torch.Tensor:
        """The common scale, fp32 tensor [1]."""
        return self.chained_optimizers[0].get_loss_scale()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on."""
        return self.chained_optimizers[0].scale_loss(loss)

    def finish_param_sync(self) -> None:
        """Of each."""
        for optimizer in self.chained_optimizers:
            optimizer.finish_param_sync()

    def reload_model_params(self) -> None:
        """Of each."""
        for optimizer in self.chained_optimizers:
            optimizer.reload_model_params()

    def reload_after_load(self) -> None:
        """Of each."""
        for optimizer in self.chained_optimizers:
            optimizer.reload_after_load()

    def state_dict(self) -> dict[str, Any]:
        """This rank's states, local."""
        return {"format": STATE_FORMAT, "chained": [optimizer.state_dict() for optimizer in self.chained_optimizers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        saved = state_dict.get("chained", [])
        if len(saved) != len(self.chained_optimizers):
            raise CheckpointError(
                f"the state holds {len(saved)} chained optimizers, here are {len(self.chained_optimizers)}; {_ADVICE}"
            )
        for optimizer, state in zip(self.chained_optimizers, saved, strict=True):
            optimizer.load_state_dict(state)

    def common_state_dict(self) -> dict[str, Any]:
        """JSON-able state of each."""
        return {"chained": [optimizer.common_state_dict() for optimizer in self.chained_optimizers]}

    def check_common_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of each."""
        for optimizer, part in zip(self.chained_optimizers, state["chained"], strict=True):
            optimizer.check_common_state_dict(part)

    def load_common_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `common_state_dict`."""
        for optimizer, part in zip(self.chained_optimizers, state["chained"], strict=True):
            optimizer.load_common_state_dict(part)

    def load_targets(self, dtypes: Mapping[str, torch.dtype]) -> LoadTargets:
        """Union of each one's."""
        parts = [optimizer.load_targets(dtypes) for optimizer in self.chained_optimizers]
        return LoadTargets(
            {name: tensor for part in parts for name, tensor in part.tensors.items()},
            tuple(sorted({text for part in parts for text in part.converted})),
            tuple(pair for part in parts for pair in part.pending),
        )

    def sharded_state_dict(self) -> dict[str, ShardedTensor]:
        """Union of each one's tensors; parameter names are distinct."""
        merged: dict[str, ShardedTensor] = {}
        for optimizer in self.chained_optimizers:
            for name, tensor in optimizer.sharded_state_dict().items():
                if name in merged:
                    raise CheckpointError(f"{name} belongs to two of the chained optimizers; give their models distinct names")
                merged[name] = tensor
        return merged


def main_dtype(param: torch.Tensor) -> torch.dtype:
    """dtype of a parameter's main param."""
    return param.dtype if param.dtype in WIDE_DTYPES else torch.float32


def norm_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Parameters' ranges of a buffer, widened to whole rows of 32 (gaps are zero) and merged where only a gap is between.

    Ranges begin at multiples of 32 and parameters at multiples of 64, so a gap is shorter than 64.
    """
    merged: list[Range] = []
    for held in sorted(ranges, key=lambda item: item.start):
        if held.size == 0:
            continue
        stop = -(-held.end // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
        if merged and held.start - merged[-1].end <= SHARD_ALIGNMENT:
            merged[-1] = Range(merged[-1].start, stop)
        else:
            merged.append(Range(held.start, stop))
    return merged


_ADVICE = "to change the layout load the distributed checkpoint (sharded_state_dict, --save/--load), which fits any layout"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "..."
