"""FLOPs follow the real architecture; peaks are the dense ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from megatron.training.flops import flops_per_token, known_peak_tflops, peak_tflops
from tests.harness.t0 import PADDED_VOCAB_SIZE, SEQ_LENGTH, t0_transformer_config


def test_t0_needs_34013184_flops_per_step() -> None:
    per_token = flops_per_token(t0_transformer_config(), SEQ_LENGTH, PADDED_VOCAB_SIZE)
    assert per_token == 88_576 * 3
    assert per_token * 8 * SEQ_LENGTH == 34_013_184


def test_t0_with_the_causal_half_needs_32440320_flops_per_step() -> None:
    per_token = flops_per_token(t0_transformer_config(), SEQ_LENGTH, PADDED_VOCAB_SIZE, causal=True)
    assert per_token * 8 * SEQ_LENGTH == 32_440_320


def test_recompute_does_not_change_model_flops() -> None:
    plain = flops_per_token(t0_transformer_config(), SEQ_LENGTH, PADDED_VOCAB_SIZE)
    recomputed = t0_transformer_config(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert flops_per_token(recomputed, SEQ_LENGTH, PADDED_VOCAB_SIZE) == plain


def test_sliding_window_counts_its_width() -> None:
    windowed = flops_per_token(t0_transformer_config(window_size=4), 16, PADDED_VOCAB_SIZE)
    assert windowed == flops_per_token(t0_transformer_config(), 16, PADDED_VOCAB_SIZE) - 3 * 4 * (4 * 4 * 8 * 12)
    wide = flops_per_token(t0_transformer_config(window_size=99), 16, PADDED_VOCAB_SIZE)
    assert wide == flops_per_token(t0_transformer_config(), 16, PADDED_VOCAB_SIZE)


@settings(deadline=None)
@given(
    layers=st.integers(1, 3),
    groups=st.integers(1, 3),
    queries=st.integers(1, 3),
    head=st.integers(1, 6),
    hidden=st.integers(1, 12),
    ffn=st.integers(1, 12),
    gated=st.booleans(),
    seq=st.integers(1, 8),
    vocab=st.integers(1, 20),
)
def test_forward_flops_equal_the_matrix_products_that_torch_counts(
    layers: int, groups: int, queries: int, head: int, hidden: int, ffn: int, gated: bool, seq: int, vocab: int
) -> None:
    heads = groups * queries
    config = t0_transformer_config(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=head,
        ffn_hidden_size=ffn,
        activation_func="swiglu" if gated else "gelu",
        position_embedding_type="none",
    )
    with FlopCounterMode(display=False) as counter:
        hidden_states = torch.zeros(seq, hidden)
        for _ in range(layers):
            hidden_states @ torch.zeros(hidden, (heads + 2 * groups) * head)
            scores = torch.zeros(heads, seq, head) @ torch.zeros(heads, head, seq)
            scores @ torch.zeros(heads, seq, head)
            torch.zeros(seq, heads * head) @ torch.zeros(heads * head, hidden)
            hidden_states @ torch.zeros(hidden, ffn * (2 if gated else 1))
            torch.zeros(seq, ffn) @ torch.zeros(ffn, hidden)
        hidden_states @ torch.zeros(hidden, vocab)
    assert flops_per_token(config, seq, vocab) * seq == 3 * counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756.0, 51.2),
        ("NVIDIA H100 NVL", 835.5, 60.0),
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA B200", 2250.0, 75.0),
        ("NVIDIA GB200", 2500.0, 80.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA A10", 125.0, 31.2),
        ("NVIDIA A10G", 70.0, 31.5),
        ("NVIDIA L40S", 362.0, 91.6),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("AMD Instinct MI300X", 1307.4, 163.4),
    ],
)
def test_known_devices_have_their_dense_peak(name: str, bf16: float, fp32: float) -> None:
    assert known_peak_tflops(name, torch.bfloat16) == bf16
    assert known_peak_tflops(name, torch.float16) == bf16
    assert known_peak_tflops(name, torch.float32) == fp32


def test_tf32_counts_where_torch_may_use_it() -> None:
    assert known_peak_tflops("NVIDIA H100 80GB HBM3", torch.float32, allow_tf32=True) == 494.7


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "Some Future Accelerator"])
def test_peak_of_a_slice_or_an_unlisted_device_is_unknown(name: str) -> None:
    assert known_peak_tflops(name, torch.bfloat16) is None


def test_the_users_peak_wins() -> None:
    assert peak_tflops(torch.device("cpu"), torch.float32, 123.0) == 123.0


def test_cpu_peak_is_measured_once() -> None:
    measured = peak_tflops(torch.device("cpu"), torch.float32)
    assert measured is not None
    assert 1e-4 < measured < 1e3
    assert peak_tflops(torch.device("cpu"), torch.float32) is measured
