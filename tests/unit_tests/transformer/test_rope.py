"""Rotary positions: table precision, true positions of packed documents, both layouts, gradients (R21)."""

import pytest
import torch

from megatron.core.errors import ConfigError
from megatron.core.transformer.rope import RotaryTable, rotate, split_and_rotate
from tests.harness.t0 import t0_transformer_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("head_dim", [8, 64])
def test_table_of_a_bf16_model_has_1024_different_rows(head_dim: int) -> None:
    table = RotaryTable(t0_transformer_config(kv_channels=head_dim, bf16=True), 1024).table(CPU, torch.bfloat16)
    assert table.dtype == torch.float32
    assert len(torch.unique(table, dim=0)) == 1024


def test_table_is_as_exact_as_its_dtype_at_far_positions() -> None:
    rotary = RotaryTable(t0_transformer_config(), 100_000)
    wide, narrow = rotary.table(CPU, torch.float64), rotary.table(CPU, torch.float32)
    assert float((wide - narrow).abs().max()) <= 2**-24


def test_packed_positions_pick_rows_of_the_table_per_token() -> None:
    rotary = RotaryTable(t0_transformer_config(), 16)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]])
    cos, _ = rotary.cos_sin(positions, 8, CPU, torch.float32)
    plain, _ = rotary.cos_sin(None, 8, CPU, torch.float32)
    assert torch.equal(cos[4:, 0], cos[:4, 0])
    assert torch.equal(cos[:, 1:2], plain)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_only(interleaved: bool) -> None:
    rotary = RotaryTable(t0_transformer_config(rotary_interleaved=interleaved), 64)
    query, key = torch.randn(2, 1, 1, 1, 1, 8, dtype=torch.float64)

    def score(at: int, other: int) -> torch.Tensor:
        turned = []
        for x, position in ((query, at), (key, other)):
            cos, sin = rotary.cos_sin(torch.tensor([[position]]), 1, CPU, torch.float64)
            turned.append(rotate(x, cos, sin, interleaved))
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(5, 2), score(63, 60))
    assert abs(score(5, 2) - score(5, 3)) > 1e-3


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [0.5, 1.0])
@pytest.mark.parametrize("heads_per_group", [1, 2])
def test_fused_split_and_rotation_equal_the_plain_one_with_gradients(
    interleaved: bool, percent: float, heads_per_group: int
) -> None:
    rotary = RotaryTable(t0_transformer_config(rotary_percent=percent), 16)
    positions = torch.randint(16, (2, 3))
    cos, sin = rotary.cos_sin(positions, 3, CPU, torch.float64)
    mixed = torch.randn(3, 2, 2, heads_per_group + 2, 8, dtype=torch.float64, requires_grad=True)
    query, key, value = split_and_rotate(mixed, cos, sin, interleaved)
    expected = rotate(mixed[..., : heads_per_group + 1, :], cos, sin, interleaved)
    torch.testing.assert_close(torch.cat((query, key), dim=3), expected, rtol=1e-14, atol=1e-14)  # one rounding more or less
    assert torch.equal(value, mixed[..., heads_per_group + 1 :, :])
    assert torch.autograd.gradcheck(lambda x: split_and_rotate(x, cos, sin, interleaved), (mixed,))


def test_bf16_is_rotated_in_fp32_and_rounded_once() -> None:
    rotary = RotaryTable(t0_transformer_config(), 1024)
    cos, sin = rotary.cos_sin(torch.tensor([[1000, 1001]]), 2, CPU, torch.bfloat16)
    mixed = torch.randn(2, 1, 2, 4, 8).bfloat16()
    query, key, _ = split_and_rotate(mixed, cos, sin, False)
    assert torch.equal(query, rotate(mixed[..., :2, :].float(), cos, sin, False).bfloat16())
    assert torch.equal(key, rotate(mixed[..., 2:3, :].float(), cos, sin, False).bfloat16())


def test_impossible_scaling_is_refused() -> None:
    with pytest.raises(ConfigError, match="rotary_base above 1"):
        t0_transformer_config(rope_scaling_type="yarn", rotary_base=1.0)
    with pytest.raises(ConfigError, match="must be above rope_llama3_low_freq_factor"):
        t0_transformer_config(rope_scaling_type="llama3", rope_llama3_high_freq_factor=1.0)
