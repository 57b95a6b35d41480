"""Rotary position embedding (Su et al. 2021): frequencies with context-extension scaling, the table, and the rotation.

    pair (x1, x2) at position p with frequency f:   x1' = x1 cos(pf) - x2 sin(pf)      x2' = x2 cos(pf) + x1 sin(pf)
    halves (default): pair i is dimensions (i, i + rot/2)         interleaved: pair i is dimensions (2i, 2i + 1)

Angles are products of exact positions and fp64 frequencies; the table is fp32 (fp64 for fp64 models) whatever the dtype of the
model, so distant positions stay distinct in bf16. Dimensions from rotary_dim on pass through.
"""

import math
from typing import Any

import torch

from megatron.core.transformer.transformer_config import TransformerConfig


def inverse_frequencies(config: TransformerConfig) -> tuple[torch.Tensor, float]:
    """Frequencies in radians per token, fp64 [rotary_dim / 2], and the factor on cos and sin (1 except for yarn)."""
    rotary_dim = config.rotary_dim
    plain = config.rotary_base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    if config.rope_scaling_type == "linear":
        return plain / config.rope_scaling_factor, 1.0
    if config.rope_scaling_type == "llama3":
        return _llama3(plain, config), 1.0
    if config.rope_scaling_type == "yarn":
        return _yarn(plain, config)
    return plain, 1.0


def _llama3(plain: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended (Llama 3.1's reference code)."""
    rotations = config.rope_original_max_position_embeddings * plain / (2 * math.pi)
    low, high = config.rope_llama3_low_freq_factor, config.rope_llama3_high_freq_factor
    keep = ((rotations - low) / (high - low)).clamp(0, 1)
    return plain * (keep + (1 - keep) / config.rope_scaling_factor)


def _yarn(plain: torch.Tensor, config: TransformerConfig) -> tuple[torch.Tensor, float]:
    """Dimensions that turn often are kept, slow ones interpolated, with a linear ramp between (Peng et al. 2023, section 3.2)."""
    low = max(math.floor(_yarn_dimension(config.rope_yarn_beta_fast, config)), 0)
    high = min(math.ceil(_yarn_dimension(config.rope_yarn_beta_slow, config)), config.rotary_dim - 1)
    width = high - low if high != low else 1e-3
    interpolate = ((torch.arange(plain.numel(), dtype=torch.float64) - low) / width).clamp(0, 1)
    factor = config.rope_scaling_factor
    attention_factor = config.rope_yarn_attention_factor
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0
    return plain * (1 - interpolate) + plain / factor * interpolate, attention_factor


def _yarn_dimension(rotations: float, config: TransformerConfig) -> float:
    """The (fractional) pair that turns `rotations` times over the original context."""
    context = config.rope_original_max_position_embeddings
    return config.rotary_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(config.rotary_base))


class RotaryTable:
    """cos and sin of every position, made once per device and dtype."""

    def __init__(self, config: TransformerConfig, max_sequence_length: int) -> None:
        self._frequencies, self._factor = inverse_frequencies(config)
        self._length = max_sequence_length
        self._tables: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def table(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """[max_sequence_length, rotary_dim]: row p is (cos, sin) of position p, fp32 (fp64 for a model of that dtype)."""
        dtype = torch.promote_types(dtype, torch.float32)
        found = self._tables.get((device, dtype))
        if found is None:
            angles = torch.arange(self._length, dtype=torch.float64)[:, None] * self._frequencies
            found = (torch.cat((angles.cos(), angles.sin()), dim=-1) * self._factor).to(device, dtype)
            self._tables[device, dtype] = found
        return found

    def cos_sin(
        self, position_ids: torch.Tensor | None, sequence_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [s, b, 1, 1, rotary_dim / 2] for position_ids [b, s], or [s, 1, 1, 1, ...] for positions 0..s-1."""
        table = self.table(device, dtype)
        if position_ids is None:
            rows = table[:sequence_length, None, None, None]
        else:
            rows = table[position_ids.t()][:, :, None, None]
        cos, sin = rows.chunk(2, dim=-1)
        return cos, sin


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotated copy, computed in at least fp32. x: [s, b, g, heads, d]; cos, sin as `RotaryTable.cos_sin` gives them."""
    pairs = cos.size(-1)
    x1, x2 = (part.to(cos.dtype) for part in _pairs(x, pairs, interleaved))
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    turned = torch.stack((y1, y2), -1).flatten(-2) if interleaved else torch.cat((y1, y2), -1)
    turned = turned.to(x.dtype)
    return turned if x.size(-1) == 2 * pairs else torch.cat((turned, x[..., 2 * pairs :]), -1)


def split_and_rotate(
    mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries, rotated keys and values out of the packed projection.

    mixed: [s, b, g, r + 2, d], the r query heads of each of g groups, then its key and its value.
    Returns query [s, b, g, r, d], key [s, b, g, 1, d], value [s, b, g, 1, d].
    """
    if torch.compiler.is_compiling():
        return _CompiledSplitAndRotate.apply(mixed, cos, sin, interleaved)  # type: ignore[no-untyped-call]
    return _SplitAndRotate.apply(mixed, cos, sin, interleaved)  # type: ignore[no-untyped-call]


class _CompiledSplitAndRotate(torch.autograd.Function):
    """The same in terms that a compiler fuses: one concatenation in the backward, where autograd would add padded slices."""

    @staticmethod
    def forward(
        ctx: Any, mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        query, key, value = mixed.split((mixed.size(3) - 2, 1, 1), dim=3)
        return rotate(query, cos, sin, interleaved), rotate(key, cos, sin, interleaved), value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        query, key = (rotate(grad, cos, -sin, ctx.interleaved) for grad in grads[:2])
        return torch.cat((query, key, grads[2]), dim=3), None, None, None


class _SplitAndRotate(torch.autograd.Function):
    """Writes query, key and, in the backward, the whole gradient of the projection, without concatenating."""

    @staticmethod
    def forward(
        ctx: Any, mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        query_part, key_part, value = mixed.split((mixed.size(3) - 2, 1, 1), dim=3)
        query, key = (torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in (query_part, key_part))
        _rotate_into(query, query_part, cos, sin, interleaved)
        _rotate_into(key, key_part, cos, sin, interleaved)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        s, b, g, heads, d = grads[0].shape
        mixed = torch.empty((s, b, g, heads + 2, d), dtype=grads[0].dtype, device=grads[0].device)
        query, key, value = mixed.split((heads, 1, 1), dim=3)
        _rotate_into(query, grads[0], cos, -sin, ctx.interleaved)
        _rotate_into(key, grads[1], cos, -sin, ctx.interleaved)
        value.copy_(grads[2])
        return mixed, None, None, None


def _rotate_into(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """out = rotate(x); out and x may have any strides."""
    pairs = cos.size(-1)
    if out.dtype != cos.dtype:
        out.copy_(rotate(x, cos, sin, interleaved))
        return
    x1, x2 = _pairs(x, pairs, interleaved)
    out1, out2 = _pairs(out, pairs, interleaved)
    torch.mul(x1, cos, out=out1)
    out1.addcmul_(x2, sin, value=-1.0)
    torch.mul(x2, cos, out=out2)
    out2.addcmul_(x1, sin)
    if x.size(-1) > 2 * pairs:
        out[..., 2 * pairs :] = x[..., 2 * pairs :]


def _pairs(x: torch.Tensor, pairs: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    return x[..., :pairs], x[..., pairs : 2 * pairs]
