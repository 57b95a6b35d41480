"""RankGrid: rank <-> coordinates on the parallel axes, and the groups of ranks along any axes. Pure arithmetic.

Ranks fill a grid whose first axis in `order` varies fastest. With tp=2, dp=2, pp=2 and order tp-cp-ep-dp-pp:

    rank   0 1 2 3 4 5 6 7
    tp     0 1 0 1 0 1 0 1        groups("tp") = [0,1] [2,3] [4,5] [6,7]
    dp     0 0 1 1 0 0 1 1        groups("dp") = [0,2] [1,3] [4,6] [5,7]
    pp     0 0 0 0 1 1 1 1        groups("pp") = [0,4] [1,5] [2,6] [3,7]

Expert layers see the same ranks through a second grid, expert_tp x ep x expert_dp x pp: expert parallelism is carved out of the
ranks of one pipeline stage. The order and both grids are Megatron-core's.
"""

import dataclasses
import math

import numpy as np

from megatron.core.errors import ConfigError

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


@dataclasses.dataclass(frozen=True)
class RankGrid:
    """Sizes of the axes. `expert_tp` is the tensor-parallel size inside experts (default: tp).

    Raises ConfigError, with the options' names and the rule, for sizes that do not make a grid.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    order: str = DEFAULT_ORDER
    expert_tp: int | None = None

    def __post_init__(self) -> None:
        if sorted(self.order.split("-")) != sorted(AXES):
            raise ConfigError(f"order={self.order!r} must name each of {', '.join(AXES)} once, separated by '-'")
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ConfigError(f"{axis}={getattr(self, axis)} must be at least 1")
        stage = self.tp * self.cp * self.dp
        if stage % (self.expert_tensor * self.ep):
            raise ConfigError(
                f"expert_tensor_parallel_size={self.expert_tensor} x expert_model_parallel_size={self.ep} does not divide the "
                f"{stage} ranks of a pipeline stage (tensor {self.tp} x context {self.cp} x data {self.dp})"
            )

    @staticmethod
    def for_world(
        world_size: int, *, tp: int = 1, cp: int = 1, ep: int = 1, pp: int = 1, order: str = DEFAULT_ORDER, expert_tp: int | None = None
    ) -> "RankGrid":
        """The grid of `world_size` ranks, with the data-parallel size that is left."""
        model = tp * cp * pp
        rule = (
            f"tensor_model_parallel_size={tp} x context_parallel_size={cp} x pipeline_model_parallel_size={pp} = {model} ranks"
        )
        if model > world_size:
            raise ConfigError(f"{rule} are more than the {world_size} processes of this job; start {model} or use smaller sizes")
        if world_size % model:
            raise ConfigError(f"{rule} do not divide the {world_size} processes of this job; start a multiple of {model}")
        return RankGrid(tp=tp, cp=cp, ep=ep, dp=world_size // model, pp=pp, order=order, expert_tp=expert_tp)

    @property
    def expert_tensor(self) -> int:
        """Tensor-parallel size inside experts."""
        return self.tp if self.expert_tp is None else self.expert_tp

    @property
    def expert_dp(self) -> int:
        """Data-parallel size of experts."""
        return self.tp * self.cp * self.dp // (self.expert_tensor * self.ep)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def _sizes(self, expert: bool) -> dict[str, int]:
        if expert:
            return {"tp": self.expert_tensor, "cp": 1, "ep": self.ep, "dp": self.expert_dp, "pp": self.pp}
        return {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}

    def coordinates(self, rank: int, *, expert: bool = False) -> dict[str, int]:
        """Index of `rank` on each axis (of the expert grid if asked)."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside the grid of {self.world_size} ranks")
        sizes, found = self._sizes(expert), {}
        for axis in self.order.split("-"):
            rank, found[axis] = divmod(rank, sizes[axis])
        return found

    def rank_of(self, *, expert: bool = False, **coordinates: int) -> int:
        """The rank at the given coordinates; axes that are left out count as 0."""
        sizes, rank, stride = self._sizes(expert), 0, 1
        for axis in self.order.split("-"):
            index = coordinates.get(axis, 0)
            if not 0 <= index < sizes[axis]:
                raise ConfigError(f"{axis}={index} is outside the axis of size {sizes[axis]}")
            rank += index * stride
            stride *= sizes[axis]
        return rank

    def groups(self, axes: str, *, expert: bool = False) -> list[list[int]]:
        """All groups along `axes` ("dp", "dp-cp", "tp-pp"): ranks that differ in these axes only, ascending; every rank once."""
        sizes, order = self._sizes(expert), self.order.split("-")
        wanted = axes.split("-")
        unknown = [axis for axis in wanted if axis not in AXES]
        if unknown:
            raise ConfigError(f"unknown axis {unknown[0]!r}; axes are {', '.join(AXES)}")
        grid = np.arange(self.world_size).reshape([sizes[axis] for axis in reversed(order)])
        position = {axis: len(order) - 1 - index for index, axis in enumerate(order)}
        inside = [position[axis] for axis in reversed(order) if axis in wanted]
        outside = [position[axis] for axis in reversed(order) if axis not in wanted]
        width = math.prod(sizes[axis] for axis in wanted)
        return grid.transpose(outside + inside).reshape(-1, width).tolist()

    def embedding_groups(self) -> list[list[int]]:
        """For each pipeline: the ranks of its first and last stage, which share the tied word embedding."""
        return [[group[0], group[-1]] if len(group) > 1 else group for group in self.groups("pp")]

    def position_embedding_groups(self) -> list[list[int]]:
        """For each pipeline: the rank of its first stage."""
        return [[group[0]] for group in self.groups("pp")]

    def optimizer_instance_groups(self, instances: int) -> tuple[list[list[int]], list[list[int]]]:
        """Data x context parallel groups cut in `instances` parts: (ranks inside an instance, ranks of equal position between)."""
        intra, inter = [], []
        for group in self.groups("dp-cp"):
            if len(group) % instances:
                raise ConfigError(
                    f"num_distributed_optimizer_instances={instances} does not divide the data x context parallel size {len(group)}"
                )
            width = len(group) // instances
            intra += [group[i * width : (i + 1) * width] for i in range(instances)]
            inter += [group[i::width] for i in range(width)]
        return intra, inter
