"""Forms of optimizer values: exact where they say so, rounded without bias where asked, alike however elements are dealt out."""

import math

import pytest
import torch

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.stored_values import Plain, Remainder, Rounding, Scaled, bytes_of, form_of

BITS = Rounding(7)


def random_values(numel, seed=0, spread=20.0):
    """fp32 values over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.exp2(spread * torch.randn(numel, generator=generator))


def scaled(numel):
    return Scaled(torch.zeros(numel, dtype=torch.float16), torch.zeros(-(-numel // 32), dtype=torch.int8))


# Remainders


def awkward_bits():
    """fp32 numbers around every kind of bf16 rounding: ties to both sides, denormals, zeros, both signs, the largest."""
    highs = [0x0000, 0x0001, 0x0080, 0x3F80, 0x3F81, 0x3FFF, 0x4000, 0x7F7E, 0x7F7F]
    lows = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    magnitudes = torch.tensor([high << 16 | low for high in highs for low in lows], dtype=torch.int64)
    signed = torch.cat([magnitudes, magnitudes - (1 << 31)]).to(torch.int32)
    return signed.view(torch.float32)


def test_remainders_give_back_every_bit_and_parameters_are_rounded_to_nearest_even():
    values = torch.cat([awkward_bits(), random_values(5000)])
    model = torch.zeros(values.numel(), dtype=torch.bfloat16)
    stored = Remainder(model, torch.zeros(values.numel(), dtype=torch.int16))
    for written in (values, values.flip(0)):  # ties of the first writing are forgotten
        stored.assign(written)
        assert torch.equal(model.view(torch.int16), written.bfloat16().view(torch.int16))
        assert torch.equal(stored.values().view(torch.int32), written.view(torch.int32))
    assert stored.ties.numel() > 5
    blocks = [slice(0, 64), slice(64, 1024), slice(1024, values.numel())]
    for part in blocks:
        out = torch.empty(part.stop - part.start)
        stored.read(part.start, out)
        assert torch.equal(out, values.flip(0)[part])
        stored.write(part.start, values[part].clone())
    assert torch.equal(stored.values().view(torch.int32), values.view(torch.int32))
    assert torch.equal(stored.ties, stored.ties.unique())


# fp16 in rows


def test_fp16_rows_have_fp16s_precision_over_fp32s_range():
    for exponent in (-100, -40, 0, 40, 100):
        values = torch.randn(320, generator=torch.Generator().manual_seed(1)) * 2.0**exponent
        stored = scaled(320)
        stored.assign(values)
        largest = values.abs().view(-1, 32).amax(1).repeat_interleave(32)
        error = (stored.values() - values).abs()
        assert bool((error <= values.abs() * 2.0**-11 + largest * 2.0**-38).all())
    stored.assign(torch.zeros(320))
    assert not stored.values().any()


@pytest.mark.parametrize("stochastic", [False, True])
def test_fp16_rows_are_stored_again_as_they_were(stochastic):
    values = torch.cat([random_values(3200, spread=6.0), torch.tensor([1.0 - 2.0**-13, 2.0 - 2.0**-12, 1.0])])
    stored, again = scaled(values.numel()), scaled(values.numel())
    bits = BITS.bits("exp_avg", "w", 1, 0, values) if stochastic else None
    stored.write(0, values.clone(), bits)
    again.assign(stored.values())
    assert torch.equal(again.values(), stored.values())


# Stochastic rounding


def neighbours(kind):
    """(stored form of n equal values, spacing of that form's numbers around 1.25)."""
    return (lambda numel: Plain(torch.zeros(numel, dtype=torch.bfloat16)), 2.0**-7) if kind == "bf16" else (scaled, 2.0**-10)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("fraction", [0.0, 1 / 64, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_goes_to_a_neighbour_with_the_right_probability(kind, fraction, sign):
    build, spacing = neighbours(kind)
    numel = 1 << 16
    value = torch.tensor(sign * (1.25 + fraction * spacing))
    fraction = (abs(value.item()) - 1.25) / spacing
    values = value.repeat(numel)
    stored = build(numel)
    stored.write(0, values.clone(), BITS.bits("main_param", "w", 3, 0, values))
    steps = (stored.values().abs() - 1.25) / spacing
    assert bool(((steps == 0) | (steps == 1)).all()) and bool((stored.values() * sign > 0).all())
    deviation = math.sqrt(numel * fraction * (1 - fraction))
    assert abs(steps.sum().item() - numel * fraction) <= 5 * deviation


def test_small_fp16_numbers_of_a_row_are_rounded_without_bias_too():
    numel = 1 << 15
    values = torch.full((numel,), 3.3 * 2.0**-38)  # between fp16's last multiples, in rows whose largest number is 1
    values[::32] = 1.0
    stored = scaled(numel)
    stored.write(0, values.clone(), BITS.bits("exp_avg", "w", 3, 0, values))
    steps = (stored.values() * 2.0**38)[torch.arange(numel) % 32 != 0]
    assert set(steps.unique().tolist()) == {3.0, 4.0}
    assert abs(steps.mean().item() - 3.3) <= 5 * math.sqrt(0.21 / steps.numel())


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_numbers_of_the_form_itself_never_change(kind):
    build, _ = neighbours(kind)
    stored = build(4096)
    stored.assign(random_values(4096, spread=4.0))
    exact = stored.values().float().clone()
    for step in range(5):
        stored.write(0, exact.clone(), BITS.bits("exp_avg", "w", step, 0, exact))
        assert torch.equal(stored.values().float(), exact)


def test_bits_depend_on_seed_step_name_and_position_alone():
    like = torch.empty(1 << 14)
    bits = BITS.bits("exp_avg", "w", 1, 0, like)
    parts = [BITS.bits("exp_avg", "w", 1, start, like[start : start + 4096]) for start in range(0, like.numel(), 4096)]
    assert torch.equal(torch.cat(parts), bits)
    others = [
        Rounding(8).bits("exp_avg", "w", 1, 0, like),
        BITS.bits("exp_avg_sq", "w", 1, 0, like),
        BITS.bits("exp_avg", "v", 1, 0, like),
        BITS.bits("exp_avg", "w", 2, 0, like),
        BITS.bits("exp_avg", "w", 1, 1, like),
    ]
    for other in others:
        for bit in range(16):
            alike = ((bits >> bit) & 1) == ((other >> bit) & 1)
            assert abs(alike.float().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(like.numel())
    assert bool((bits >= 0).all()) and bool((bits < 1 << 16).all())
    counts = torch.bincount(bits >> 10, minlength=64).double()
    expected = like.numel() / 64
    chi_square = ((counts - expected).square() / expected).sum().item()
    assert abs(chi_square - 63) < 5 * math.sqrt(2 * 63)


# What is kept


@pytest.mark.parametrize(
    ("options", "dtype", "forms", "nbytes"),
    [
        ({}, torch.float32, ("model", "fp32", "fp32"), 0 + 400 + 400),
        ({"bf16": True}, torch.bfloat16, ("remainder", "fp32", "fp32"), 200 + 400 + 400),
        ({"bf16": True, "store_param_remainders": False}, torch.bfloat16, ("fp32", "fp32", "fp32"), 1200),
        ({"bf16": True, "main_params_dtype": "bf16", "exp_avg_dtype": "bf16"}, torch.bfloat16, ("model", "bf16", "fp32"), 200 + 400),
        ({"fp16": True, "main_params_dtype": "fp16", "exp_avg_sq_dtype": "fp16"}, torch.float16, ("fp16", "fp32", "fp16"), 204 + 400 + 204),
        ({"fp16": True, "main_params_dtype": "bf16"}, torch.float16, ("bf16", "fp32", "fp32"), 200 + 400 + 400),
        ({"bf16": True, "exp_avg_dtype": "fp16"}, torch.float32, ("model", "fp16", "fp32"), 204 + 400),
    ],
)
def test_forms_and_bytes_of_a_hundred_elements(options, dtype, forms, nbytes):
    config = OptimizerConfig(use_precision_aware_optimizer=True, **options)
    names = ("main_param", "exp_avg", "exp_avg_sq")
    assert tuple(form_of(config, name, dtype) for name in names) == forms
    assert sum(bytes_of(config, name, dtype, 100) for name in names) == nbytes
