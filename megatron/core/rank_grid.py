"""RankGrid: which rank has which coordinates, and which ranks form a group along which axes. Pure arithmetic.

Ranks are counted along the axes in `order`, the first axis fastest. Two grids cover the same ranks:

    dense   tp x cp x dp x pp                 attention, norms, embeddings, dense MLPs
    expert  expert_tp x ep x expert_dp x pp   experts; ep is carved out of data (and context) parallelism

    tp=2 dp=2 pp=2, order tp-cp-ep-dp-pp      rank = tp + 2*dp + 4*pp

                  dp 0   dp 1
        pp 0      0 1    2 3        tp groups  [0,1] [2,3] [4,5] [6,7]
        pp 1      4 5    6 7        dp groups  [0,2] [1,3] [4,6] [5,7]        pp groups  [0,4] [1,5] [2,6] [3,7]

The order of groups and of the ranks inside them is Megatron-core's: both follow `order`, whatever the order in which axes are
asked for.
"""

import dataclasses
import math

from megatron.core.errors import ConfigError

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
_OPTIONS = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data-parallel size",
    "pp": "pipeline_model_parallel_size",
}

Groups = list[list[int]]


@dataclasses.dataclass(frozen=True)
class RankGrid:
    """Sizes of the parallel axes and the order in which ranks are counted along them.

    tp, cp, ep, dp, pp: sizes; `dp` is the data-parallel size of the dense grid (world_size / (tp * cp * pp)).
    order: axes from the fastest to the slowest, joined by `-`; axes of size 1 may be left out.
    expert_tp: tensor-parallel size inside experts; None = tp.

    Raises ConfigError when the sizes cannot be laid out.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    order: str = DEFAULT_ORDER
    expert_tp: int | None = None

    def __post_init__(self) -> None:
        sizes = {_OPTIONS[axis]: getattr(self, axis) for axis in AXES}
        sizes["expert_tensor_parallel_size"] = self._expert_tp
        bad = [f"{name}={size} must be a whole number of at least 1" for name, size in sizes.items() if not _is_size(size)]
        if bad:
            raise ConfigError("; ".join(bad))
        self._check_order()
        self._check_experts()

    @staticmethod
    def for_world(
        world_size: int,
        *,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        pp: int = 1,
        order: str = DEFAULT_ORDER,
        expert_tp: int | None = None,
    ) -> "RankGrid":
        """The grid of `world_size` processes; the data-parallel size is what is left for it.

        Raises ConfigError, naming the options and the rule, when the processes cannot be divided so.
        """
        RankGrid(tp=tp, cp=cp, pp=pp)  # sizes are whole and positive
        copy = tp * pp * cp
        if world_size < 1 or world_size % copy:
            factors = {"tp": tp, "pp": pp, "cp": cp}
            product = " x ".join(f"{_OPTIONS[axis]}={size}" for axis, size in factors.items() if size > 1)
            raise ConfigError(
                f"{world_size} process{'es' * (world_size != 1)} cannot be divided into copies of the model of {copy} ranks "
                f"({product or 'one rank'}); start a multiple of {copy} processes, or choose sizes whose product divides {world_size}"
            )
        return RankGrid(tp=tp, cp=cp, ep=ep, dp=world_size // copy, pp=pp, order=order, expert_tp=expert_tp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        """Number of ranks that hold copies of one expert's part."""
        return self.world_size // (self._expert_tp * self.ep * self.pp)

    def size(self, axis: str) -> int:
        """Size of an axis of the dense grid."""
        return self._dense_sizes()[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """This rank's position along tp, cp, dp and pp."""
        return _coordinates(rank, self._dense_sizes())

    def expert_coordinates(self, rank: int) -> dict[str, int]:
        """This rank's position along tp, ep, dp and pp of the expert grid."""
        return _coordinates(rank, self._expert_sizes())

    def rank_of(self, **coordinates: int) -> int:
        """The rank at these positions of the dense grid; an axis that is not named is at 0."""
        return _rank_of(coordinates, self._dense_sizes())

    def expert_rank_of(self, **coordinates: int) -> int:
        """The rank at these positions of the expert grid; an axis that is not named is at 0."""
        return _rank_of(coordinates, self._expert_sizes())

    def groups(self, axes: str) -> Groups:
        """All groups of ranks that differ only along `axes` of the dense grid, e.g. "dp" or "dp-cp"."""
        return _groups(axes, self._dense_sizes())

    def expert_groups(self, axes: str) -> Groups:
        """All groups of ranks that differ only along `axes` (tp, ep, dp, pp) of the expert grid, e.g. "tp-ep"."""
        return _groups(axes, self._expert_sizes())

    def embedding_groups(self) -> Groups:
        """Ranks that hold copies of a tied word embedding: first and last stage of each pipeline."""
        return [[ranks[0], ranks[-1]] if len(ranks) > 1 else ranks for ranks in self.groups("pp")]

    def position_embedding_groups(self) -> Groups:
        """Ranks that hold the position embedding: the first stage of each pipeline, alone."""
        return [ranks[:1] for ranks in self.groups("pp")]

    def optimizer_instance_groups(self, instances: int) -> tuple[Groups, Groups, Groups]:
        """How `instances` repeat the distributed optimizer: (intra, inter, members).

        intra: each dp-cp group cut into `instances` runs of consecutive ranks; a run shards the optimizer state.
        inter: ranks of a dp-cp group at the same position in their runs; they hold equal shards.
        members: all ranks of an instance, over all tensor-parallel and pipeline ranks.

            dp-cp group [0 2 4 6], 2 instances      intra [0 2] [4 6]      inter [0 4] [2 6]

        Raises ConfigError when `instances` does not divide the group.
        """
        size = self.dp * self.cp
        if not _is_size(instances) or size % instances:
            raise ConfigError(
                f"num_distributed_optimizer_instances={instances} does not divide the {size} ranks of data parallel x context "
                f"parallel; use a divisor of {size}"
            )
        run = size // instances
        intra, inter = [], []
        members: Groups = [[] for _ in range(instances)]
        for ranks in self.groups("dp-cp"):
            runs = [ranks[i * run : (i + 1) * run] for i in range(instances)]
            intra += runs
            inter += [ranks[j::run] for j in range(run)]
            for own, part in zip(members, runs, strict=True):
                own.extend(part)
        return intra, inter, [sorted(own) for own in members]

    def expert_instance_groups(self, instances: int) -> tuple[Groups, Groups]:
        """The same for experts, (intra, inter): each expert-data-parallel group cut along the members of the instances.

            ep=2, 4 ranks, 2 instances [0 1] [2 3]      expert dp [0 2] [1 3]      intra [0] [2] [1] [3]      inter [0 2] [1 3]

        Raises ConfigError when the instances don't get equal parts.
        """
        members = [set(own) for own in self.optimizer_instance_groups(instances)[2]]
        intra, inter = [], []
        for ranks in self.expert_groups("dp"):
            parts = [[rank for rank in ranks if rank in own] for own in members]
            if len(ranks) % instances or any(len(part) * instances != len(ranks) for part in parts):
                raise ConfigError(
                    f"num_distributed_optimizer_instances={instances} does not cut the {self.expert_dp} ranks that hold copies of "
                    f"an expert (expert_model_parallel_size={self.ep}) into equal parts; use a divisor of {self.expert_dp}"
                )
            intra += parts
            inter += [list(same) for same in zip(*parts, strict=True)]
        return intra, inter

    # Internals

    @property
    def _expert_tp(self) -> int:
        return self.tp if self.expert_tp is None else self.expert_tp

    def _axes(self) -> list[str]:
        named = self.order.lower().split("-")
        return named + [axis for axis in AXES if axis not in named]

    def _dense_sizes(self) -> dict[str, int]:
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        return {axis: sizes[axis] for axis in self._axes() if axis in sizes}

    def _expert_sizes(self) -> dict[str, int]:
        sizes = {"tp": self._expert_tp, "ep": self.ep, "dp": self.expert_dp, "pp": self.pp}
        return {axis: sizes[axis] for axis in self._axes() if axis in sizes}

    def _check_order(self) -> None:
        named = self.order.lower().split("-")
        unknown = [axis for axis in named if axis not in AXES]
        missing = [axis for axis in AXES if axis not in named and getattr(self, axis) > 1]
        if unknown or missing or len(set(named)) != len(named):
            raise ConfigError(
                f"order={self.order!r} must name each of {', '.join(AXES)} at most once, and every axis larger than 1"
                + (f"; missing: {', '.join(missing)}" if missing else "")
                + f"; the usual order is {DEFAULT_ORDER!r}"
            )

    def _check_experts(self) -> None:
        parts = self._expert_tp * self.ep * self.pp
        if self.world_size % parts:
            raise ConfigError(
                f"expert_tensor_parallel_size={self._expert_tp} x expert_model_parallel_size={self.ep} x "
                f"pipeline_model_parallel_size={self.pp} = {parts} does not divide the {self.world_size} processes; "
                "expert parallelism is carved out of data parallelism"
            )
        if self.groups("pp") != self.expert_groups("pp"):
            raise ConfigError(
                f"order={self.order!r} gives experts other pipeline stages than the rest of the model; "
                f"put pp last, as in {DEFAULT_ORDER!r}"
            )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _strides(sizes: dict[str, int]) -> dict[str, int]:
    """Distance in rank between neighbours along each axis."""
    strides, stride = {}, 1
    for axis, size in sizes.items():
        strides[axis] = stride
        stride *= size
    return strides


def _coordinates(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    world_size = math.prod(sizes.values())
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not in 0..{world_size - 1}")
    return {axis: rank // stride % sizes[axis] for axis, stride in _strides(sizes).items()}


def _rank_of(coordinates: dict[str, int], sizes: dict[str, int]) -> int:
    for axis, index in coordinates.items():
        if axis not in sizes or not 0 <= index < sizes[axis]:
            raise ConfigError(f"there is no {axis}={index} in a grid of {sizes}")
    strides = _strides(sizes)
    return sum(index * strides[axis] for axis, index in coordinates.items())


def _groups(axes: str, sizes: dict[str, int]) -> Groups:
    chosen = axes.split("-")
    unknown = [axis for axis in chosen if axis not in sizes]
    if unknown:
        raise ConfigError(f"no axis {', '.join(unknown)} in this grid; it has {', '.join(sizes)}")
    inside = _offsets({axis: size for axis, size in sizes.items() if axis in chosen}, sizes)
    starts = _offsets({axis: size for axis, size in sizes.items() if axis not in chosen}, sizes)
    return [[start + offset for offset in inside] for start in starts]


def _offsets(some: dict[str, int], sizes: dict[str, int]) -> list[int]:
    """Ranks reached by moving along some axes from rank 0, the first axis fastest."""
    offsets, strides = [0], _strides(sizes)
    for axis, size in some.items():
        offsets = [base + index * strides[axis] for index in range(size) for base in offsets]
    return offsets
