"""Where two runs part first, and whether that is rounding or a fault. Pure.

Two layouts add the same numbers in another order, so they differ by rounding. Rounding shrinks with the unit of the precision
(2^-24 in fp32, 2^-53 in fp64), a fault does not. So both runs are made twice, and a tensor is judged by two relative differences
(largest |a - b| over the largest |a|, at least a thousandth of the largest number of its kind, since a gradient that is zero but
for rounding has no scale of its own):

    in fp64 at most 1e-10                              rounding (a fault of the fp32 code alone, if fp32's is beyond 1000 bounds)
    beyond, but 2^20 times as small as in fp32         rounding, amplified by an ill-conditioned step (29 bits are between the units)
    beyond                                             a fault

The bound in fp32 is u D sqrt(n): unit u, D matrix products one after the other on the way forward and back, and sums of n terms
whose errors add up like a random walk (Higham 2002, sections 3.1 and 4.2).
"""

import dataclasses
import math
from collections.abc import Mapping

from megatron.training.parity.records import KINDS, Logical, Step, difference

FP64_BOUND = 1e-10
UNITS = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp64": 2.0**-53}
_SHRINKS = 2.0**-20
_FAR_BEYOND = 1000.0
_PRODUCTS_PER_LAYER = 6  # qkv, scores, values, projection, fc1, fc2
_OUTSIDE_LAYERS = 4  # embedding, last norm, head, loss
_SCALE_OF_KIND = 1e-3


def rounding_bound(precision: str, layers: int, longest_sum: int) -> float:
    """The bound u D sqrt(n); at least 1e-10 in fp64."""
    products = 2 * (_PRODUCTS_PER_LAYER * layers + _OUTSIDE_LAYERS)
    bound = UNITS[precision] * products * math.sqrt(longest_sum)
    return max(bound, FP64_BOUND) if precision == "fp64" else bound


@dataclasses.dataclass(frozen=True)
class Line:
    """One tensor of one step in both runs.

    differences: relative, by precision. ratio: norm of B's over norm of A's in the widest precision; 2 or 0.5 names a factor.
    verdict: equal (bit by bit), rounding or fault. why: for a fault, and for rounding that needs a word.
    """

    step: int
    kind: str
    name: str
    differences: Mapping[str, float]
    ratio: float
    verdict: str
    why: str = ""

    @property
    def place(self) -> str:
        """`step 1, activation decoder.layers.2.mlp`."""
        return f"step {self.step}, {self.kind}{'' if self.name == self.kind else ' ' + self.name}"


def compare(a: Mapping[str, Step], b: Mapping[str, Step], bounds: Mapping[str, float]) -> list[Line]:
    """The lines of one step, in the order in which a fault spreads; a, b, bounds: by precision, the narrow one first."""
    lines = [_replicas(kind, {"A": a, "B": b}) for kind in KINDS]
    first, other = next(iter(a.values())), next(iter(b.values()))
    floors = {kind: {p: _SCALE_OF_KIND * _largest(step, kind) for p, step in a.items()} for kind in KINDS}
    for kind, name in sorted(first.tensors.keys() & other.tensors.keys(), key=lambda key: _position(first, key)):
        pairs = {p: (a[p].tensors[kind, name], b[p].tensors[kind, name]) for p in a}
        found = {p: difference(one.data, two.data, floors[kind][p]) for p, (one, two) in pairs.items()}
        verdict, why = judge(found, bounds)
        lines[KINDS.index(kind)].append(Line(first.step, kind, name, found, _ratio(*pairs[list(pairs)[-1]]), verdict, why))
    return [line for group in lines for line in group]


def judge(found: Mapping[str, float], bounds: Mapping[str, float]) -> tuple[str, str]:
    """(verdict, why) for relative differences by precision."""
    if not any(found.values()):
        return "equal", ""
    narrow = next(name for name in found)
    wide = "fp64" if "fp64" in found else narrow
    if found[wide] > bounds[wide]:
        if wide == narrow:
            return "fault", f"{found[wide]:.1e} is beyond the bound {bounds[wide]:.1e}"
        if found[wide] <= _SHRINKS * found[narrow]:
            return "rounding", "amplified, but it shrinks with the precision"
        return "fault", f"it stays when the precision grows: {found[narrow]:.1e} in {narrow}, {found[wide]:.1e} in {wide}"
    if found[narrow] > _FAR_BEYOND * bounds[narrow]:
        return "fault", f"{found[narrow]:.1e} in {narrow}, {_FAR_BEYOND:g} times beyond its bound, though {wide} agrees"
    return "rounding", "more than usual" if found[narrow] > bounds[narrow] else ""


def _replicas(kind: str, runs: Mapping[str, Mapping[str, Step]]) -> list[Line]:
    """Ranks of one run that disagree about what they hold copies of."""
    lines: list[Line] = []
    for run, by_precision in runs.items():
        for precision, step in by_precision.items():
            for problem in step.replicas:
                if problem.kind == kind and not any(line.name == problem.name for line in lines):
                    why = f"in {run}, rank {problem.rank} holds other numbers than the ranks before it"
                    found = {precision: problem.difference}
                    lines.append(Line(step.step, kind, problem.name, found, math.nan, "fault", why))
    return lines


def _position(step: Step, key: tuple[str, str]) -> tuple[int, int, str]:
    """Gradients come backwards."""
    kind, name = key
    order = step.tensors[key].order
    return KINDS.index(kind), -order if kind == "gradient" else order, name


def _largest(step: Step, kind: str) -> float:
    sizes = [float(tensor.abs().max()) for tensor in step.of_kind(kind).values() if tensor.numel()]
    return max((size for size in sizes if math.isfinite(size)), default=0.0)


def _ratio(a: Logical, b: Logical) -> float:
    one, two = float(a.data.double().norm()), float(b.data.double().norm())
    return two / one if one else math.nan if two == 0 else math.inf
