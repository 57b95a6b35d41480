"""Which rank orthogonalises which matrix. Pure arithmetic.

    buckets in forward order     0: A B | 1: C | 2: D E F | ...
    rounds                       [ 0  1 ]       [ 2 ]        a round ends where its matrices can be dealt out evenly
    owners of 2 ranks            A -> 0, B -> 1, C -> 1 ...

A round is the unit of the exchange: its matrices are orthogonalised at the same time, each on one rank, so their costs should be
even; and a bucket's parameters can be gathered when its round is done, so rounds should be short.
"""

from collections.abc import Sequence

_EVEN = 1.25  # largest load / mean load at which a round ends


def orthogonalization_cost(rows: int, cols: int) -> int:
    """Floating point operations of one Newton-Schulz iteration: x x^T and its product with x, 2 m^2 n each, the Gram matrix squared, 2 m^3."""
    small, large = min(rows, cols), max(rows, cols)
    return 4 * small * small * large + 2 * small**3


def assign_owners(costs: Sequence[int], ranks: int) -> list[int]:
    """Owner of each matrix: the costliest first, each to the rank with the least so far.

    No rank's load exceeds the mean by more than the cost of one matrix, nor (4/3 - 1/(3 ranks)) times the best possible maximum
    (Graham, 1969). Ties go to the earlier matrix and the lower rank, so that all ranks come to the same result.
    """
    owners, loads = [0] * len(costs), [0] * ranks
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owners[index] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += costs[index]
    return owners


def plan_rounds(costs: Sequence[Sequence[int]], ranks: int) -> list[range]:
    """Consecutive buckets that are updated together. costs: of each bucket's matrices, in the order of the updates."""
    rounds: list[range] = []
    start = 0
    pending: list[int] = []
    for index, bucket in enumerate(costs):
        pending += bucket
        if _even(pending, ranks):
            rounds.append(range(start, index + 1))
            start, pending = index + 1, []
    if start < len(costs):
        rounds.append(range(start, len(costs)))
    return rounds


def _even(costs: Sequence[int], ranks: int) -> bool:
    loads = [0] * ranks
    for cost, owner in zip(costs, assign_owners(costs, ranks), strict=True):
        loads[owner] += cost
    return max(loads) * ranks <= _EVEN * sum(costs)
