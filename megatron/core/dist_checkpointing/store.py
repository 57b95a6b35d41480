"""CheckpointStore: the commit protocol of a save directory. All ranks write in parallel; a step exists completely or not at all.

    plan          all ranks   what each holds -> who writes what; refused on all ranks if a tensor has holes or overlaps
    write_local   each rank   <save>/iter_N.tmp-<id>/rank_00000.safetensors, hashed while written, synced; no communication
    commit        all ranks   every rank's result -> rank 0: manifest, sync, rename to iter_N, sync, pointer; or clean up and fail

The pointer file is a hint: `find_loadable` looks at the manifests and takes the newest complete step. Errors of any rank reach
all ranks before anything is published. No pickle is read or written; file names in a manifest are plain.
"""

import dataclasses
import datetime
import logging
import platform
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed

from megatron.core.dist_checkpointing import durable, lease, steps
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, Manifest
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.reader import StepReader
from megatron.core.dist_checkpointing.save_plan import HeldTensor, SavePlan, manifest_entries, plan_save, rank_file
from megatron.core.dist_checkpointing.serialization import (
    DTYPES,
    DamagedCheckpointError,
    WrittenFile,
    dtype_name,
    write_tensors,
)
from megatron.core.errors import CheckpointError

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class PendingSave:
    """A planned save on this rank: between `plan` and `commit`. data: (key, memory) of the pieces this rank writes."""

    iteration: int
    temporary: Path
    plan: SavePlan
    common: Mapping[str, Any]
    data: Sequence[tuple[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class WriteResult:
    """What a rank's `write_local` did. written: None when it had nothing to write; error: why it failed."""

    written: WrittenFile | None
    error: str | None


@dataclasses.dataclass(frozen=True)
class Loadable:
    """The step to load. lost: what a user must know about newer steps that cannot be loaded; None when there are none."""

    iteration: int
    lost: str | None


class CheckpointStore:
    """Checkpoints of one save directory.

    Args:
        directory: the save directory, on storage that all ranks see.
        group: the ranks that save and load together; default: all, or this process alone without torch.distributed.
        keep_last: after each save keep only this many newest complete steps; None keeps all.

    Methods marked *collective* must be called by all ranks of the group; they raise the same error on all of them
    (`reported` is True on the rank that had the trouble only).
    """

    def __init__(
        self, directory: str | Path, group: "torch.distributed.ProcessGroup | None" = None, *, keep_last: int | None = None
    ) -> None:
        self.directory = Path(directory)
        self.keep_last = keep_last
        self._group = group
        self._lease: weakref.finalize | None = None  # type: ignore[type-arg]
        self._sequence: int | None = None

    # ---------------------------------------------------------------------------------------------------------- lease

    def acquire(self) -> None:
        """Rank 0: create the directory, take its lease, remove what killed runs left. Other ranks: nothing. Not collective.

        Raises CheckpointError on rank 0 if another run holds the lease or the directory cannot be written.
        """
        if self._rank() != 0 or self._lease is not None:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lease.acquire(self.directory)
            self._lease = weakref.finalize(self, lease.release, self.directory.resolve())
            steps.clean_up(self.directory)
        except OSError as error:
            raise CheckpointError(f"cannot write to the save directory {self.directory}: {durable.explain(error)}") from error

    def release(self) -> None:
        """Give the lease back. It ends in any case with this object or the process."""
        if self._lease is not None:
            self._lease()
            self._lease = self._sequence = None

    # ----------------------------------------------------------------------------------------------------------- save

    def save(
        self,
        iteration: int,
        tensors: Iterable[ShardedTensor],
        common: Mapping[str, Any],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Write a step; durable and published on every rank when it returns. *Collective.*

        Args:
            iteration: number of completed training steps; an existing checkpoint of this number is replaced safely.
            tensors: this rank's parts. Over all ranks they must cover each logical tensor exactly once, equal boxes on several
                ranks being replicas. State that each rank has for itself needs a name with the rank in it.
            common: JSON values that are the same for all ranks; rank 0's are stored.
            aliases: further name -> name of a saved tensor with equal values, so that the bytes are stored once.

        Raises CheckpointError on every rank, with the culprit's text, if any rank fails; nothing is published then.
        """
        pending = self.plan(iteration, tensors, common, aliases)
        self.commit(pending, self.write_local(pending))

    def plan(
        self,
        iteration: int,
        tensors: Iterable[ShardedTensor],
        common: Mapping[str, Any],
        aliases: Mapping[str, str] | None = None,
    ) -> PendingSave:
        """Agree on who writes what. *Collective.* Raises CheckpointError if the tensors of all ranks do not fit together."""
        own = list(tensors)

        def describe() -> tuple[str, list[HeldTensor], dict[str, str]]:
            self.acquire()
            self._check_target(iteration, common)
            return uuid.uuid4().hex, [_held(tensor) for tensor in own], dict(aliases or {})

        proposals = self._together(describe, f"checkpoint of step {iteration} was not saved")
        all_aliases = {alias: base for _, _, part in proposals for alias, base in part.items()}
        plan = plan_save([held for _, held, _ in proposals], all_aliases)
        if plan.problems:
            raise self._known_to_all(CheckpointError(f"step {iteration} cannot be saved: " + "; ".join(plan.problems)))
        data = [(p.key, own[p.position[0]].pieces[p.position[1]].shaped()) for p in plan.pieces[self._rank()]]
        temporary = self.directory / f"{steps.step_name(iteration)}.tmp-{proposals[0][0]}"
        return PendingSave(iteration, temporary, plan, dict(common), data)

    def write_local(self, pending: PendingSave) -> WriteResult:
        """Write this rank's file. No communication: may run beside training if `pending.data` is a copy. Never raises for I/O."""
        try:
            pending.temporary.mkdir(exist_ok=True)
            if not pending.data:
                return WriteResult(None, None)
            path = pending.temporary / rank_file(self._rank())
            return WriteResult(write_tensors(path, pending.data, {"iteration": str(pending.iteration)}), None)
        except OSError as error:
            return WriteResult(None, durable.explain(error))
        except Exception as error:  # whatever it is, the other ranks wait for this one's answer
            return WriteResult(None, f"{type(error).__name__}: {error}")

    def commit(self, pending: PendingSave, result: WriteResult) -> None:
        """Publish the step if all ranks have written, else remove it and raise CheckpointError. *Collective.*"""
        results = self._gather(result)
        errors = [(rank, part.error) for rank, part in enumerate(results) if part.error is not None]
        if errors:
            if self._rank() == 0:
                durable.remove_tree(pending.temporary)
            text = "; ".join(f"rank {rank}: {error}" for rank, error in errors)
            failure = CheckpointError(f"checkpoint of step {pending.iteration} was not saved: {text}. Older checkpoints are untouched.")
            failure.reported = self._rank() == errors[0][0]
            raise failure

        def publish() -> None:
            if self._rank() == 0:
                self._publish(pending, [part.written for part in results])

        self._together(publish, f"checkpoint of step {pending.iteration} was not saved")

    def _publish(self, pending: PendingSave, written: Sequence[WrittenFile | None]) -> None:
        files, tensors = manifest_entries(pending.plan, written)
        if self._sequence is None:  # read once: the lease makes this store the only writer
            self._sequence = max((step.manifest.sequence for step in steps.list_steps(self.directory) if step.manifest), default=0)
        self._sequence += 1
        manifest = Manifest(pending.iteration, self._sequence, _now(), _libraries(), files, tensors, pending.common)
        try:
            hidden = steps.sizes_problem(pending.temporary, manifest)
            if hidden is not None:
                raise CheckpointError(f"rank 0 does not see what another rank wrote: {hidden}; --save must be storage that all ranks share")
            durable.write_file(pending.temporary / MANIFEST_NAME, manifest.encode())
            durable.sync_directory(pending.temporary)
            steps.publish(pending.temporary, self.directory / steps.step_name(pending.iteration))
        except (OSError, CheckpointError):
            durable.remove_tree(pending.temporary)
            raise
        steps.write_pointer(self.directory, pending.iteration)
        if self.keep_last is not None:
            self._retain(self.keep_last)

    def _retain(self, keep_last: int) -> None:
        try:
            steps.retain(self.directory, keep_last)
        except OSError as error:  # the new step is safe; old ones that stay cost space only
            _log.warning("old checkpoints in %s could not be removed: %s", self.directory, durable.explain(error))

    def _check_target(self, iteration: int, common: Mapping[str, Any]) -> None:
        """Rank 0: what would make publishing fail, found before anything is written."""
        if self._rank() != 0:
            return
        target = self.directory / steps.step_name(iteration)
        if target.exists() and not (target / MANIFEST_NAME).exists():
            raise CheckpointError(f"{target} exists and is no checkpoint of this program (no {MANIFEST_NAME}); move it away")
        try:
            Manifest(iteration, 0, "", {}, {}, {}, common).encode()
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the common state is not plain JSON: {error}") from error

    # ----------------------------------------------------------------------------------------------------------- load

    def latest_complete(self) -> int | None:
        """Newest step whose manifest is sound and whose files have their full length; None if there is none. *Collective.*"""
        loadable = self.find_loadable()
        return None if loadable is None else loadable.iteration

    def find_loadable(self, unusable: Mapping[int, str] | None = None) -> Loadable | None:
        """The newest complete step, and what is lost if newer ones are not complete; None if no step was ever saved. *Collective.*

        unusable: steps that proved to be damaged when they were read, with the reason.
        Raises CheckpointError if there are steps but none is complete.
        """
        return self._together(lambda: self._find(unusable or {}) if self._rank() == 0 else None, "no checkpoint can be loaded")[0]

    def _find(self, unusable: Mapping[int, str]) -> Loadable | None:
        found = steps.list_steps(self.directory)
        broken = {step.iteration: step.problem or unusable.get(step.iteration) for step in found}
        broken = {iteration: problem for iteration, problem in broken.items() if problem is not None}
        best = next((step for step in found if step.iteration not in broken), None)
        if best is None:
            if not found:
                return None
            raise CheckpointError(f"{self.directory} holds no complete checkpoint: " + "; ".join(str(p) for p in broken.values()))
        ahead = {step.iteration for step in found[: found.index(best)]}
        newer = {n: problem for n, problem in broken.items() if n in ahead or n > best.iteration}
        pointer = steps.read_pointer(self.directory)
        if pointer is not None and pointer > best.iteration and pointer not in newer:
            newer[pointer] = f"{steps.step_name(pointer)}, which {steps.POINTER_NAME} names, is missing"
        if not newer:
            return Loadable(best.iteration, None)
        reasons = "; ".join(f"step {n} cannot be loaded ({problem})" for n, problem in sorted(newer.items()))
        lost = max(0, max(newer) - best.iteration)
        count = "1 step is" if lost == 1 else f"{lost} steps are"
        return Loadable(best.iteration, f"{reasons}; going back to step {best.iteration}: {count} lost")

    def step_manifest(self, iteration: int) -> Manifest:
        """The checked manifest of a complete step. *Collective*; raises CheckpointError on all ranks if any cannot read it."""
        read: list[Manifest] = []
        self._together(lambda: read.append(self._reader(iteration).manifest), f"step {iteration} cannot be read")
        return read[0]

    def load(self, iteration: int, tensors: Iterable[ShardedTensor]) -> None:
        """Fill the pieces of `tensors` in place, whatever layout wrote the step. *Collective.*

        Strict: a tensor that is missing, has another shape or dtype, or is in the step under a prefix of which tensors are asked
        for (`model.`, `optimizer.`, ...) without being asked for by any rank, is an error; all of them are named at once.
        Raises CheckpointError, or DamagedCheckpointError when bytes on disk are not what was written.
        """
        wanted = list(tensors)
        summary = f"checkpoint of step {iteration} was not loaded"
        readers: list[StepReader] = []

        def examine() -> tuple[set[str], list[str]]:
            readers.append(self._reader(iteration))
            return {tensor.name for tensor in wanted}, _mismatches(readers[0].manifest, wanted)

        answers = self._together(examine, summary)
        asked = set().union(*(names for names, _ in answers))
        problems = {problem for _, part in answers for problem in part} | _unexpected(readers[0].manifest, asked)
        if problems:
            text = f"step {iteration} in {self.directory} does not fit: " + "; ".join(sorted(problems))
            raise self._known_to_all(CheckpointError(text))
        with readers[0] as reader:
            pieces = [(tensor.name, piece) for tensor in wanted for piece in tensor.pieces]
            self._together(lambda: reader.read_pieces(pieces), summary)

    def read_common(self, iteration: int) -> dict[str, Any]:
        """The common state of a step. Not collective; raises CheckpointError."""
        return dict(self._reader(iteration).manifest.common)

    def tensor_names(self, iteration: int) -> list[str]:
        """Names of the logical tensors of a step. Not collective; raises CheckpointError."""
        return list(self._reader(iteration).manifest.tensors)

    def verify(self, iteration: int) -> list[str]:
        """Read every byte of a step and compare all checksums; the problems found. Not collective."""
        try:
            with self._reader(iteration) as reader:
                return reader.verify()
        except DamagedCheckpointError as error:
            return [str(error)]

    def _reader(self, iteration: int) -> StepReader:
        step = steps.find_step(self.directory, iteration)
        if step is None:
            available = ", ".join(str(s.iteration) for s in reversed(steps.list_steps(self.directory))) or "none"
            raise CheckpointError(f"{self.directory} has no checkpoint of step {iteration}; available: {available}")
        if step.problem is not None or step.manifest is None:
            raise DamagedCheckpointError(f"step {iteration} is not complete: {step.problem}")
        return StepReader(step.path, step.manifest)

    # -------------------------------------------------------------------------------------------------------- agreement

    def _rank(self) -> int:
        return torch.distributed.get_rank(self._group) if torch.distributed.is_initialized() else 0

    def _gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order."""
        if not torch.distributed.is_initialized():
            return [value]
        values: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(values, value, group=self._group)  # all ranks of the store
        return values

    def _together(self, work: Callable[[], T], summary: str) -> list[T]:
        """Every rank's result of `work`, which must not communicate; if it fails anywhere, the first failure is raised everywhere."""
        result: T | None = None
        error: str | None = None
        damaged = False
        try:
            result = work()
        except CheckpointError as caught:
            error, damaged = str(caught), isinstance(caught, DamagedCheckpointError)
        except OSError as caught:
            error = durable.explain(caught)
        answers = self._gather((result if error is None else None, error, damaged))
        failed = [(rank, text, bad) for rank, (_, text, bad) in enumerate(answers) if text is not None]
        if not failed:
            return [value for value, _, _ in answers]  # type: ignore[misc]
        rank, text, damaged = failed[0]
        where = f"rank {rank}: " if len(answers) > 1 else ""
        failure = (DamagedCheckpointError if damaged else CheckpointError)(f"{summary}: {where}{text}")
        failure.reported = self._rank() == rank
        raise failure

    def _known_to_all(self, error: CheckpointError) -> CheckpointError:
        error.reported = self._rank() == 0
        return error


def _held(tensor: ShardedTensor) -> HeldTensor:
    dtype = None if tensor.dtype is None else dtype_name(tensor.dtype)
    for piece in tensor.pieces:
        assert piece.data.numel() == piece.box.numel, (tensor.name, piece.box, tuple(piece.data.shape))
    return HeldTensor(tensor.name, tuple(tensor.global_shape), dtype, tuple(piece.box for piece in tensor.pieces))


def _mismatches(manifest: Manifest, wanted: Sequence[ShardedTensor]) -> list[str]:
    problems = []
    for tensor in wanted:
        entry = manifest.tensors.get(tensor.name)
        if entry is None:
            problems.append(f"missing tensor {tensor.name}")
        elif entry.shape != tuple(tensor.global_shape):
            problems.append(f"tensor {tensor.name} has shape {list(entry.shape)}, expected {list(tensor.global_shape)}")
        elif tensor.dtype is not None and DTYPES[entry.dtype] != tensor.dtype:
            problems.append(f"tensor {tensor.name} has dtype {DTYPES[entry.dtype]}, expected {tensor.dtype}")
    return problems


def _unexpected(manifest: Manifest, asked: set[str]) -> set[str]:
    prefixes = {name.split(".")[0] for name in asked if "." in name}
    extra = (name for name in manifest.tensors if name.split(".")[0] in prefixes and name not in asked)
    return {f"unexpected tensor {name}" for name in extra}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _libraries() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}
