"""Training checkpoints: which tensors and values make up a run's state, and how they come back in the same or another layout.

    model.<name>                          parameters and persistent buffers
    optimizer.<main_param|...>.<name>     fp32 main params and moments, by the parameter they belong to
    rng.rank00000.<stream>                each rank's random state
    common (JSON)                         train state, scheduler, optimizer's counters, layout, resolved configuration

Where the model is fp32 its parameters are the main params, so `optimizer.main_param.<name>` is an alias and stored once.
`CheckpointStore` owns files and the commit protocol; `save_checkpoint` and `load_checkpoint` are facades.
"""

import dataclasses
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing import durable
from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.core.dist_checkpointing.mapping import Piece, ShardedTensor, relative, whole
from megatron.core.dist_checkpointing.model_state import model_sharded_tensors
from megatron.core.dist_checkpointing.serialization import DTYPES, DamagedCheckpointError
from megatron.core.dist_checkpointing.store import CheckpointStore
from megatron.core.distributed import DistributedDataParallel
from megatron.core.errors import CheckpointError
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.seeding import derive_seed
from megatron.core.tensor_parallel.random import model_parallel_seed, rng_state, set_rng_state
from megatron.core.tokenizers import Tokenizer
from megatron.training.agreement import known_to_all, on_all_ranks, own_rank, print_rank_0
from megatron.training.config import dump_yaml
from megatron.training.config.run_config import CheckpointConfig, RunConfig
from megatron.training.global_vars import get_args
from megatron.training.plan import TrainingPlan
from megatron.training.train_state import TrainState

MAIN_PARAM = "optimizer.main_param."
_LAYOUT_AXES = ("world", "tp", "cp", "ep", "dp", "pp")


# ------------------------------------------------------------------------------------------------------------------ stores


def open_store(options: CheckpointConfig) -> CheckpointStore:
    """The store of the save directory, with its lease taken and leftovers of killed runs removed (by rank 0). Not collective.

    Raises CheckpointError if another run holds the directory or it cannot be written.
    """
    assert options.save is not None
    store = CheckpointStore(options.save, keep_last=options.save_keep_last)
    store.acquire()
    return store


def copy_tokenizer_files(tokenizer: Tokenizer, save: str | Path) -> Path:
    """Copy the tokenizer's files to `<save>/tokenizer/`, so that a checkpoint folder is complete in itself. Call on one rank.

    The folder is replaced as a whole, never seen half-written. A tokenizer without files gives an empty folder.
    """
    target = Path(save) / "tokenizer"
    temporary = target.with_name(f"tokenizer.tmp-{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        for source in tokenizer.files():
            shutil.copyfile(source, temporary / Path(source).name)
        durable.remove_tree(target)
        durable.rename(temporary, target)
    finally:
        durable.remove_tree(temporary)
    return target


# -------------------------------------------------------------------------------------------------------------------- save


def save_training_checkpoint(
    store: CheckpointStore,
    *,
    config: RunConfig,
    model_chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    train_state: TrainState,
    groups: ProcessGroupCollection,
) -> None:
    """Save the whole state of a run as step `train_state.iteration`; complete and durable on return. A collective of all ranks.

    Completes pending parameter gathers first, so that no stale weight is saved. Raises CheckpointError on every rank if any
    rank fails; older checkpoints stay.
    """
    options = config.checkpoint
    optimizer = None if options.no_save_optim else optimizer
    if optimizer is not None:
        optimizer.finish_param_sync()
    tensors, aliases = on_all_ranks(lambda: _state_to_save(model_chunks, optimizer, groups))
    if not options.no_save_rng:
        tensors += _rng_tensors()
    common: dict[str, Any] = {
        "train_state": train_state.as_dict(),
        "layout": _layout(model_chunks, groups),
        "config": dump_yaml(config),
    }
    if optimizer is not None:
        common["optimizer"] = optimizer.common_state_dict()
    if scheduler is not None:
        common["scheduler"] = scheduler.state_dict()
    store.save(train_state.iteration, tensors, common, aliases)


def _state_to_save(
    model_chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer | None, groups: ProcessGroupCollection
) -> tuple[list[ShardedTensor], dict[str, str]]:
    """Tensors to store, and the main params that are aliases of the model parameters (fp32 ones, and bf16 as main_params_dtype says)."""
    model = _model_tensors(model_chunks, groups)
    tensors, aliases = list(model.values()), {}
    for name, tensor in {} if optimizer is None else optimizer.sharded_state_dict().items():
        twin = _twin(tensor, model)
        if twin is None:
            tensors.append(tensor)
            continue
        aliases[name] = twin.name
        for piece in tensor.pieces:
            local = _region_of(twin, piece)
            if local is None or not (_same_memory(local, piece.shaped()) or torch.equal(local, piece.shaped().to(local.device))):
                raise CheckpointError(f"{name} differs from {twin.name} (or is NaN): the parameters were not gathered after the last step")
    return tensors, aliases


def _model_tensors(model_chunks: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> dict[str, ShardedTensor]:
    tensors: dict[str, ShardedTensor] = {}
    for chunk in model_chunks:
        tensors |= model_sharded_tensors(chunk.module if isinstance(chunk, DistributedDataParallel) else chunk, groups)
    return tensors


def _twin(tensor: ShardedTensor, model: Mapping[str, ShardedTensor]) -> ShardedTensor | None:
    """The model parameter that an optimizer value is equal to by construction: a main param of its dtype. None if there is none."""
    name = tensor.name
    twin = model.get(f"model.{name.removeprefix(MAIN_PARAM)}") if name.startswith(MAIN_PARAM) else None
    return twin if twin is not None and twin.dtype == tensor.dtype else None


def _region_of(tensor: ShardedTensor, piece: Piece) -> torch.Tensor | None:
    """The part of a rank's tensor that lies where `piece` does; None if no single piece of the tensor holds it."""
    for own in tensor.pieces:
        inside = relative(piece.box, own.box)
        if all(o >= 0 and o + n <= size for o, n, size in zip(inside.offset, inside.shape, own.box.shape, strict=True)):
            return own.shaped()[inside.slices()]
    return None


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def _rng_tensors() -> list[ShardedTensor]:
    return [whole(_rng_prefix() + stream, state) for stream, state in rng_state().items()]


def _rng_prefix() -> str:
    return f"rng.rank{own_rank():05d}."


def _layout(model_chunks: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> dict[str, int | str]:
    """What must be equal for the random states of the ranks to mean the same."""
    device = next((p.device.type for chunk in model_chunks for p in chunk.parameters()), "cpu")
    return {**{axis: groups.size(axis) for axis in _LAYOUT_AXES}, "device": device}


# -------------------------------------------------------------------------------------------------------------------- load


def load_training_checkpoint(
    *,
    config: RunConfig,
    model_chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    groups: ProcessGroupCollection,
    say: Callable[[str], None] = print_rank_0,
) -> TrainState:
    """Load the checkpoint that `config.checkpoint` asks for into model, optimizer, scheduler and random state. A collective.

    From `load`, or from `save` if it holds a checkpoint: `ckpt_step`, else the newest step; a damaged newest step is left for the
    one before it, which is said. The same layout continues bit for bit. In another layout every logical value is the same, and
    the random streams start anew from (seed, iteration), which is said once.

    Returns the state to continue from: `TrainState()` with nothing to load, and with `finetune` (weights only).
    Raises CheckpointError on every rank if there is a checkpoint and none can be loaded, or `exit_on_missing_checkpoint` is set.
    """
    options = config.checkpoint
    directory = options.load or options.save
    store = None if directory is None else CheckpointStore(directory)
    if optimizer is not None:
        optimizer.finish_param_sync()
    unusable: dict[int, str] = {}
    while True:
        iteration = None if store is None else _step_to_load(store, options, unusable, say)
        if store is None or iteration is None:
            return _nothing_to_load(options, say)
        try:
            manifest = store.step_manifest(iteration)
            rng = _load_tensors(store, manifest, options, model_chunks, optimizer, groups, say)
            break
        except DamagedCheckpointError as error:
            if options.ckpt_step is not None:
                raise
            unusable[iteration] = str(error)
    say(f"loaded checkpoint of step {iteration} from {directory}")
    _restore_optimizer(manifest, options, optimizer)
    if options.finetune:
        return TrainState()
    if scheduler is not None and "scheduler" in manifest.common:
        scheduler.load_state_dict(manifest.common["scheduler"])
    if rng:
        set_rng_state(rng)
    elif not options.no_load_rng:
        layout = _layout(model_chunks, groups)
        say(_reseed(manifest, config.training.seed, layout, groups))
    return TrainState.from_dict(manifest.common["train_state"])


def _step_to_load(
    store: CheckpointStore, options: CheckpointConfig, unusable: Mapping[int, str], say: Callable[[str], None]
) -> int | None:
    if options.ckpt_step is not None:
        return options.ckpt_step
    loadable = store.find_loadable(unusable)
    if loadable is None:
        return None
    if loadable.lost is not None:
        say(f"warning: {loadable.lost}")
    return loadable.iteration


def _nothing_to_load(options: CheckpointConfig, say: Callable[[str], None]) -> TrainState:
    where = options.load or options.save
    if options.exit_on_missing_checkpoint:
        raise known_to_all(
            CheckpointError(f"no checkpoint in {where} and exit_on_missing_checkpoint is set; check --load")
        )
    if options.load is not None:
        say(f"warning: no checkpoint in {where}; starting from step 0")
    return TrainState()


def _wants_optimizer(options: CheckpointConfig) -> bool:
    return not (options.finetune or options.no_load_optim)


def _load_tensors(
    store: CheckpointStore,
    manifest: Manifest,
    options: CheckpointConfig,
    model_chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    groups: ProcessGroupCollection,
    say: Callable[[str], None],
) -> dict[str, torch.Tensor]:
    """Weights and optimizer tensors, in place; a main param in the memory of its parameter is read once. Optimizer values that this
    run keeps in another dtype are converted, which is said.

    Returns this rank's random state by stream; empty if it is not wanted, not there, or of another layout.
    """
    model = _model_tensors(model_chunks, groups)
    wanted = list(model.values())
    targets = None
    if optimizer is not None and _wants_optimizer(options):
        if "optimizer" not in manifest.common:
            raise known_to_all(
                CheckpointError(
                    f"step {manifest.iteration} in {store.directory} holds no optimizer state; use --no-load-optim or --finetune"
                )
            )
        try:
            optimizer.check_common_state_dict(manifest.common["optimizer"])
        except CheckpointError as error:
            raise known_to_all(CheckpointError(f"step {manifest.iteration} in {store.directory}: {error}")) from None
        targets = optimizer.load_targets({name: DTYPES[entry.dtype] for name, entry in manifest.tensors.items()})
        wanted += [_without_shared(tensor, model) for tensor in targets.tensors.values()]
    rng = {} if options.finetune or options.no_load_rng else _rng_targets(manifest, _layout(model_chunks, groups))
    store.load(manifest.iteration, wanted + [whole(_rng_prefix() + stream, state) for stream, state in rng.items()])
    if targets is not None:
        targets.finish()
        if targets.converted:
            say(f"optimizer values are converted: {', '.join(targets.converted)}")
    return rng


def _rng_targets(manifest: Manifest, layout: Mapping[str, int | str]) -> dict[str, torch.Tensor]:
    if manifest.common.get("layout") != layout:
        return {}
    own = {name: entry for name, entry in manifest.tensors.items() if name.startswith(_rng_prefix())}
    return {name.removeprefix(_rng_prefix()): torch.empty(e.shape, dtype=DTYPES[e.dtype]) for name, e in own.items()}


def _without_shared(tensor: ShardedTensor, model: Mapping[str, ShardedTensor]) -> ShardedTensor:
    twin = _twin(tensor, model)
    if twin is None:
        return tensor
    return dataclasses.replace(tensor, pieces=tuple(_not_in(twin, tensor.pieces)))


def _not_in(twin: ShardedTensor, pieces: Iterable[Piece]) -> Iterable[Piece]:
    for piece in pieces:
        local = _region_of(twin, piece)
        if local is None or not _same_memory(local, piece.shaped()):
            yield piece


def _restore_optimizer(manifest: Manifest, options: CheckpointConfig, optimizer: MegatronOptimizer | None) -> None:
    if optimizer is None:
        return
    if _wants_optimizer(options):
        optimizer.load_common_state_dict(manifest.common["optimizer"])
        optimizer.reload_after_load()
    else:
        optimizer.reload_model_params()


def _reseed(manifest: Manifest, seed: int, layout: Mapping[str, int | str], groups: ProcessGroupCollection) -> str:
    """New random streams that depend on seed, iteration and this rank's place only; returns what to tell the user."""
    model_parallel_seed(derive_seed(seed, "resume", manifest.iteration), groups)
    saved = manifest.common.get("layout", {})
    changes = [f"{name} {saved.get(name)} -> {value}" for name, value in layout.items() if saved.get(name) != value]
    reason = f"the layout changed ({', '.join(changes)})" if changes else "the checkpoint holds no random state"
    return f"{reason}: random streams start anew from the seed and step {manifest.iteration}, so dropout differs from an unbroken run"


# ----------------------------------------------------------------------------------------------------------------- facades


def save_checkpoint(
    iteration: int,
    model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    opt_param_scheduler: OptimizerParamScheduler | None,
    num_floating_point_operations_so_far: float = 0.0,
) -> None:
    """Megatron's call: save step `iteration` to `get_args().save`. Sample counts follow from the configured batch sizes."""
    config: RunConfig = get_args().config
    groups = ProcessGroupCollection.resolve(None)
    training = dataclasses.replace(config.training, train_iters=iteration, train_samples=None)
    plan = TrainingPlan.of(dataclasses.replace(config, training=training), groups.size("dp"))
    state = TrainState(
        iteration=iteration,
        consumed_samples=plan.train_samples,
        consumed_tokens=plan.train_samples * config.data.seq_length,
        floating_point_operations=num_floating_point_operations_so_far,
    )
    store = on_all_ranks(lambda: open_store(config.checkpoint))
    try:
        save_training_checkpoint(
            store,
            config=config,
            model_chunks=model,
            optimizer=optimizer,
            scheduler=opt_param_scheduler,
            train_state=state,
            groups=groups,
        )
    finally:
        store.release()


def load_checkpoint(
    ddp_model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    opt_param_scheduler: OptimizerParamScheduler | None,
) -> tuple[int, float]:
    """Megatron's call: load what `get_args()` asks for; returns (iteration, floating point operations so far)."""
    state = load_training_checkpoint(
        config=get_args().config,
        model_chunks=ddp_model,
        optimizer=optimizer,
        scheduler=opt_param_scheduler,
        groups=ProcessGroupCollection.resolve(None),
    )
    return state.iteration, state.floating_point_operations
