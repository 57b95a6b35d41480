"""Muon for matrices: a momentum whose singular values are brought to 1, so that every direction moves by the learning rate.

    m = mu m + (1 - mu) g                           shards
    u = m, or with Nesterov mu m + (1 - mu) g       shards
    o = scale x newton_schulz(u)                    the whole matrix
    w = (1 - lr decay) w - lr o                     shards

Jordan et al., 2024, https://kellerjordan.github.io/posts/muon; decoupled weight decay and the scale by the larger dimension: Liu
et al., 2025, arXiv 2502.16982. How whole matrices come about where shards are kept: `matrix_round`.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.optimizer.optimizer_config import NEWTON_SCHULZ_PERIODS, OptimizerConfig

_EPS = 1e-7  # below this norm a matrix counts as zero

# x -> a x + b (x x^T) x + c (x x^T)^2 x, one triple per iteration, from the beginning again when they are used up.
COEFFICIENTS: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    # Jordan's: the steepest at 0; singular values end between 0.7 and 1.2.
    "simple": ((3.4445, -4.7750, 2.0315),),
    # One triple per iteration (Cesista, You and Jordan, 2025, https://leloykun.github.io/ponder/muon-opt-coeffs).
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al., 2025, arXiv 2505.16932, with the safety factor 1.01 of its section 3.
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
assert {kind: len(triples) for kind, triples in COEFFICIENTS.items()} == NEWTON_SCHULZ_PERIODS


class Muon:
    """The parts of a step; state momentum_buffer."""

    state_names: tuple[str, ...] = ("momentum_buffer",)

    def __init__(self, config: OptimizerConfig) -> None:
        self.momentum, self.nesterov = config.muon_momentum, config.muon_nesterov
        self.scale_mode, self.extra_scale = config.muon_scale_mode, config.muon_extra_scale_factor
        self.split_qkv, self.precision = config.muon_split_qkv, config.muon_fp32_matmul_prec
        self.coefficients = list(itertools.islice(itertools.cycle(COEFFICIENTS[config.muon_coefficient_type]), config.muon_num_ns_steps))

    def hyperparameters(self) -> dict[str, Any]:
        """momentum and nesterov."""
        return {"momentum": self.momentum, "nesterov": self.nesterov}

    def directions(
        self, grads: list[torch.Tensor], momenta: list[torch.Tensor], divisor: float
    ) -> list[torch.Tensor]:
        """New momenta, in place, and what is to be orthogonalised. grads: are divided by `divisor` first, and overwritten."""
        if divisor != 1.0:
            torch._foreach_div_(grads, divisor)
        torch._foreach_lerp_(momenta, grads, 1.0 - self.momentum)
        if not self.nesterov:
            return momenta
        torch._foreach_lerp_(grads, momenta, self.momentum)
        return grads

    def orthogonalize(self, matrix: torch.Tensor, qkv_rows: tuple[int, int, int] | None = None) -> torch.Tensor:
        """The scaled update [rows, cols] of a whole matrix.

        qkv_rows: rows of query, key and value in each group of a packed projection, which count as three matrices (with
            muon_split_qkv).
        """
        if qkv_rows is None or not self.split_qkv:
            return self._scaled(matrix)
        update = torch.empty_like(matrix)
        grouped, target = (tensor.view(-1, sum(qkv_rows), matrix.size(1)) for tensor in (matrix, update))
        for part, place in zip(grouped.split(qkv_rows, dim=1), target.split(qkv_rows, dim=1), strict=True):
            place.copy_(self._scaled(part.reshape(-1, matrix.size(1))).view(place.shape))
        return update

    def _scaled(self, matrix: torch.Tensor) -> torch.Tensor:
        scale = self.extra_scale * scale_factor(self.scale_mode, *matrix.shape)
        return newton_schulz(matrix, self.coefficients, self.precision).mul_(scale)

    def apply(self, mains: list[torch.Tensor], updates: list[torch.Tensor], group: Mapping[str, Any]) -> None:
        """Take a step of the group's learning rate and weight decay along `updates`."""
        torch._foreach_mul_(mains, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(mains, updates, alpha=-group["lr"])


def scale_factor(mode: str, rows: int, cols: int) -> float:
    """Factor on an orthogonalised update. rows: outputs of the layer.

    spectral: sqrt(max(rows, cols)), an RMS of 1 for any shape (with muon_extra_scale_factor 0.2 that of AdamW, Liu et al.).
    shape_scaling: sqrt(max(1, rows / cols)), Jordan's. unit_rms_norm: sqrt(rows / cols), Bernstein's and Scion's.
    """
    if mode == "spectral":
        return math.sqrt(max(rows, cols))
    if mode == "shape_scaling":
        return math.sqrt(max(1.0, rows / cols))
    assert mode == "unit_rms_norm", mode
    return math.sqrt(rows / cols)


def newton_schulz(
    matrix: torch.Tensor, coefficients: Sequence[tuple[float, float, float]], precision: str = "highest"
) -> torch.Tensor:
    """U V^T, nearly, of the singular value decomposition U S V^T of `matrix` [rows, cols]; fresh memory, same dtype.

    precision: of the matrix products. medium = bf16; high = TF32 on CUDA, else the matrix's own; highest = its own.
    """
    normed = matrix / torch.linalg.vector_norm(matrix).clamp_min(_EPS)
    x = (normed.mT if matrix.size(0) > matrix.size(1) else normed).to(torch.bfloat16 if precision == "medium" else matrix.dtype)
    with _matmul_precision("high" if precision == "high" else "highest", matrix.device):
        for a, b, c in coefficients:
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if matrix.size(0) > matrix.size(1) else x
    return x.to(matrix.dtype).contiguous()


@contextlib.contextmanager
def _matmul_precision(precision: str, device: torch.device) -> Iterator[None]:
    """torch's precision of fp32 products on CUDA for a while."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
